"""ZeRO-1: replicas that update pieces train as replicas that update everything, and talk while they compute."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from megafp8.core.layout import Layout, layout_of, stamp
from megafp8.models import ModelConfig
from megafp8.models.builder import build
from megafp8.optim.adamw import AdamW
from megafp8.optim.clip import clip_scale, grad_norm
from megafp8.optim.config import OptimizerConfig
from megafp8.parallel.buckets import GradBuckets
from megafp8.parallel.mesh import Mesh, build_mesh
from megafp8.parallel.mesh_config import ParallelConfig
from tests.distributed.ranks import run_ranks

# nothing divides by 2, 3 or 4 where it need not
MODEL = ModelConfig(
    num_layers=3, hidden_size=24, ffn_hidden_size=37, num_attention_heads=4, num_kv_heads=2, vocab_size=53,
    max_sequence_length=16, init_std=0.2, tied_embeddings=True, attention_bias=True,
)  # fmt: skip
SAMPLES = 12


def batch(step: int) -> torch.Tensor:
    return torch.randint(0, 53, (SAMPLES, 9), generator=torch.Generator().manual_seed(step))


def trained(
    rank: int, world: int, shard: bool, dtype: torch.dtype, clip: float, bucket_bytes: int, attach: bool, **sizes: int
) -> tuple[dict[str, torch.Tensor], list[float], float]:
    """Parameters after 4 steps, the norms of the gradients, and a loss by the final weights."""
    mesh = build_mesh(ParallelConfig(dp=world), world) if world > 1 else Mesh.single()
    model = build(replace(MODEL, **sizes), mesh=mesh, dtype=dtype)
    named = list(model.named_parameters())
    buckets = GradBuckets(named, mesh, bucket_bytes=bucket_bytes, shard=shard)
    optimizer, norms = AdamW(named, OptimizerConfig(kernel="torch"), mesh), []
    if attach:
        optimizer.attach(model)
    for step in range(4):
        buckets.zero_(contributions=2)
        for part in batch(step).chunk(world)[rank].chunk(2):
            loss, _ = model(part[:, :-1], part[:, 1:])
            (loss / 96).backward()
        buckets.finish()
        norms.append(grad_norm(named, mesh).value)
        optimizer.step(1e-2, clip_scale(norms[-1], clip))
    with torch.no_grad():
        loss, _ = model(batch(9)[:, :-1], batch(9)[:, 1:])
    optimizer.wait()
    return {name: p.detach().clone() for name, p in named}, norms, float(loss)


@pytest.mark.parametrize(("world", "kilobytes", "attach"), [(1, 4, True), (2, 999, False), (3, 16, True), (4, 4, True)])
def test_pieces_train_as_the_whole(world, kilobytes, attach):
    expected, expected_norms, expected_loss = trained(0, 1, False, torch.float64, 0.1, 1 << 24, False)
    for params, norms, loss in run_ranks(trained, world, True, torch.float64, 0.1, kilobytes << 10, attach):
        # 96 token gradients summed in another order differ by 96 * 2**-53 = 1e-14; Adam divides by the root of the
        # second moment, so that an element whose terms cancel to a hundredth differs by 1e-12 of a step of 1e-2
        assert norms == pytest.approx(expected_norms, rel=1e-12)
        assert loss == pytest.approx(expected_loss, rel=1e-12)
        for name, value in params.items():
            assert (value - expected[name]).abs().max() < 1e-11, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_replicas_give_the_same_bits_as_whole_updates(dtype):
    # a + b = b + a: with two ranks there is but one order of summation. Without clipping, since the norm's squares
    # are summed piece by piece. Pieces are multiples of 16 elements, since torch's kernel rounds those that do not
    # fill a vector in another way.
    whole, pieces = zip(*run_ranks(both, 2, dtype))
    for params, _, loss in pieces:
        assert loss == whole[0][2]
        assert all(torch.equal(value, whole[0][0][name]) for name, value in params.items())


def both(rank: int, world: int, dtype: torch.dtype) -> list[Any]:
    sizes = {"hidden_size": 32, "ffn_hidden_size": 64, "vocab_size": 64}
    return [trained(rank, world, shard, dtype, 0.0, 1 << 12, shard, **sizes) for shard in (False, True)]


def overlapped(rank: int, world: int) -> dict[str, Any]:
    mesh = build_mesh(ParallelConfig(dp=world), world)
    model = build(MODEL, mesh=mesh, dtype=torch.float32)
    named = list(model.named_parameters())
    buckets = GradBuckets(named, mesh, bucket_bytes=1 << 12, shard=True)
    optimizer = AdamW(named, OptimizerConfig(kernel="torch"), mesh, bucket_bytes=1 << 12)
    optimizer.attach(model)
    loss, _ = model(batch(0)[:, :-1], batch(0)[:, 1:])
    loss.backward()
    before_finish = list(buckets.events)
    buckets.finish()
    optimizer.step(1e-2)
    gather = optimizer.gather
    seen = {"reduced": before_finish, "step": list(gather.events)}
    model.layers[0].register_forward_hook(lambda *_: seen.update(layer=list(gather.events)))
    model(batch(1)[:, :-1], batch(1)[:, 1:])
    seen["state"] = sum(tensor.numel() for tensor in optimizer.tensors().values())
    return {**seen, "end": list(gather.events), "parameters": sum(p.numel() for _, p in named)}


def test_communication_starts_before_backward_and_ends_within_the_next_forward():
    for seen in run_ranks(overlapped, 2):
        kinds = [kind for kind, _ in seen["reduced"]]
        assert kinds.index("reduce") < len(kinds) - 1 - kinds[::-1].index("gradient")
        assert [kind for kind, _ in seen["step"]] == ["start"] * 4  # a few buckets, none waited for
        done = [number for kind, number in seen["layer"] if kind == "done"]
        last = max(number for _, number in seen["end"])
        assert done and last not in done  # layer 0 has run, weights of later layers still travel
        assert sorted(number for kind, number in seen["end"] if kind == "done") == list(range(last + 1))
        starts = [number for kind, number in seen["end"] if kind == "start"]
        assert starts == list(range(last + 1))  # one order on all ranks
        assert seen["state"] < 3 * seen["parameters"] * 0.51  # masters and two moments of half of them


def used_too_early(rank: int, world: int) -> str:
    mesh = build_mesh(ParallelConfig(dp=world), world)
    model = nn.Sequential(nn.Linear(4, 4, bias=False))
    named = list(model.named_parameters())
    buckets = GradBuckets(named, mesh, shard=True)
    optimizer = AdamW(named, OptimizerConfig(kernel="torch"), mesh)
    optimizer.attach(model)
    x = torch.ones(2, 4)
    model(x).sum().backward()
    buckets.finish()
    optimizer.step(1e-2)
    buckets.zero_()
    try:
        (x @ model[0].weight).sum().backward()  # past the module, whose forward would have waited
    except AssertionError as error:
        return str(error)
    finally:
        optimizer.wait()
        buckets.finish()
    return ""


def test_weights_that_are_used_before_they_are_whole_are_noticed():
    assert run_ranks(used_too_early, 2) == ["0.weight was used before its pieces were gathered"] * 2


LAYOUTS = {
    "rows": Layout((8, 6), {0: "tp"}),
    "norm": Layout((7,), grad_sum=("tp",)),
    "qkv": Layout((4, 5), {0: "kvtp"}, grad_sum=("kvrep",)),
    "experts": Layout((4, 3, 2), {0: "ep"}),
}


def pieces_of_any_mesh(rank: int, world: int) -> dict[str, Any]:
    """One step of gradients that are 10**rank everywhere: the pieces' sums, their boxes, and the norm."""
    mesh = build_mesh(ParallelConfig(dp=2, tp=2, ep=2, etp=1), world, kv_heads=1)
    named = []
    for name, layout in LAYOUTS.items():
        param = nn.Parameter(torch.zeros(layout.local_shape(mesh), dtype=torch.float64))
        stamp(param, layout)
        named.append((name, param))
    buckets = GradBuckets(named, mesh, shard=True)
    optimizer = AdamW(named, OptimizerConfig(kernel="torch"), mesh)
    for _, param in named:
        param.take_grad(torch.full_like(param, 10.0**rank))
    buckets.finish()
    found = {}
    for name, param in named:
        piece = param.own_piece
        found[name] = (piece.grad.unique().tolist(), piece.layout.local_slices(mesh), layout_of(param).shape)
    norm = grad_norm(named, mesh).value
    optimizer.step(1e-2)
    assert all(param.unique().numel() == 1 for _, param in named)  # whole again
    return {"pieces": found, "norm": norm, "experts": (mesh.coord("edp"), mesh.coord("ep"))}


def test_pieces_are_summed_over_replicas_and_partial_sums_and_count_once():
    # ranks (dp, tp): 0 = (0,0), 1 = (0,1), 2 = (1,0), 3 = (1,1); qkv is shared by all four, one kv head
    results = run_ranks(pieces_of_any_mesh, 4)
    square = 0.0
    for name, layout in LAYOUTS.items():
        total = torch.zeros(layout.shape)
        for rank, result in enumerate(results):
            values, box, shape = result["pieces"][name]
            pair = {"rows": (rank % 2, rank % 2 + 2), "norm": (0, 1, 2, 3), "qkv": (0, 1, 2, 3)}.get(name)
            if name == "experts":  # its replica is the rank with the same experts
                pair = tuple(r for r in range(4) if results[r]["experts"][1] == result["experts"][1])
            assert values in ([sum(10.0**r for r in pair)], []), name
            copies = {"norm": 2, "qkv": 2}.get(name, 1)
            total[box] += 1 / copies
            square += sum(v**2 for v in values) * total[box].numel() / copies
        assert torch.equal(total, torch.ones(layout.shape)), name  # the pieces tile the tensor
    assert all(result["norm"] == pytest.approx(square**0.5, rel=1e-14) for result in results)
