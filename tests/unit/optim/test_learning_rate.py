"""Schedules against their closed forms, at their boundaries, and against transformers' own."""

from __future__ import annotations

import math

import pytest
import torch
import transformers

from megafp8.core.config import build
from megafp8.core.errors import ConfigError
from megafp8.optim.config import OptimizerConfig, check_schedule
from megafp8.optim.lr import learning_rate

TOTAL, WARMUP, PEAK, LOW = 100, 10, 1e-3, 1e-5


def config(schedule: str, **more) -> OptimizerConfig:
    if schedule == "wsd":
        more.setdefault("wsd_decay_steps", 20)
    return OptimizerConfig(
        lr=PEAK, min_lr=more.pop("min_lr", LOW), schedule=schedule, warmup_steps=WARMUP, **more
    )


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
