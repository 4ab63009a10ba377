"""Norm and AdamW over ranks: elements count once, ranks agree, steps are those of one process."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from megafp8.core.layout import Layout, stamp
from megafp8.optim.adamw import AdamW
from megafp8.optim.clip import clip_scale, grad_norm
from megafp8.optim.config import OptimizerConfig
from megafp8.parallel.buckets import GradBuckets
from megafp8.parallel.mesh import Mesh, build_mesh
from megafp8.parallel.mesh_config import ParallelConfig
from megafp8.parallel.pieces import own_piece
from tests.distributed.ranks import run_ranks
from tests.distributed.test_checkpoint_meshes import MESHES, layouts_of, mesh_of, value

LAYOUTS = {
    "rows": Layout((8, 6), {0: "tp"}),
    "columns": Layout((6, 8), {1: "tp"}),
    "whole": Layout((5, 3)),
    "norm": Layout((6,), grad_sum=("tp",)),
}


def whole(name: str, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(LAYOUTS[name].shape, generator=generator, dtype=torch.float64)


def build(mesh: Mesh, dtype: torch.dtype) -> list[tuple[str, nn.Parameter]]:
    named = []
    for i, (name, layout) in enumerate(LAYOUTS.items()):
        param = nn.Parameter(whole(name, i)[layout.local_slices(mesh)].to(dtype).clone())
        stamp(param, layout)
        named.append((name, param))
    return named


def norms(rank: int, world: int, tp: int, broken_rank: int, broken: str) -> tuple[float, bool]:
    mesh = build_mesh(ParallelConfig(tp=tp), world) if world > 1 else Mesh.single()
    named = build(mesh, torch.float64)
    for i, (name, param) in enumerate(named):
        param.main_grad = whole(name, 10 + i)[LAYOUTS[name].local_slices(mesh)].clone()
        if (rank, name) == (broken_rank, broken):
            param.main_grad.view(-1)[0] = float("nan")
    return tuple(grad_norm(named, mesh))


@pytest.mark.parametrize(("world", "tp"), [(2, 1), (2, 2), (4, 2)])
def test_every_element_counts_once(world, tp):
    expected = torch.cat([whole(n, 10 + i).flatten() for i, n in enumerate(LAYOUTS)]).norm().item()
    results = run_ranks(norms, world, tp, -1, "")
    assert len(set(results)) == 1  # bit for bit the same everywhere
    # 117 squares, summed in another order: 117 roundings
    assert results[0] == (pytest.approx(expected, rel=117 * 2**-53), True)


def norm_on(rank: int, world: int, kind: str, frozen: str) -> tuple[float, bool]:
    """The norm on a mesh of any kind, from pieces of the same whole gradients; `frozen` parameters have none."""
    mesh, shard = mesh_of(kind, world)
    named = []
    for name, layout in layouts_of(mesh).items():
        param = nn.Parameter(torch.zeros(layout.local_shape(mesh)), requires_grad=name.split(".")[-2] != frozen)
        stamp(param, layout)
        named.append((name, param))
    GradBuckets(named, mesh, shard=shard)
    for name, param in named:
        if param.requires_grad:
            piece = own_piece(param)
            piece.grad.copy_(value(name, piece.layout)[piece.layout.local_slices(mesh)])
    return tuple(grad_norm(named, mesh))


@pytest.mark.parametrize("frozen", ["", "out"])
@pytest.mark.parametrize("kind", ["ep2 zero", "cp2 zero", "pp2 dp2 zero", "tp2 pp2 etp1"])
def test_every_element_counts_once_on_any_mesh(kind, frozen):
    trained = {n: s for n, s in layouts_of(Mesh.single()).items() if n.split(".")[-2] != frozen}
    expected = torch.cat([value(name, layout).double().flatten() for name, layout in trained.items()]).norm().item()
    results = run_ranks(norm_on, MESHES[kind][0], kind, frozen)
    assert len(set(results)) == 1
    # 6,000 squares of like size, summed in another order: their roundings add up as a random walk at the most
    assert results[0] == (pytest.approx(expected, rel=1e-13), True)


@pytest.mark.parametrize("name", ["whole", "columns"])
def test_one_broken_element_anywhere_is_seen_by_all(name):
    for rank in range(2):
        assert [finite for _, finite in run_ranks(norms, 4, 2, rank, name)] == [False] * 4


def steps(rank: int, world: int, tp: int) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Five clipped steps on 8 samples shared out over dp; local parameters and the norms."""
    mesh = build_mesh(ParallelConfig(tp=tp), world) if world > 1 else Mesh.single()
    named = build(mesh, torch.float64)
    config = OptimizerConfig(kernel="torch", lr=1e-2, clip_grad=1.0)
    buckets = GradBuckets(named, mesh)
    optimizer, seen = AdamW(named, config, mesh), []
    for step in range(5):
        buckets.zero_(contributions=8 // mesh.size("dp"))
        for sample in range(mesh.coord("dp"), 8, mesh.size("dp")):
            loss = torch.zeros((), dtype=torch.float64)
            for i, (name, param) in enumerate(named):
                weight = whole(name, 1000 * step + 10 * sample + i)
                if LAYOUTS[name].grad_sum:  # each tp rank contributes its share
                    weight = weight / mesh.size("tp")
                loss = loss + (torch.tanh(param) * weight[LAYOUTS[name].local_slices(mesh)]).sum()
            loss.backward()
        buckets.finish()
        norm = grad_norm(named, mesh)
        seen.append(norm.value)
        optimizer.step(1e-2, clip_scale(norm.value, config.clip_grad))
    return {name: param.detach().clone() for name, param in named}, seen


@pytest.mark.parametrize(("world", "tp"), [(2, 1), (2, 2), (4, 1), (4, 2)])
def test_five_steps_equal_one_process(world, tp):
    expected, expected_norms = steps(0, 1, 1)
    results = run_ranks(steps, world, tp)
    for rank, (params, seen) in enumerate(results):
        coord = rank % tp  # tp is fastest
        # Sums of 8 gradients in another order differ by 8 * 2**-53 = 1e-15 relative, Adam's step by as much
        # where |gradient| >> eps; 1e-12 leaves room for elements where the terms cancel to a thousandth.
        assert seen == pytest.approx(expected_norms, rel=1e-12) and seen == results[0][1]
        for name, found in params.items():
            split = next(iter(LAYOUTS[name].split), None)
            want = expected[name] if split is None else expected[name].chunk(tp, split)[coord]
            assert (found - want).abs().max() < 1e-12, name
