"""Every ordered pair of eight meshes: what one saved, another loads bit for bit, and computes the same loss from.

The meshes change tp, pp, virtual stages, cp, ep, dp and the ZeRO level; a change of recipe is `test_fp8_checkpoints`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megafp8.checkpoint import load_tensors
from megafp8.train.config import RunConfig
from megafp8.train.setup import Parts, assemble, make_mesh
from megafp8.train.state import load_newest_run, save_run, tensors_of
from megafp8.train.step import train_step
from tests.distributed.ranks import run_ranks
from tests.distributed.small_run import MODEL, Tokens, run_config, whole

SIZES = {
    **MODEL, "num_layers": 4, "vocab_size": 61, "tied_embeddings": True,
    "moe": {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 12, "score": "sigmoid", "bias_update_rate": 0.01,
            "aux_loss": "sequence", "aux_loss_coeff": 0.1, "first_dense_layers": 1},
}  # fmt: skip
MESHES: dict[str, tuple[int, dict[str, Any]]] = {
    "one process": (1, {}),
    "dp2, ZeRO-1": (2, {"dp": 2, "dp_shard": "optimizer"}),
    "dp2, ZeRO-3": (2, {"dp": 2, "dp_shard": "full"}),
    "tp2, sequence parallel": (2, {"tp": 2, "sequence_parallel": True}),
    "pp2, two virtual stages": (2, {"pp": 2, "virtual_stages": 2}),
    "cp2, ZeRO-1": (2, {"cp": 2, "dp_shard": "optimizer"}),
    "dp2 ep2, ZeRO-1": (2, {"dp": 2, "ep": 2, "dp_shard": "optimizer"}),
    "pp2 tp2 ep2": (4, {"pp": 2, "tp": 2, "ep": 2, "etp": 1}),
}


def config_of(mesh: str, folder: Path) -> RunConfig:
    return run_config(
        run={"dir": str(folder)}, model=SIZES, precision={"dtype": "fp32"}, parallel=MESHES[mesh][1],
        optimizer={"lr": 1e-3, "min_lr": 1e-3},
    )  # fmt: skip


def parts_of(config: RunConfig, world: int) -> Parts:
    torch.set_num_threads(1)
    mesh = make_mesh(config, world)
    return assemble(config, mesh, torch.device("cpu"), Tokens(config, mesh), corpus={"fingerprint": "made"})


def saved(rank: int, world: int, config: RunConfig) -> float:
    """Two steps, a save, and the loss of the third step's samples."""
    parts = parts_of(config, world)
    for step in (1, 2):
        train_step(parts, step, 1e-3)
    save_run(parts, 2, {})
    return train_step(parts, 3, 1e-3).loss


def loaded(rank: int, world: int, configs: list[RunConfig]) -> list[tuple[dict[str, np.ndarray], float]]:
    """For each: all state as loaded, and the loss of the third step's samples before they change anything."""
    found = []
    for config in configs:
        parts = parts_of(config, world)
        load_newest_run(parts)
        state = whole(*tensors_of(parts), parts.mesh)
        found.append((state, train_step(parts, 3, 1e-3).loss))
    return found


@pytest.mark.slow
def test_all_ordered_pairs_of_eight_meshes(tmp_path):
    folders = {mesh: tmp_path / str(number) for number, mesh in enumerate(MESHES)}
    losses = {mesh: run_ranks(saved, MESHES[mesh][0], config_of(mesh, folders[mesh]))[0] for mesh in MESHES}
    states = {mesh: load_tensors(folders[mesh] / "checkpoints" / "step_00000002") for mesh in MESHES}
    pairs = 0
    for target, (world, _) in MESHES.items():
        found = run_ranks(loaded, world, [config_of(target, folders[source]) for source in MESHES])[0]
        for source, (state, loss) in zip(MESHES, found):
            assert state.keys() == states[source].keys()
            for name, tensor in states[source].items():
                assert np.array_equal(state[name], tensor.numpy()), f"{source} -> {target}: {name}"
            # fp32 sums in another order, forward only
            assert loss == pytest.approx(losses[source], rel=1e-6), f"{source} -> {target}"
            pairs += source != target
    assert pairs == 56
