"""What a layer keeps on each of two tensor-parallel ranks: the closed forms, with and without sequence parallelism."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megafp8.models import ModelConfig
from megafp8.models.activations import Workload
from megafp8.models.builder import build
from megafp8.models.memory import _elements_of
from megafp8.models.stages import whole
from megafp8.nn.precision import PrecisionConfig
from megafp8.parallel.mesh import build_mesh
from megafp8.parallel.mesh_config import ParallelConfig
from tests.distributed.ranks import run_ranks
from tests.layers_kept import layer_bytes
from tests.unit.models.test_memory import MODELS

CASES = [
    ("llama", True, "none", "none"), ("llama", False, "none", "none"), ("llama", True, "none", "selective"),
    ("llama", True, "none", "full"), ("llama", True, "delayed", "none"), ("gpt", True, "none", "none"),
    ("gpt", False, "none", "none"), ("latent", True, "none", "none"), ("mixtral", True, "none", "none"),
]  # fmt: skip


def measure(rank: int, world: int) -> list[tuple[int, int, int, int]]:
    """For each case: bytes measured and by the formula, elements built and by the formula."""
    torch.set_num_threads(1)
    results = []
    for name, sequence_parallel, recipe, recompute in CASES:
        experts = {"ep": world, "etp": 1} if name == "mixtral" else {}
        parallel = ParallelConfig(tp=world, sequence_parallel=sequence_parallel, **experts)
        config = ModelConfig(**MODELS[name], num_layers=2, max_sequence_length=64)
        mesh = build_mesh(parallel, world, kv_heads=config.num_kv_heads)
        precision = PrecisionConfig(recipe=recipe)  # type: ignore[arg-type]
        work = Workload(
            2, 64, parallel=parallel, world=world, precision=precision, recompute=recompute, attention="blocked"
        )
        kept, formula = layer_bytes(MODELS[name], work, mesh)
        built = sum(p.numel() for p in build(config, mesh=mesh, device="meta").parameters())
        results.append((kept, formula, built, sum(_elements_of(config, work, [whole(config)]))))
    return results


@pytest.fixture(scope="module")
def ranks() -> Any:
    return run_ranks(measure, 2)


@pytest.mark.parametrize("number", range(len(CASES)), ids=["-".join(map(str, case)) for case in CASES])
def test_a_rank_keeps_what_the_formula_says(ranks: Any, number: int) -> None:
    """Experts' rows are spread unevenly over the ranks, so there it is the sum over the ranks that is held."""
    results = [result[number] for result in ranks]
    kept, formula = (sum(result[i] for result in results) for i in (0, 1))
    assert kept == pytest.approx(formula, rel=0.02)
    for result in results:
        if CASES[number][0] != "mixtral":
            assert result[0] == pytest.approx(result[1], rel=0.02)
        assert result[2] == result[3]
