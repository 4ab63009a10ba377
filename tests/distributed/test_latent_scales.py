"""A linear that tp ranks have whole, on sequence shards in FP8: one scale on all of them, as one process has."""

from __future__ import annotations

from typing import Any

import torch

from megafp8.fp8.backend import backend
from megafp8.fp8.linear import LinearState
from megafp8.fp8.recipe import recipe
from megafp8.nn.mla import ReplicatedLinear
from megafp8.nn.parameter import materialize
from megafp8.parallel.collectives import all_gather, all_reduce_
from megafp8.parallel.mesh import Mesh, build_mesh
from megafp8.parallel.mesh_config import ParallelConfig
from tests.distributed.ranks import run_ranks


def outcome(rank: int, world: int) -> Any:
    """Whole output, input gradient and weight gradient with current scaling; the tokens' sizes differ over ranks."""
    torch.set_num_threads(1)
    mesh = build_mesh(ParallelConfig(tp=world), world) if world > 1 else Mesh.single()
    state = LinearState("l", recipe("current"), backend("emulated", "exact"))
    layer = ReplicatedLinear(32, 48, std=0.1, state=state, mesh=mesh, dtype=torch.float32)
    materialize(layer, mesh=mesh, seed=1, device="cpu")
    random = torch.Generator().manual_seed(0)
    x, g = (torch.randn(32, 1, n, generator=random) * torch.linspace(0.1, 3, 32)[:, None, None] for n in (32, 48))
    mine = slice(rank * 32 // world, (rank + 1) * 32 // world)
    x = x[mine].requires_grad_()
    y = layer(x)
    y.backward(g[mine])
    group = mesh.group("tp")
    assert x.grad is not None and layer.weight.grad is not None
    gathered = [all_gather(t.contiguous(), group) for t in (y.detach(), x.grad)]
    return [t.numpy() for t in (*gathered, all_reduce_(layer.weight.grad.clone(), group))]


def test_two_ranks_quantize_as_one_process() -> None:
    (alone,) = run_ranks(outcome, 1)
    for results in run_ranks(outcome, 2):
        for got, expected in zip(results, alone, strict=True):
            # equal codes; fp32 sums of 48 products in another order: 48 x 2^-24 = 3e-6 of the largest
            assert abs(got - expected).max() <= 3e-6 * abs(expected).max()
