"""F15, F26, F31, F38: a loss, a sum, a clock that are wrong on one rank; ranks that are only slow by chance."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
import torch

from megafp8.core.errors import CorruptionError
from megafp8.parallel.pieces import own_piece
from megafp8.train.replicas import check_replicas
from megafp8.train.spikes import StepJudge
from megafp8.train.step import train_step
from tests.distributed.ranks import run_ranks
from tests.distributed.small_run import make_parts, run_config
from tests.faults.attempts import attempt, forks
from tests.faults.conftest import STEPS, WORDS
from tests.faults.outcome import curve
from tests.journeys.runs import overrides, records


@forks
def test_a_nan_on_the_last_rank_is_all_ranks_and_leaves_nothing_where_it_came_and_went(config, tmp_path, as_calm):
    """F26: with `guard.rerun_suspicious` the step is taken as computed again; what stays NaN ends the run."""
    again = [*WORDS, *overrides(guard__rerun_suspicious="true")]
    ended = attempt(config, 2, again, orders="loss:nan:1:7#1 loss:inf:0:8#2")
    assert ended.codes == [0, 0], ended.said
    events = [(e["step"], e["event"]) for e in records(tmp_path / "run", "event") if e["event"] != "saved"]
    assert events == [(7, "recomputed"), (8, "recomputed")] and as_calm()


@forks
def test_a_nan_that_is_not_looked_into_is_a_step_that_no_rank_takes(config, calm, tmp_path):
    ended = attempt(config, 2, WORDS, orders="loss:nan:1:7")
    assert ended.codes == [0, 0], ended.said
    assert [(e["step"], e["event"]) for e in records(tmp_path / "run", "event")][1] == (7, "skipped")
    here, there = curve(tmp_path / "run"), curve(calm / "run")
    assert here[:6] == there[:6] and here[6] != here[6] and all(loss > 0 for loss in here[7:])
    orders = " ".join(f"loss:nan:1:*#{number}" for number in range(40))
    config.write_text(config.read_text().replace(str(tmp_path / "run"), str(tmp_path / "other")))
    ended = attempt(config, 2, [*WORDS, *overrides(train__max_nonfinite_steps=2)], orders=orders)
    # rank 1 leaves the word to rank 0, and may be ended meanwhile
    assert ended.codes[0] == 5 and ended.codes[1] in (5, -9), ended.codes
    assert "not finite for 3 steps in a row" in ended.said, ended.said


def _wrong_sum(rank: int, world: int, config: Any, judged: bool) -> tuple[bool, str]:
    """Rank 1 gets another value out of one sum of gradients; whether the step was taken, and what was said after it."""
    torch.set_num_threads(1)
    parts = make_parts(config, world)
    judge = StepJudge(parts) if judged else None
    finish, calls = parts.buckets.finish, [0]
    name, param = parts.named_parameters[0]

    def finished() -> None:
        finish()
        calls[0] += 1
        if rank == 1 and calls[0] == 2:
            own_piece(param).grad.view(-1)[-1] += 1e-3

    parts.buckets.finish = finished  # type: ignore[method-assign]
    for step in (1, 2):
        taken = train_step(parts, step, 1e-2, judge).taken
        try:
            check_replicas(parts, step, None)
        except CorruptionError as error:
            return taken, str(error)
    return taken, f"transient {judge.transient}" if judge else "nothing"


def test_a_wrong_sum_on_one_rank_is_found_by_either_check():
    """F31: replicas differ from then on; or the step computed twice differs, and a third one tells."""
    config = run_config(parallel={"dp": 3}, train={"steps": 5, "global_batch": 12, "micro_batch": 2})
    for taken, said in run_ranks(_wrong_sum, 3, config, False):
        assert taken and "step 2: copies of the same values differ" in said and "rank 1 (host" in said
    config = run_config(
        parallel={"dp": 3}, train={"steps": 5, "global_batch": 12, "micro_batch": 2}, guard={"rerun_interval": 1}
    )
    assert run_ranks(_wrong_sum, 3, config, True) == [(True, "transient 1")] * 3


def _odd_clock(rank: int) -> None:
    """Rank 1 is ten minutes ahead; after 200 looks a day passes on it, after 400 it falls back an hour."""
    real, looks = time.time, [0]

    def now() -> float:
        looks[0] += 1
        return real() + rank * 600 + (86400 if looks[0] > 200 else 0) - (90000 if looks[0] > 400 else 0)

    time.time = now


@forks
def test_clocks_that_jump_and_differ_change_nothing(config, tmp_path, as_calm):
    """F38."""
    ended = attempt(config, 2, WORDS, within=_odd_clock)
    assert ended.codes == [0, 0], ended.said
    assert as_calm()
    for record in records(tmp_path / "run"):
        assert record["step_seconds"] > 0 and record["tokens_per_second"] > 0 and 0 < record["goodput"] <= 1
        assert record["run_seconds"] < 600
    assert "eta: -" not in ended.said and len(curve(tmp_path / "run")) == STEPS


@pytest.mark.slow
@forks
def test_no_rank_is_called_slow_in_five_hundred_steps(config, tmp_path):
    """F15: whatever else this machine does meanwhile."""
    ended = attempt(config, 2, [*WORDS, *overrides(train__steps=500, checkpoint__interval=100)], timeout=600)
    assert ended.codes == [0, 0], ended.said
    found = [json.dumps(e) for e in records(tmp_path / "run", "event") if e["event"] == "straggler"]
    assert not found, found
