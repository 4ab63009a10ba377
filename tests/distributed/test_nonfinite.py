"""R178, R180: a value that is not finite in what one rank alone holds is seen by all, and leaves no trace in any."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megafp8.parallel.pieces import own_piece
from megafp8.train.setup import Parts
from megafp8.train.state import tensors_of
from megafp8.train.step import train_step
from tests.distributed.ranks import run_ranks
from tests.distributed.small_run import make_parts, run_config

EXPERTS = {"moe": {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 16, "bias_update_rate": 0.01}}
NAN, INF = float("nan"), float("inf")
# mesh, what of rank 1 breaks, and how
CASES: dict[str, tuple[dict[str, Any], str, float]] = {
    "tp": ({"tp": 2}, "layers.1.mlp.down.weight", INF),
    "norm": ({"tp": 2}, "layers.0.mlp_norm.weight", NAN),  # a copy that rank 0 counts
    "cp": ({"cp": 2}, "layers.0.attention.qkv.weight", NAN),
    "ep": ({"dp": 2, "ep": 2}, "layers.1.mlp.experts.down", INF),
    "optimizer": ({"dp": 2, "dp_shard": "optimizer"}, "layers.0.mlp.down.weight", NAN),
    "pp": ({"pp": 2, "tp": 2, "schedule": "zb_h1"}, "layers.0.attention.out.weight", INF),
}


def break_gradient(parts: Parts, name: str, value: float) -> None:
    """One element of this rank's gradient of `name`, after its sum over the ranks and before the norm."""
    param, finish = dict(parts.named_parameters)[name], parts.buckets.finish

    def finished() -> None:
        finish()
        own_piece(param).grad.view(-1)[-1] = value

    parts.buckets.finish = finished  # type: ignore[method-assign]


def broken(rank: int, world: int, mesh: dict[str, Any], victim: int, name: str, value: float) -> list[Any]:
    """Step 1 in order, step 2 broken, step 3 in order: which were taken, and what changed in each."""
    parts = make_parts(run_config(parallel=mesh, model=EXPERTS if "ep" in mesh else {}), world)
    finish, found = parts.buckets.finish, []
    for step in (1, 2, 3):
        before = {key: tensor.clone() for key, tensor in tensors_of(parts)[0].items()}
        weights = [param.detach().clone() for _, param in parts.named_parameters]
        parts.buckets.finish = finish  # type: ignore[method-assign]
        if step == 2 and rank == victim:
            break_gradient(parts, name, value)
        result = train_step(parts, step, 1e-2)
        parts.optimizer.wait()
        changed = [key for key, tensor in tensors_of(parts)[0].items() if not torch.equal(tensor, before[key])]
        moved = any(not torch.equal(a, b) for a, (_, b) in zip(weights, parts.named_parameters, strict=True))
        found.append((result.finite, bool(changed), moved, parts.optimizer.step_count))
    assert all(bool(torch.isfinite(tensor).all()) for tensor in tensors_of(parts)[0].values())
    return found


@pytest.mark.parametrize("case", CASES)
def test_one_ranks_gradient_stops_the_step_on_all(case: str) -> None:
    mesh, name, value = CASES[case]
    world = mesh.get("pp", 1) * mesh.get("dp", 1) * mesh.get("cp", 1) * mesh.get("tp", 1)
    taken, skipped, again = (True, True, True, 1), (False, False, False, 1), (True, True, True, 2)
    assert run_ranks(broken, world, mesh, 1, name, value) == [[taken, skipped, again]] * world


def poisoned(rank: int, world: int, mesh: dict[str, Any], victim: int) -> tuple[bool, bool]:
    """Whether a step was taken and a weight moved, when one rank's layer puts out a NaN."""
    parts = make_parts(run_config(parallel=mesh, model=EXPERTS if "ep" in mesh else {}), world)
    weights = [param.detach().clone() for _, param in parts.named_parameters]
    if rank == victim:
        mlp = parts.stages[-1].get_submodule("layers.1.mlp")
        mlp.register_forward_hook(lambda module, args, output: output.index_fill(0, torch.tensor([0]), torch.nan))
    result = train_step(parts, 1, 1e-2)
    return result.finite, any(not torch.equal(a, b) for a, (_, b) in zip(weights, parts.named_parameters, strict=True))


@pytest.mark.parametrize("mesh", [{"tp": 2}, {"cp": 2}, {"dp": 2, "ep": 2}, {"dp": 2, "dp_shard": "full"}], ids=str)
def test_one_ranks_activation_stops_the_step_on_all(mesh: dict[str, Any]) -> None:
    assert run_ranks(poisoned, 2, mesh, 1) == [(False, False)] * 2
