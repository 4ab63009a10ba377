"""Schedules against their closed forms, at their boundaries, and against transformers' own."""

from __future__ import annotations

import math

import pytest
import torch
import transformers

from megafp8.core.config import build
from megafp8.core.errors import ConfigError
from megafp8.data.batch_size import BatchSize
from megafp8.optim.config import OptimizerConfig
from megafp8.optim.lr import Schedule

TOTAL, WARMUP, PEAK, LOW = 100, 10, 1e-3, 1e-5


def config(shape: str, **more) -> OptimizerConfig:
    if shape == "wsd" and "wsd_decay_tokens" not in more:
        more.setdefault("wsd_decay_steps", 20)
    if "warmup_tokens" not in more:
        more["warmup_steps"] = WARMUP
    return OptimizerConfig(
        lr=PEAK, min_lr=more.pop("min_lr", LOW), schedule=shape, **more
    )


def schedule(c: OptimizerConfig, total: int, batches: BatchSize | None = None) -> Schedule:
    return Schedule(c, batches or BatchSize(8), sequence_length=16, total_steps=total)


def learning_rate(c: OptimizerConfig, step: int, total: int) -> float:
    return schedule(c, total)(step=step, consumed_samples=8 * step)


def check_schedule(c: OptimizerConfig, total: int) -> list[str]:
    return schedule(c, total).problems()


SCHEDULES = ["cosine", "wsd", "linear", "constant", "inverse_sqrt"]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_warm_up_is_linear_and_ends_at_the_peak(schedule):
    c = config(schedule)
    for step in range(1, WARMUP + 1):
        # one product and one quotient: two roundings
        assert learning_rate(c, step, TOTAL) == pytest.approx(PEAK * step / WARMUP, rel=2 * 2**-53)
    assert learning_rate(c, WARMUP, TOTAL) == PEAK
    assert learning_rate(c, WARMUP + 1, TOTAL) <= PEAK


@pytest.mark.parametrize("schedule", ["cosine", "wsd", "linear"])
def test_decay_ends_at_the_minimum_and_stays(schedule):
    for c, end in ((config(schedule), TOTAL), (config(schedule, decay_steps=60), 60)):
        assert learning_rate(c, end - 1, TOTAL) > LOW
        assert [learning_rate(c, s, TOTAL) for s in (end, end + 1, 10 * TOTAL)] == [LOW] * 3
        rates = [learning_rate(c, s, TOTAL) for s in range(WARMUP, end + 1)]
        assert rates == sorted(rates, reverse=True)


def test_closed_forms():
    at = learning_rate
    # ten roundings at most in each form
    near = lambda x: pytest.approx(x, rel=10 * 2**-53)  # noqa: E731
    assert at(config("cosine"), 55, TOTAL) == near((PEAK + LOW) / 2)
    third = LOW + (PEAK - LOW) * (1 + math.cos(math.pi / 3)) / 2
    assert at(config("cosine"), 40, TOTAL) == near(third)
    assert at(config("linear"), 40, TOTAL) == near(PEAK - (PEAK - LOW) / 3)
    assert [at(config("wsd"), s, TOTAL) for s in (11, 50, 80)] == [PEAK] * 3
    assert at(config("wsd"), 81, TOTAL) == near(PEAK - (PEAK - LOW) / 20)
    assert at(config("wsd"), 90, TOTAL) == near((PEAK + LOW) / 2)
    assert at(config("constant"), 10**6, TOTAL) == PEAK
    assert at(config("inverse_sqrt"), 40, TOTAL) == near(PEAK / 2)
    assert at(config("inverse_sqrt"), 10**9, TOTAL) == LOW


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_no_warm_up_begins_at_the_peak_side(schedule):
    more = {"wsd_decay_steps": 5} if schedule == "wsd" else {}
    c = OptimizerConfig(lr=PEAK, min_lr=LOW, schedule=schedule, **more)
    assert learning_rate(c, 0, TOTAL) == PEAK
    assert LOW < learning_rate(c, 1, TOTAL) <= PEAK


@pytest.mark.parametrize(
    ("schedule", "make"),
    [
        ("cosine", lambda o: transformers.get_cosine_schedule_with_warmup(o, WARMUP, TOTAL)),
        ("linear", lambda o: transformers.get_linear_schedule_with_warmup(o, WARMUP, TOTAL)),
        ("constant", lambda o: transformers.get_constant_schedule_with_warmup(o, WARMUP)),
        ("inverse_sqrt", lambda o: transformers.get_inverse_sqrt_schedule(o, WARMUP)),
        (
            "wsd",
            lambda o: transformers.get_wsd_schedule(
                o, WARMUP, 20, num_training_steps=TOTAL, decay_type="linear"
            ),
        ),
    ],
)
def test_same_rates_as_transformers(schedule, make):
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))], lr=PEAK)
    scheduler = make(optimizer)
    c = config(schedule, min_lr=0.0)
    for step in range(TOTAL):
        # theirs counts finished steps, so its first step has rate 0 and ours, counted from 1, lr / warmup.
        # Below 1e-15 of the peak is a few roundings of the cosine near its zero.
        theirs = scheduler.get_last_lr()[0]
        assert learning_rate(c, step, TOTAL) == pytest.approx(theirs, rel=1e-12, abs=1e-15 * PEAK), step
        optimizer.step()
        scheduler.step()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"lr": 0.0}, "lr: 0.0 is refused"),
        ({"lr": float("nan")}, "lr: nan is refused"),
        ({"beta2": 1.0}, "beta2: 1.0 is refused"),
        ({"eps": 0.0}, "eps: 0.0 is refused"),
        ({"clip_grad": -1.0}, "clip_grad: -1.0 is refused"),
        ({"warmup_steps": -1}, "warmup_steps: -1 is refused"),
        ({"schedule": "cosin"}, "schedule: 'cosin' is refused"),
        ({"kernel": "triton"}, "kernel: 'triton' is refused"),
        ({"lr": 1e-3, "min_lr": 1e-2}, "min_lr 0.01 is above lr 0.001"),
        ({"schedule": "wsd"}, "schedule wsd needs wsd_decay_steps > 0"),
        ({"warmup_steps": 5, "warmup_tokens": 80}, "warmup_steps 5 and warmup_tokens 80 say one thing twice"),
        ({"decay_tokens": 1, "decay_steps": 1}, "decay_steps 1 and decay_tokens 1 say one thing twice; set one"),
        ({"wsd_decay_tokens": 5}, "wsd_decay_tokens 5 is for wsd, not cosine"),
        ({"wsd_decay_steps": 5}, "wsd_decay_steps 5 is for wsd, not cosine"),
        ({"weight_decy": 0.1}, "weight_decy: unknown key; nearest: weight_decay"),
    ],
)
def test_bad_values_are_refused_in_one_line(values, message):
    with pytest.raises(ConfigError) as caught:
        build(OptimizerConfig, values)
    assert message in str(caught.value) and len(str(caught.value).splitlines()) == 1


def test_schedules_that_do_not_fit_the_run():
    assert check_schedule(config("cosine"), TOTAL) == check_schedule(config("constant"), 5) == []
    assert check_schedule(config("cosine"), 10) == [
        "optimizer.warmup_steps = 10 is not before train.steps = 10; use at most 9"
    ]
    assert check_schedule(config("linear", decay_steps=8), TOTAL) == [
        "optimizer.warmup_steps = 10 is not before optimizer.decay_steps = 8; use at most 7"
    ]
    assert check_schedule(config("wsd"), 25) == [
        "optimizer.warmup_steps 10 + wsd_decay_steps 20 is beyond train.steps = 25; use wsd_decay_steps <= 15"
    ]


TOKENS = {"warmup_tokens": WARMUP * 128, "decay_tokens": 60 * 128}


@pytest.mark.parametrize("shape", SCHEDULES)
def test_tokens_say_what_steps_say_at_a_constant_batch(shape):
    more = {"wsd_decay_tokens": 20 * 128} if shape == "wsd" else {}
    in_tokens, in_steps = config(shape, **TOKENS, **more), config(shape, decay_steps=60)
    assert schedule(in_tokens, TOTAL).by_tokens and not schedule(in_steps, TOTAL).by_tokens
    # quotients of integers that share the factor 128: the same doubles, but for lr * position before the quotient
    for step in range(1, TOTAL + 1):
        expected = learning_rate(in_steps, step, TOTAL)
        assert learning_rate(in_tokens, step, TOTAL) == pytest.approx(expected, rel=4 * 2**-53)


RAMP = BatchSize(8, (2, 2, 60))


def walk(batches: BatchSize, steps: int, consumed: int = 0) -> list[int]:
    ends = []
    for _ in range(steps):
        consumed += batches.at(consumed)
        ends.append(consumed)
    return ends


@pytest.mark.parametrize("shape", SCHEDULES)
def test_under_a_ramp_the_rate_is_a_function_of_the_samples(shape):
    """The n-th step of any start has the rate of its samples: a resume cannot tell (resume-lr-schedule, R007)."""
    made, ends = schedule(config(shape), TOTAL, RAMP), walk(RAMP, TOTAL)
    rates = [made(step=n, consumed_samples=end) for n, end in enumerate(ends, 1)]
    assert rates[WARMUP - 1] == PEAK  # a length in steps ends where that step ends
    for n in range(1, WARMUP):
        assert rates[n - 1] == pytest.approx(PEAK * ends[n - 1] / ends[WARMUP - 1], rel=2 * 2**-53)
    if shape in ("cosine", "wsd", "linear"):
        assert rates[-2] > rates[-1] == LOW
    again = walk(RAMP, 40, consumed=ends[59])
    assert [made(step=10**6, consumed_samples=end) for end in again] == rates[60:]


def test_wsd_decays_over_the_last_steps_under_a_ramp():
    made, ends = schedule(config("wsd"), TOTAL, RAMP), walk(RAMP, TOTAL)
    assert made.lengths.final_decay == (ends[99] - ends[79]) * 16
    assert made(step=80, consumed_samples=ends[79]) == PEAK > made(step=81, consumed_samples=ends[80])


def test_lengths_in_tokens_that_do_not_fit():
    long = config("cosine", warmup_tokens=10**6)
    assert schedule(long, TOTAL).problems() == [
        "optimizer.warmup_tokens = 1000000 is not before the last of train.steps, token = 12800; use at most 12799"
    ]
    tail = config("wsd", wsd_decay_tokens=5000, decay_tokens=6000)
    assert schedule(tail, TOTAL).problems() == [
        "optimizer.warmup_tokens 1280 + wsd_decay_tokens 5000 is beyond optimizer.decay_tokens = 6000; "
        "use wsd_decay_tokens <= 4720"
    ]
