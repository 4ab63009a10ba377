"""Context parallelism by every exchange gives what one process gives: loss, logits and every gradient; and the ring's
messages are under way while it computes, with the same work on every rank.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megafp8.core.layout import layout_of
from megafp8.core.rng import fill_normal_, seed_for
from megafp8.models import ModelConfig, build
from megafp8.nn.layers import DropoutKey
from megafp8.parallel.collectives import all_gather, all_reduce_
from megafp8.parallel.mesh import Mesh, build_mesh
from megafp8.parallel.mesh_config import ParallelConfig
from tests.distributed.ranks import run_ranks

Values = dict[str, Any]
LENGTH = 32
SMALL: Values = {
    "num_layers": 2, "hidden_size": 32, "ffn_hidden_size": 48, "num_attention_heads": 8, "num_kv_heads": 4,
    "vocab_size": 64, "max_sequence_length": LENGTH, "init_std": 0.3,
}  # fmt: skip
LATENT: Values = {
    "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6,
}  # fmt: skip
MODELS: dict[str, Values] = {
    "packed": {"family": "llama", **SMALL},
    "whole": {"family": "llama", "tied_embeddings": True, **SMALL, "num_kv_heads": 2},
    "qwen3": {"family": "qwen3", "head_dim": 8, **SMALL},
    "latent": {"family": "llama", **SMALL, "num_kv_heads": 8, "mla": LATENT},
    "gpt": {"family": "gpt", **SMALL, "num_kv_heads": 8},
    "dropout": {"family": "gpt", "hidden_dropout": 0.2, "attention_dropout": 0.2, **SMALL, "num_kv_heads": 4},
    "packed_dropout": {"family": "llama", "attention_dropout": 0.2, **SMALL},
}
EXCHANGES = ("ring", "all_gather", "all_to_all")

# fp64 sums of a few thousand terms in another order: 1e3 * 2^-53 = 1e-13 relative to the largest terms; the norm
# of a gradient can lie 10^2 below those by cancellation. A wrong or missing exchange shows at 1e-1.
TOLERANCE = 1e-10


def batch(size: int) -> dict[str, torch.Tensor]:
    """Packed documents of odd lengths: some within a chunk, some over several ranks, one of a single token."""
    tokens = torch.randint(0, 64, (size, LENGTH), generator=torch.Generator().manual_seed(5))
    targets = tokens.roll(-1, 1)
    targets[:, -1] = -100
    targets[0, 3:6] = -100
    borders = torch.tensor([[7, 8, 21], [3, 17, 30], [0, 0, 0]])[:size]
    segments = (torch.arange(LENGTH)[None, :, None] >= borders[:, None]).sum(-1)
    starts = torch.stack([(row[:, None] == row).float().argmax(-1) for row in segments])
    return {"tokens": tokens, "targets": targets, "segment_ids": segments, "positions": torch.arange(LENGTH) - starts}


def disturb(model: torch.nn.Module, mesh: Mesh) -> None:
    """Norm weights and biases off their initial 1 and 0, by global name, so that a mix-up of elements shows."""
    for name, param in model.named_parameters():
        if param.dim() == 1:
            mean = 1.0 if "norm.weight" in name else 0.0
            fill_normal_(param.data, seed=seed_for(7, name), layout=layout_of(param), mesh=mesh, std=0.3, mean=mean)


def whole(gradient: torch.Tensor, layout: Any, mesh: Mesh) -> torch.Tensor:
    gradient = all_reduce_(gradient.clone(), mesh.group_of(("cp", *layout.grad_sum)))
    for dim, axis in layout.split.items():
        gradient = all_gather(gradient, mesh.group(axis), dim)
    return gradient


def outcome(
    rank: int, world: int, sizes: dict[str, int], exchanges: tuple[str, ...], recompute: str, micro: int, dtype: Any
) -> dict[str, dict[str, Any]]:
    """Loss, targets, logits and whole gradients of every model, by exchange."""
    results: dict[str, dict[str, Any]] = {}
    for exchange in exchanges:
        results[exchange] = {}
        for name, values in MODELS.items():
            config = ModelConfig(**values)
            parallel = ParallelConfig(**sizes, cp_exchange=exchange)
            mesh = build_mesh(parallel, world, kv_heads=config.num_kv_heads)
            model = build(config, mesh=mesh, dtype=dtype, recompute=recompute)
            disturb(model, mesh)
            results[exchange][name] = run(model, mesh, name, micro)
    return results


def run(model: Any, mesh: Mesh, name: str, micro: int) -> tuple[float, int, Any, dict[str, Any]]:
    inputs = batch(micro)
    if "packed" not in name:
        del inputs["segment_ids"], inputs["positions"]
    key = DropoutKey(11, torch.tensor([3, 8, 5])[:micro]) if model.has_dropout else None
    loss, count = model(**inputs, loss_scale=0.5, dropout=key)
    (loss * 0.5).backward()
    total = all_reduce_(loss.detach().clone(), mesh.group("cp"))
    count = all_reduce_(count.clone(), mesh.group("cp"))
    with torch.no_grad():
        logits = model(inputs["tokens"])
    gradients = {n: whole(p.grad, layout_of(p), mesh).numpy() for n, p in model.named_parameters()}
    return total.item(), int(count), logits.numpy(), gradients


@pytest.fixture(scope="module")
def alone() -> dict[int, dict[str, Any]]:
    """One process, for micro-batches of 1 and 3."""
    return {
        micro: run_ranks(outcome, 1, {}, ("ring",), "none", micro, torch.float64)[0]["ring"] for micro in (1, 3)
    }


@pytest.mark.parametrize("cp, tp, recompute, micro", [
    (2, 1, "none", 3), (4, 1, "selective", 1), (2, 2, "full", 3),
])  # fmt: skip
def test_equals_one_process(alone: dict[int, dict[str, Any]], cp: int, tp: int, recompute: str, micro: int) -> None:
    for results in run_ranks(outcome, cp * tp, {"cp": cp, "tp": tp}, EXCHANGES, recompute, micro, torch.float64):
        for exchange, by_model in results.items():
            for name, result in by_model.items():
                assert_equal(result, alone[micro][name], TOLERANCE, f"{exchange} {name}")


def assert_equal(result: tuple[Any, ...], expected: tuple[Any, ...], tolerance: float, where: str) -> None:
    loss, count, logits, gradients = result
    assert count == expected[1], where
    assert loss == pytest.approx(expected[0], rel=tolerance), where
    assert relative(logits, expected[2]) < tolerance, where
    assert gradients.keys() == expected[3].keys()
    for parameter, gradient in gradients.items():
        assert gradient.shape == expected[3][parameter].shape
        assert relative(gradient, expected[3][parameter]) < tolerance, (where, parameter)


def relative(got: Any, expected: Any) -> float:
    got, expected = torch.from_numpy(got).double(), torch.from_numpy(expected).double()
    return float((got - expected).norm() / expected.norm())
