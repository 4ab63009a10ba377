"""What went wrong in other codebases' pipelines (docs/cases.md): norms, clipping, tied weights, accumulation, NaN."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megafp8.core.config import build
from megafp8.data.loader import Batch
from megafp8.optim.clip import grad_norm
from megafp8.train.config import RunConfig
from megafp8.train.setup import Parts, assemble, make_mesh
from megafp8.train.step import gradients, train_step
from tests.distributed.ranks import run_ranks

Values = dict[str, Any]
STEPS = 10


class Samples:
    """Sixteen sequences a step, of unequal numbers of targets, in micro-batches of `rows` on each replica."""

    def __init__(self, rows: int, dp_rank: int, dp_size: int) -> None:
        self.rows, self.dp_rank, self.dp_size = rows, dp_rank, dp_size
        self.consumed_samples, self.global_batch = 0, 16

    def next_step(self) -> list[Batch]:
        generator = torch.Generator().manual_seed(self.consumed_samples)
        tokens = torch.randint(0, 64, (16, 17), generator=generator)
        targets = tokens[:, 1:].clone()
        for row in range(16):
            targets[row, : row % 7] = -100
        mine = [m * self.dp_size + self.dp_rank for m in range(16 // (self.rows * self.dp_size))]
        self.consumed_samples += 16
        pieces = [slice(place * self.rows, (place + 1) * self.rows) for place in mine]
        return [Batch(tokens[at, :-1], targets[at], torch.arange(16)[at]) for at in pieces]


def make_parts(world: int, parallel: Values, rows: int) -> Parts:
    torch.set_num_threads(1)
    config = build(RunConfig, {
        "run": {"dir": "unused"},
        "model": {
            "num_layers": 4, "hidden_size": 32, "ffn_hidden_size": 48, "num_attention_heads": 4, "num_kv_heads": 2,
            "vocab_size": 64, "max_sequence_length": 16, "init_std": 0.3, "tied_embeddings": True,
        },
        "data": {"train": [{"path": "unused"}], "tokenizer": "bytes", "sequence_length": 16},
        "train": {"steps": STEPS, "global_batch": 16},
        "optimizer": {"clip_grad": 0.1},
        "precision": {"dtype": "fp64"},
        "parallel": parallel,
    })  # fmt: skip
    mesh = make_mesh(config, world)
    return assemble(config, mesh, torch.device("cpu"), Samples(rows, mesh.coord("dp"), mesh.size("dp")))


def curve(rank: int, world: int, parallel: Values, rows: int) -> tuple[list[tuple[float, float]], Values]:
    """Loss and norm of ten clipped steps, and the weights after them."""
    parts = make_parts(world, parallel, rows)
    results = [train_step(parts, step, 1e-2) for step in range(1, STEPS + 1)]
    gradients(parts, STEPS + 1)  # its forward passes gather weights whose pieces were updated
    weights = {name: param.detach().numpy() for name, param in parts.named_parameters}
    return [(result.loss, result.grad_norm) for result in results], weights


@pytest.mark.parametrize(
    ("parallel", "rows"),
    [
        ({"pp": 2, "dp": 2, "dp_shard": "optimizer"}, 2),
        ({"pp": 2, "dp": 2, "schedule": "zb_v", "dp_shard": "optimizer"}, 1),
        ({"pp": 4, "schedule": "zb_h1"}, 8),
    ],
    ids=["pp2xdp2", "zb_v", "pp4"],
)
def test_norms_clipping_and_tied_weights_of_a_pipeline(parallel: Values, rows: int) -> None:
    expected, whole = run_ranks(curve, 1, {}, 16)[0]
    world = parallel["pp"] * parallel.get("dp", 1)
    found: Values = {}
    for points, weights in run_ranks(curve, world, parallel, rows):
        # fp64: each step's loss and norm to 1e-13; AdamW divides by the root of a second moment, which at ten steps of
        # 1e-2 carries that to 1e-11
        assert points == [pytest.approx(point, rel=1e-9) for point in expected]
        assert all(norm > 0.1 for _, norm in points)  # the clip is at work
        for name, weight in weights.items():
            assert (weight == found.setdefault(name, weight)).all(), f"copies of {name} differ"
    assert found.keys() == whole.keys()
    for name, weight in whole.items():
        assert abs(found[name] - weight).max() <= 1e-9 * abs(weight).max(), name


def test_a_mean_over_tokens_whatever_the_micro_batches() -> None:
    """Sequences of unequal length: a mean of the micro-batches' means would differ by 1e-2."""
    curves = [run_ranks(curve, 1, {}, rows)[0][0] for rows in (1, 4, 16)]
    for other in curves[1:]:
        assert other == [pytest.approx(point, rel=1e-9) for point in curves[0]]


def ones(rank: int, world: int) -> tuple[float, int]:
    """Norm of a gradient of ones, and the elements held here."""
    parts = make_parts(world, {"pp": world}, 16)
    gradients(parts, 1)
    for _, param in parts.named_parameters:
        param.main_grad.fill_(1.0)  # type: ignore[attr-defined]
    return grad_norm(parts.named_parameters, parts.mesh).value ** 2, sum(p.numel() for _, p in parts.named_parameters)


def test_a_tied_weight_counts_once_in_the_norm() -> None:
    (square, elements), split = run_ranks(ones, 1)[0], run_ranks(ones, 2)
    assert [round(value) for value, _ in split] == [round(square)] * 2 == [elements] * 2
    assert sum(held for _, held in split) == elements + 64 * 32


def broken(rank: int, world: int, victim: int, where: str) -> tuple[bool, bool]:
    """Whether a step was taken, and whether any weight moved, when one rank's loss or gradient is not finite."""
    parts = make_parts(world, {"pp": 2, "dp": 2}, 2)
    before = [param.detach().clone() for _, param in parts.named_parameters]
    if rank == victim and where == "gradient":
        name, param = parts.named_parameters[0]
        param.register_hook(lambda grad: grad.index_fill(0, torch.tensor([0]), torch.inf))
    if rank == victim and where == "activation":
        parts.stages[0].register_forward_pre_hook(_poison, with_kwargs=True)
    result = train_step(parts, 1, 1e-2)
    return result.finite, any(not torch.equal(a, b) for a, (_, b) in zip(before, parts.named_parameters, strict=True))


def _poison(module: Any, args: Any, kwargs: Any) -> Any:
    return args, kwargs | {"hidden": kwargs["hidden"] * torch.nan}


@pytest.mark.parametrize(("victim", "where"), [(0, "gradient"), (3, "activation")])
def test_what_is_not_finite_on_one_stage_stops_the_step_on_all(victim: int, where: str) -> None:
    assert run_ranks(broken, 4, victim, where) == [(False, False)] * 4
