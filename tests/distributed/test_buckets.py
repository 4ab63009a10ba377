"""Gradient buckets: the same gradients on any number of replicas, reduced while backward still runs."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from megafp8.core.layout import Layout, stamp
from megafp8.parallel.buckets import GradBuckets
from megafp8.parallel.mesh import Mesh, build_mesh
from megafp8.parallel.mesh_config import ParallelConfig
from tests.distributed.ranks import run_ranks

WIDTH, GLOBAL_BATCH = 16, 16


class Net(nn.Module):
    """Embedding tied to the output, three layers, one parameter that may stay without gradient."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)

        def weight(*shape: int) -> nn.Parameter:
            return nn.Parameter((torch.randn(shape, generator=generator, dtype=torch.float64) / 4).to(dtype))

        self.embedding = weight(32, WIDTH)
        self.layers = nn.ParameterList(weight(WIDTH, WIDTH) for _ in range(3))
        self.unused = weight(WIDTH)
        self.output = self.embedding

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding[tokens]
        for layer in self.layers:
            x = torch.tanh(x @ layer.t())
        return torch.logsumexp(x @ self.output.t(), -1).sum()


def tokens() -> torch.Tensor:
    return torch.randint(0, 32, (GLOBAL_BATCH, 5), generator=torch.Generator().manual_seed(1))


def gradients(
    rank: int, world: int, steps: int, micro_batches: int, bucket_bytes: int, dtype: torch.dtype
) -> dict:
    """Main gradients of the last of `steps` equal steps, and the events of that step."""
    mesh = build_mesh(ParallelConfig(dp=world), world)
    net = Net(dtype)
    named = list(net.named_parameters(remove_duplicate=False))
    buckets = GradBuckets(named, mesh, bucket_bytes=bucket_bytes)
    mine = tokens().chunk(world)[rank].chunk(micro_batches)
    for _ in range(steps):
        buckets.zero_()
        for i, part in enumerate(mine):
            with nullcontext() if i == len(mine) - 1 else buckets.no_sync():
                net(part).backward()
        buckets.finish()
    assert all(p.grad is None for p in net.parameters())
    grads = {n: p.main_grad.clone() for n, p in net.named_parameters()}
    return {"grads": grads, "events": list(buckets.events), "num_buckets": buckets.num_buckets}


def by_autograd(dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    net = Net(dtype)
    net(tokens()).backward()
    return {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in net.named_parameters()}


SMALL = 2 * WIDTH * WIDTH * 8  # two layers in fp64


@pytest.mark.parametrize("micro_batches", [1, 4])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_same_gradients_on_any_number_of_replicas(world, micro_batches):
    expected = by_autograd()
    for result in run_ranks(gradients, world, 2, micro_batches, SMALL, torch.float64):
        for name, grad in result["grads"].items():
            # 80 token terms summed in another order: 80 * 2**-53 = 9e-15 of the sum of magnitudes, which is
            # well below 100 x the largest element.
            assert grad.dtype == torch.float64
            assert (grad - expected[name]).abs().max() <= 1e-12 * max(
                1.0, expected[name].abs().max().item()
            ), name
        assert result["grads"]["unused"].eq(0).all()


def test_all_ranks_and_repetitions_have_the_same_bits():
    first, again = (run_ranks(gradients, 4, 1, 2, SMALL, torch.float32) for _ in range(2))
    for result in [*first[1:], *again]:
        for name, grad in result["grads"].items():
            assert torch.equal(grad, first[0]["grads"][name]), name


def test_reduction_starts_before_backward_ends_and_only_on_the_last_micro_batch():
    for result in run_ranks(gradients, 2, 1, 3, SMALL, torch.float64):
        events = result["events"]
        assert result["num_buckets"] == 3
        assert [e for e in events if e[0] == "reduce"] == [("reduce", 0), ("reduce", 1), ("reduce", 2)]
        # Three micro-batches of 4 gradients each: the tied embedding counts once, `unused` never. The
        # reductions lie in the third: layers 2 and 1 fill bucket 0; what shares a bucket with `unused` waits
        # for finish().
        assert all(kind == "gradient" for kind, _ in events[:10])
        assert events[10:12] == [("reduce", 0), ("gradient", "layers.0")]
        assert sum(1 for _, name in events if name == "embedding") == 3


def overlapped(rank: int, world: int) -> list:
    net = Net()
    del net.unused
    buckets = GradBuckets(
        list(net.named_parameters()), build_mesh(ParallelConfig(), world), bucket_bytes=SMALL
    )
    net(tokens()[rank::world]).backward()
    before_finish = list(buckets.events)
    buckets.finish()
    return before_finish


def test_each_bucket_goes_as_soon_as_it_is_full():
    expected = [("gradient", "layers.2"), ("gradient", "layers.1"), ("reduce", 0)]
    expected += [("gradient", "layers.0"), ("gradient", "embedding"), ("reduce", 1), ("reduce", 2)]
    for events in run_ranks(overlapped, 2):
        # layers.0 (2 KB) and the embedding (4 KB) do not fit one bucket of 4 KB
        assert events.index(("reduce", 0)) < events.index(("gradient", "layers.0"))
        assert events.index(("reduce", 1)) < events.index(("gradient", "embedding")), events
        assert sorted(map(str, events)) == sorted(map(str, expected))


def unequal_use(rank: int, world: int) -> list[float]:
    mesh = build_mesh(ParallelConfig(), world)
    params = [nn.Parameter(torch.ones(4)) for _ in range(3)]
    buckets = GradBuckets([(str(i), p) for i, p in enumerate(params)], mesh, bucket_bytes=16)
    for _ in range(2):  # the second step must not see what the first left
        buckets.zero_()
        (params[rank].sum() + params[2].sum()).backward()
        buckets.finish()
    return [p.main_grad.sum().item() for p in params]


def test_ranks_that_use_different_parameters_do_not_hang():
    assert run_ranks(unequal_use, 2, timeout=20) == [[4.0, 4.0, 8.0]] * 2


def partial_sums(rank: int, world: int) -> tuple[float, float, float]:
    mesh = build_mesh(ParallelConfig(tp=2), world)
    norm, whole, split = (nn.Parameter(torch.ones(4)) for _ in range(3))
    stamp(norm, Layout((4,), grad_sum=("tp",)))
    stamp(whole, Layout((4,)))
    stamp(split, Layout((8,), {0: "tp"}))
    buckets = GradBuckets([("norm", norm), ("whole", whole), ("split", split)], mesh)
    ((norm + whole + split).sum() * 10.0**rank).backward()
    buckets.finish()
    return norm.main_grad[0].item(), whole.main_grad[0].item(), split.main_grad[0].item()


def test_partial_gradients_are_summed_over_their_axes_too():
    # ranks (dp, tp): 0 = (0,0), 1 = (0,1), 2 = (1,0), 3 = (1,1)
    assert run_ranks(partial_sums, 4) == [(1111, 101, 101), (1111, 1010, 1010)] * 2


def test_bf16_micro_batches_add_up_in_fp32():
    param = nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
    buckets = GradBuckets([("w", param)], Mesh.single())
    with buckets.no_sync():
        for scale in (256.0, 1.0, 1.0):
            (param.float() * scale).sum().backward()
    param.float().sum().backward()
    buckets.finish()
    assert param.main_grad.dtype == torch.float32 and param.main_grad.eq(259).all()  # 256 in bf16
    assert param.grad is None


def reduced_twice(rank: int, world: int) -> str:
    param = nn.Parameter(torch.ones(4))
    buckets = GradBuckets([("w", param)], build_mesh(ParallelConfig(), world))
    param.sum().backward()
    try:
        param.sum().backward()
    except AssertionError as error:
        return str(error)
    finally:
        buckets.finish()
    return ""


def test_a_gradient_that_comes_too_late_is_a_programmers_error():
    assert run_ranks(reduced_twice, 2) == ["a gradient of w came after its bucket was reduced"] * 2


def test_buckets_are_contiguous_and_views():
    net = Net()
    GradBuckets(list(net.named_parameters()), Mesh.single(), bucket_bytes=1 << 20)
    bases = {p.main_grad.untyped_storage().data_ptr() for p in net.parameters()}
    assert len(bases) == 1
    assert all(p.main_grad.shape == p.shape and p.main_grad.is_contiguous() for p in net.parameters())
