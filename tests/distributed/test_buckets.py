"""Gradient buckets: the same gradients on any number of replicas, reduced while backward still runs."""

from __future__ import annotations

import time

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
        buckets.zero_(contributions=len(mine))
        for part in mine:
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
    buckets.zero_(contributions=4)
    for scale in (256.0, 1.0, 1.0, 1.0):
        (param.float() * scale).sum().backward()
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


def test_a_gradient_that_was_not_announced_is_a_programmers_error():
    assert run_ranks(reduced_twice, 2) == ["w got more gradients than were announced"] * 2


def test_buckets_are_contiguous_and_views():
    net = Net()
    GradBuckets(list(net.named_parameters()), Mesh.single(), bucket_bytes=1 << 20)
    bases = {p.main_grad.untyped_storage().data_ptr() for p in net.parameters()}
    assert len(bases) == 1
    assert all(p.main_grad.shape == p.shape and p.main_grad.is_contiguous() for p in net.parameters())


def test_gradients_from_elsewhere_and_several_of_one_micro_batch_count():
    tied, other = (nn.Parameter(torch.ones(4, dtype=torch.bfloat16)) for _ in range(2))
    tied.grad_uses = 2  # one by autograd, one handed in
    buckets = GradBuckets([("other", other), ("tied", tied)], Mesh.single(), bucket_bytes=1)
    buckets.zero_(contributions=2)
    tied.sum().backward()
    tied.take_grad(torch.full((2, 2), 4.0))
    other.take_grad(torch.ones(4))
    tied.take_grad(torch.full((4,), 4.0))
    assert ("reduce", 0) not in buckets.events
    tied.sum().backward()
    other.sum().backward()
    assert [e for e in buckets.events if e[0] == "reduce"] == [("reduce", 0), ("reduce", 1)]
    buckets.finish()
    assert tied.main_grad.eq(10).all() and other.main_grad.eq(2).all()


def staged(rank: int, world: int, rounds: int) -> dict[str, float]:
    """Two stages, two replicas, experts on both: every kind of reduction at once, at ranks' own pace."""
    mesh = build_mesh(ParallelConfig(pp=2, dp=2, ep=2), world, tied_embeddings=True)
    first = mesh.coord("pp") == 0
    tied, experts = nn.Parameter(torch.ones(64)), nn.Parameter(torch.ones(1, 8))
    layers = [nn.Parameter(torch.ones(1 << 16)) for _ in range(3 if first else 2)]
    stamp(tied, Layout((64,), grad_sum=("embedding",)))
    stamp(experts, Layout((2, 8), {0: "ep"}))
    named = [*((f"layers.{i}", p) for i, p in enumerate(layers)), ("experts", experts)]
    named = [("embedding.weight", tied), *named] if first else [*named, ("embedding.weight", tied)]
    buckets = GradBuckets(named, mesh, bucket_bytes=1 << 17)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(rounds):
        buckets.zero_(contributions=2)
        for _ in range(2):
            for _, param in reversed(named):
                param.take_grad(torch.full_like(param, 10.0**rank))
                time.sleep(0.002 * float(torch.rand((), generator=generator)))
        buckets.finish()
        order = [number for kind, number in buckets.events if kind == "reduce"]
        assert order == sorted(order) and len(order) == buckets.num_buckets
    return {name: param.main_grad.mean().item() for name, param in named}


def test_stages_and_experts_reduce_over_their_own_ranks():
    # ranks (pp, dp): 0 = (0,0), 1 = (0,1), 2 = (1,0), 3 = (1,1); an expert has one replica, the tied weight four
    found = run_ranks(staged, 4, 20, timeout=30)
    for rank, grads in enumerate(found):
        assert grads["embedding.weight"] == 2222
        assert grads["experts"] == 2 * 10**rank
        assert grads["layers.1"] == (22 if rank < 2 else 2200)


class _WithoutWeight(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        return x * weight

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def test_a_gradient_that_backward_leaves_out_comes_later():
    param, x = nn.Parameter(torch.ones(4)), torch.ones(4, requires_grad=True)
    buckets = GradBuckets([("w", param)], Mesh.single())
    buckets.zero_()
    _WithoutWeight.apply(x, param).sum().backward()
    assert ("gradient", "w") not in buckets.events
    param.take_grad(torch.full((4,), 3.0))
    buckets.finish()
    assert param.main_grad.eq(3).all() and ("reduce", 0) in buckets.events


def test_a_gemm_that_adds_to_the_main_gradient_itself():
    """Between open_main_grad and close_main_grad: the second step's first gradient finds zeros, or overwrites."""
    for overwrites in (False, True):
        weight = nn.Parameter(torch.zeros(4, 4))
        stamp(weight, Layout((4, 4)))
        buckets = GradBuckets([("w", weight)], Mesh.single())
        for step in (1.0, 2.0):
            buckets.zero_(contributions=2)
            weight.open_main_grad(overwrites)
            weight.main_grad.mul_(0 if overwrites else 1).add_(step)
            weight.close_main_grad()
            weight.open_main_grad(False)
            weight.main_grad.add_(10)
            assert not [event for event in buckets.events if event[0] == "reduce"]
            weight.close_main_grad()
            assert buckets.events[-1] == ("reduce", 0)
            buckets.finish()
            assert torch.equal(weight.main_grad, torch.full((4, 4), 10 + step))


def test_a_later_gradient_may_not_overwrite():
    weight = nn.Parameter(torch.zeros(4, 4))
    stamp(weight, Layout((4, 4)))
    buckets = GradBuckets([("w", weight)], Mesh.single())
    buckets.zero_(contributions=2)
    weight.take_grad(torch.ones(4, 4))
    with pytest.raises(AssertionError, match="would overwrite those of earlier micro-batches"):
        weight.open_main_grad(True)
