"""A pipeline gives what one process gives: loss and every gradient, in every schedule; messages overlap with work."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from megafp8.core.config import build
from megafp8.core.layout import layout_of
from megafp8.core.rng import fill_normal_, seed_for
from megafp8.data.loader import Batch
from megafp8.parallel.actions import Action
from megafp8.parallel.mesh import build_mesh
from megafp8.parallel.mesh_config import ParallelConfig
from megafp8.parallel.messages import Message
from megafp8.parallel.pipeline import Pipeline, Wire
from megafp8.parallel.schedules import SCHEDULES, make_schedule
from megafp8.train.config import RunConfig
from megafp8.train.setup import Parts, assemble, make_mesh
from megafp8.train.step import gradients
from tests.distributed.ranks import run_ranks

Values = dict[str, Any]

# fp64 sums of a few thousand terms in another order: 1e3 * 2^-53 = 1e-13 relative to the largest terms; the norm of
# a gradient can lie 10^2 below those by cancellation. A lost or doubled micro-batch shows at 1e-1.
TOLERANCE = 1e-10


class Samples:
    """Eight sequences of 16 tokens in micro-batches of one size or `uneven` targets; stands in for a loader."""

    def __init__(self, micro_batches: int) -> None:
        self.consumed_samples, self.micro_batches, self.global_batch = 0, micro_batches, 8

    def next_step(self) -> list[Batch]:
        tokens = torch.randint(0, 64, (8, 17), generator=torch.Generator().manual_seed(5))
        targets = tokens[:, 1:].clone()
        targets[1, 3:9] = -100
        targets[6] = -100  # a whole sequence without loss
        ids = torch.arange(8)
        parts = (x.chunk(self.micro_batches) for x in (tokens[:, :-1], targets, ids))
        return [Batch(*part) for part in zip(*parts, strict=True)]


def run_config(
    layers: int, model: Values, parallel: Values, precision: Values | None = None, **train: Any
) -> RunConfig:
    small: Values = {
        "num_layers": layers, "hidden_size": 32, "ffn_hidden_size": 48, "num_attention_heads": 4, "num_kv_heads": 2,
        "vocab_size": 64, "max_sequence_length": 16, "init_std": 0.3,
    }  # fmt: skip
    return build(RunConfig, {
        "run": {"dir": "unused"},
        "model": small | model,
        "data": {"train": [{"path": "unused"}], "tokenizer": "bytes", "sequence_length": 16},
        "train": {"steps": 1, "global_batch": 8} | train,
        "precision": precision or {"dtype": "fp64"},
        "parallel": parallel,
    })  # fmt: skip


def make_parts(config: RunConfig, world: int, micro_batches: int) -> Parts:
    torch.set_num_threads(1)
    parts = assemble(config, make_mesh(config, world), torch.device("cpu"), Samples(micro_batches))
    for name, param in parts.named_parameters:  # norms off 1 and biases off 0, by name, so that a mix-up shows
        if param.dim() == 1:
            mean = 1.0 if "norm.weight" in name else 0.0
            seed = seed_for(7, name)
            fill_normal_(param.data, seed=seed, layout=layout_of(param), mesh=parts.mesh, std=0.3, mean=mean)
    return parts


@dataclass(frozen=True)
class Case:
    layers: int
    model: Any  # items of the model section
    parallel: Any
    micro_batches: int
    recompute: str = "none"


def outcome(rank: int, world: int, cases: list[Case]) -> list[tuple[float, dict[str, Any]]]:
    """Loss and this rank's gradients of every case, of the second of two equal steps."""
    results = []
    for case in cases:
        config = run_config(case.layers, dict(case.model), dict(case.parallel), recompute=case.recompute)
        parts = make_parts(config, world, case.micro_batches)
        for step in (1, 2):
            found = gradients(parts, step)
        named = dict(parts.named_parameters)
        results.append((float(found.loss), {n: p.main_grad.numpy() for n, p in named.items()}))
    return results


def schedules(pp: int) -> list[Values]:
    chosen: list[Values] = [{"pp": pp, "schedule": name} for name in SCHEDULES if name != "interleaved"]
    return [*chosen, {"pp": pp, "schedule": "interleaved", "virtual_stages": 2}]


def cases(pp: int) -> list[Case]:
    """Every schedule with fewer and more micro-batches than stages, tied and untied; then what only some need."""
    found = [
        Case(2 * pp, (("tied_embeddings", tied),), tuple(parallel.items()), m)
        for parallel in schedules(pp)
        for m, tied in ((1, True), (2, False), (4, True))
    ]
    gpt = (("family", "gpt"), ("num_kv_heads", 4), ("tied_embeddings", True), ("hidden_dropout", 0.2))
    uneven = (1, 3) if pp == 2 else (0, 2, 1, 1)
    counted = {"pp": pp, "count_embedding_as_layer": True, "count_loss_as_layer": True}
    return [
        *found,
        Case(4, (), tuple({"pp": pp, "layers_per_stage": uneven}.items()), 4),
        Case(2 * pp - 2, (), tuple(counted.items()), 2),
        Case(4, gpt, tuple({"pp": pp, "overlap_p2p": False}.items()), 4),
        Case(2 * pp, gpt, tuple({"pp": pp, "schedule": "zb_v", "overlap_p2p": False}.items()), 4, "full"),
    ]


def alone(case: Case) -> Case:
    return Case(case.layers, case.model, (), case.micro_batches)


def relative(got: Any, expected: Any) -> float:
    got, expected = torch.from_numpy(got), torch.from_numpy(expected)
    return float((got - expected).norm() / expected.norm())


@pytest.mark.parametrize("pp", [2, 4])
def test_equals_one_process(pp: int) -> None:
    tried = cases(pp)
    expected = run_ranks(outcome, 1, [alone(case) for case in tried])[0]
    results = run_ranks(outcome, pp, tried)
    for index, case in enumerate(tried):
        loss, wanted = expected[index]
        found: dict[str, Any] = {}
        for rank, result in enumerate(results):
            assert result[index][0] == pytest.approx(loss, rel=TOLERANCE), (case, rank)
            for name, gradient in result[index][1].items():
                if name in found:  # a tied weight on the first and the last stage: one gradient, bit for bit
                    assert name == "embedding.weight" and (gradient == found[name]).all(), case
                found[name] = gradient
        assert found.keys() == wanted.keys(), case
        for name, gradient in found.items():
            assert relative(gradient, wanted[name]) < TOLERANCE, (case, name)


def fp8_losses(rank: int, world: int) -> list[float]:
    """Losses of three equal steps, between which only the scales of delayed scaling change."""
    schedule = "zb_v" if world > 1 else "1f1b"
    config = run_config(4, {}, {"pp": world, "schedule": schedule}, precision={"dtype": "fp32", "recipe": "delayed"})
    parts = make_parts(config, world, 1)
    losses = []
    for step in range(6, 9):  # past the warm-up
        losses.append(float(gradients(parts, step).loss))
        for state in parts.fp8_states.values():
            state.drop_weight_cache()
    return losses


def test_fp8_scales_are_those_of_one_process() -> None:
    """With one micro-batch the order of forward, backward and update is the same, stage by stage.

    The same GEMMs on the same codes; a border only adds the branch one step earlier, in fp32: 2^-24 each. A scale that
    does not follow moves the loss by 1e-3 and more.
    """
    alone, split = run_ranks(fp8_losses, 1)[0], run_ranks(fp8_losses, 2)
    assert split[0] == split[1] == pytest.approx(alone, rel=1e-6)
    assert len({round(loss, 5) for loss in alone}) > 1


def events(rank: int, world: int, schedule: str, overlap: bool) -> list[tuple[str, Any]]:
    config = run_config(4, {}, {"pp": world, "schedule": schedule, "overlap_p2p": overlap})
    parts = make_parts(config, world, 4)
    gradients(parts, 1)
    return list(parts.pipeline.events)


def test_messages_travel_while_stages_compute() -> None:
    first, last = run_ranks(events, 2, "1f1b", True)
    # the receive of the next micro-batch is posted before this one's backward begins, on either side
    for seen, coming, running in (
        (last, Message("F", 1, 2), Action("B", 1, 1)),
        (first, Message("B", 0, 1), Action("F", 0, 2)),
    ):
        assert seen.index(("post", coming)) < seen.index(("begin", running)) < seen.index(("wait", coming))
    # a gradient goes off before the backward passes of this rank have ended
    assert last.index(("send", Message("B", 0, 0))) < last.index(("end", Action("B", 1, 3)))
    for seen in run_ranks(events, 2, "1f1b", False):
        # in batches: what is received goes into one between two actions, at the latest in that before it is wanted
        waits = [i for i, (what, _) in enumerate(seen) if what == "wait"]
        assert all(("post", seen[i][1]) in seen[:i] for i in waits)
        posts = [i for i, (what, _) in enumerate(seen) if what == "post" and i > 0]
        assert all(seen[i - 1][0] in ("post", "end", "send") for i in posts)


def test_gradients_of_inputs_go_before_those_of_weights() -> None:
    _, last = run_ranks(events, 2, "zb_h1", True)
    for number in range(4):
        sent, weights = ("send", Message("B", 0, number)), ("begin", Action("W", 1, number))
        assert last.index(sent) < last.index(weights)


class Scale:
    """Stages that multiply by 2; activations are counted while their backward pass has not been."""

    def __init__(self, last: int) -> None:
        self.last, self.alive, self.peak = last, 0, 0

    def forward(self, stage: int, micro_batch: int, hidden: torch.Tensor | None) -> torch.Tensor:
        x = torch.ones(2, 3, requires_grad=True) if hidden is None else hidden
        y = _Counted.apply(x, self)
        return y.sum() if stage == self.last else y

    def split(self, backward: Any) -> Any:
        backward()
        return lambda: None

    def after_backward(self, stage: int, micro_batch: int) -> None: ...


class _Counted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, counter: Scale) -> torch.Tensor:
        ctx.held = _Held(counter)
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return 2 * grads[0], None


class _Held:
    def __init__(self, counter: Scale) -> None:
        self.counter = counter
        counter.alive += 1
        counter.peak = max(counter.peak, counter.alive)

    def __del__(self) -> None:
        self.counter.alive -= 1


def scaled(rank: int, world: int, name: str, die: int, forward_only: bool) -> tuple[int, int]:
    mesh = build_mesh(ParallelConfig(pp=world), world)
    pipeline = Pipeline(lambda m: make_schedule(name, world, 1, m), mesh)
    stages = Scale(pipeline.num_stages - 1)
    if rank == die:
        time.sleep(0.3)
        os._exit(3)
    wire = Wire((2, 3), torch.float32, torch.device("cpu"))
    pipeline.run(stages, 6, wire, forward_only=forward_only)
    return stages.peak, stages.alive


def test_activations_are_freed_by_their_backward() -> None:
    assert run_ranks(scaled, 3, "1f1b", -1, False) == [(3, 0), (2, 0), (1, 0)]
    assert run_ranks(scaled, 3, "gpipe", -1, False) == [(6, 0)] * 3


def test_an_evaluation_keeps_nothing() -> None:
    assert run_ranks(scaled, 3, "zb_v", -1, True) == [(1, 0)] * 3


def test_a_rank_that_dies_ends_the_others() -> None:
    begin = time.monotonic()
    with pytest.raises(AssertionError) as error:
        run_ranks(scaled, 3, "1f1b", 2, False, timeout=30)
    assert "rank 2 died with exit code 3" in str(error.value) and "rank 1 raised" in str(error.value)
    assert time.monotonic() - begin < 15


def silent(rank: int, world: int) -> str:
    mesh = build_mesh(ParallelConfig(pp=world), world, timeout_seconds=2)
    pipeline = Pipeline(lambda m: make_schedule("1f1b", world, 1, m), mesh)
    if rank == 1:
        time.sleep(4)
        return ""
    try:
        pipeline.run(Scale(world - 1), 2, Wire((2, 3), torch.float32, torch.device("cpu")))
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_a_silent_rank_is_given_up_after_the_time_that_was_set() -> None:
    assert "2000ms" in run_ranks(silent, 2, timeout=20)[0]


def disagreeing(rank: int, world: int) -> str:
    mesh = build_mesh(ParallelConfig(pp=world), world)
    pipeline = Pipeline(lambda m: make_schedule("1f1b", world, 1, m), mesh)
    wire = Wire((2, 3 + rank), torch.float32, torch.device("cpu"))
    try:
        pipeline.run(Scale(world - 1), 2, wire)
    except RuntimeError as error:
        return str(error)
    return ""


def test_ranks_that_expect_other_shapes_do_not_hang() -> None:
    assert all("other ranks expect others" in text for text in run_ranks(disagreeing, 2, timeout=20))
