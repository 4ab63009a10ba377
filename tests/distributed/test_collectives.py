"""Collectives against arithmetic done in one process, and each autograd pair against its definition."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from megafp8.parallel import collectives as c
from megafp8.parallel.mesh import Mesh, build_mesh
from megafp8.parallel.mesh_config import ParallelConfig
from tests.distributed.ranks import run_ranks

DTYPES = [torch.float64, torch.float32, torch.bfloat16]


def piece(rank: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 + rank)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def plain(rank: int, world: int) -> None:
    group = dist.group.WORLD
    for dtype in DTYPES:
        pieces = [piece(r, (8, 3, 4), dtype) for r in range(world)]
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        # Two ranks: one addition in the wide type, exact up to its one rounding, so bits agree. Four: the
        # all-reduce may add in another order; three additions of numbers below 4*5 each err at most eps/2 *
        # 20, then one rounding to the narrow type, which can turn that into one of its own units (eps * 16
        # at magnitude <= 16).
        exact = sum(p.to(wide) for p in pieces).to(dtype)
        slack = 0.0 if world == 2 else 3 * torch.finfo(wide).eps * 10 + (0 if dtype == wide else 2**-8 * 16)
        total = c.all_reduce_(pieces[rank].clone(), group)
        assert total.dtype == dtype and (total - exact).abs().max() <= slack
        for dim in (0, 2, -1, -3):
            mine = c.reduce_scatter(pieces[rank], group, dim)
            assert mine.is_contiguous() and torch.equal(
                mine, exact.chunk(world, dim)[rank]
            )  # rank order: exact
            for other in (pieces[rank], pieces[rank].transpose(0, 2).contiguous().transpose(0, 2)):
                assert torch.equal(c.all_gather(other, group, dim), torch.cat(pieces, dim))
    assert c.all_reduce_(torch.tensor([rank]), group, "max").item() == world - 1
    assert c.all_reduce_(torch.tensor([rank]), group, "min").item() == 0
    for source in range(world):
        assert c.broadcast_(torch.full((2,), float(rank)), group, source).tolist() == [source] * 2


def narrow_sum(rank: int, world: int) -> None:
    # 256 + 1 + 1 + 1 = 259 rounds to 260 in bf16 (8 bits: spacing 2 above 256), but bf16 additions stay at
    # 256.
    x = torch.full((64,), 256.0 if rank == 0 else 1.0, dtype=torch.bfloat16)
    assert c.all_reduce_(x.clone(), dist.group.WORLD).eq(260).all()
    assert c.all_reduce_(x[:63].clone(), dist.group.WORLD).eq(260).all()  # does not divide by 4
    assert c.reduce_scatter(x, dist.group.WORLD).eq(260).all()


def fp8_bytes(rank: int, world: int) -> None:
    x = (torch.arange(6).view(2, 3) + rank).to(torch.float8_e4m3fn)
    every = c.all_gather(x, dist.group.WORLD, 0)
    assert every.dtype == x.dtype
    assert torch.equal(every.float(), torch.cat([torch.arange(6.0).view(2, 3) + r for r in range(world)]))
    assert torch.equal(c.broadcast_(x, dist.group.WORLD, 1).float(), torch.arange(6.0).view(2, 3) + 1)


def pairs(rank: int, world: int) -> None:
    mesh = build_mesh(ParallelConfig(tp=world), world)
    shape = (8, 2, 4)
    inputs, seeds = [piece(r, shape) for r in range(world)], [piece(50 + r, shape) for r in range(world)]

    def run(function, *dim):
        x = inputs[rank].clone().requires_grad_()
        y = function(x, mesh, "tp", *dim)
        seed = [piece(70 + r, tuple(y.shape)) for r in range(world)]
        y.backward(seed[rank])
        return y.detach(), x.grad, seed

    def near(a, b):  # sums of <= 4 fp64 numbers below 20: 3 roundings of 2**-53 * 20
        assert (a - b).abs().max() <= 3 * 2**-53 * 20

    y, grad, seed = run(c.copy_to)
    assert torch.equal(y, inputs[rank])
    near(grad, sum(seed))
    y, grad, seed = run(c.reduce_from)
    near(y, sum(inputs))
    assert torch.equal(grad, seed[rank])
    for dim in (0, 2):
        y, grad, seed = run(c.gather_from, dim)
        assert torch.equal(y, torch.cat(inputs, dim))
        near(grad, sum(seed).chunk(world, dim)[rank])
        y, grad, seed = run(c.scatter_to, dim)
        near(y, sum(inputs).chunk(world, dim)[rank])
        assert torch.equal(grad, torch.cat(seed, dim))
        y, grad, seed = run(c.split_to, dim)
        assert torch.equal(y, inputs[rank].chunk(world, dim)[rank])
        assert torch.equal(grad, torch.cat(seed, dim))
        y, grad, seed = run(c.join_from, dim)
        assert torch.equal(y, torch.cat(inputs, dim))
        assert torch.equal(grad, seed[rank].chunk(world, dim)[rank])
    assert torch.equal(seeds[rank], piece(50 + rank, shape))


def as_on_a_gpu(rank: int, world: int) -> None:
    """The calls that NCCL gets, served by gloo: same shapes and results (fp64, where both sum alike)."""
    c._by_library = lambda tensor: True
    pairs(rank, world)
    fp8_bytes(rank, world)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("check", [plain, narrow_sum, fp8_bytes, pairs, as_on_a_gpu])
def test_over_ranks(check, world):
    if check is narrow_sum and world == 2:
        world = 4  # the sum above needs four
    run_ranks(check, world)


def test_alone_everything_is_the_identity():
    x, mesh = torch.ones(2, 4), Mesh.single()
    for function in (c.copy_to, c.reduce_from):
        assert function(x, mesh, "tp") is x
    for function in (c.gather_from, c.scatter_to, c.split_to, c.join_from):
        assert function(x, mesh, "tp", 0) is x
    assert c.all_reduce_(x, None) is x and c.all_gather(x, None) is x and c.reduce_scatter(x, None) is x
    assert c.start_all_reduce_(x, None) is None and c.broadcast_(x, None) is x


def mesh_of_four(rank: int, world: int) -> tuple:
    mesh = build_mesh(ParallelConfig(tp=2), world)
    sums = {}
    for axes in (("tp",), ("dp",), ("dp", "tp"), ("tp", "dp", "pp")):
        sums[axes] = c.all_reduce_(torch.tensor([2.0**rank]), mesh.group_of(axes)).item()
    assert mesh.group("pp") is None and mesh.group_of(("pp", "cp")) is None
    return sums, (mesh.coord("dp"), mesh.coord("tp")), mesh.sequence_parallel, str(mesh)


def test_groups_reach_the_right_ranks():
    results = run_ranks(mesh_of_four, 4)
    assert [r[1] for r in results] == [(0, 0), (0, 1), (1, 0), (1, 1)]  # tp fastest
    assert [r[0][("tp",)] for r in results] == [3, 3, 12, 12]
    assert [r[0][("dp",)] for r in results] == [5, 10, 5, 10]
    assert all(r[0][("dp", "tp")] == r[0][("tp", "dp", "pp")] == 15 for r in results)
    assert all(r[2] for r in results)
    assert results[3][3] == "Mesh(pp=1 dp=2 cp=1 tp=2 ep=1; rank 3 of 4 at dp=1 tp=1)"


def one_hangs(rank: int, world: int) -> None:
    if rank == 0:
        dist.barrier()
    while rank == 1:
        time.sleep(0.01)


def one_raises(rank: int, world: int) -> None:
    if rank == 1:
        raise ValueError("the odd one")
    dist.barrier()


def test_a_hang_shows_every_stack():
    with pytest.raises(AssertionError) as caught:
        run_ranks(one_hangs, 2, timeout=5)
    assert "rank 0 was still running" in str(caught.value) and "rank 1 was still running" in str(caught.value)
    assert str(caught.value).count("in one_hangs") == 2


def test_a_rank_that_raises_is_named():
    begin = time.monotonic()
    with pytest.raises(AssertionError, match=r"rank 1 raised:\n(.|\n)*the odd one"):
        run_ranks(one_raises, 2)
    assert time.monotonic() - begin < 30  # not the 60 s of a hang
