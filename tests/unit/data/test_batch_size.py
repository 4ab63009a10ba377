"""The batch of each step: Megatron's ramp, its closed form for whole runs, and what is refused."""

from __future__ import annotations

import pytest

from megafp8.data.batch_size import BatchSize, batch_problems, ramp_problems

RAMPS = [(8, (2, 2, 60)), (8, (2, 2, 61)), (24, (4, 5, 1)), (96, (32, 32, 1000)), (4, (1, 1, 3)), (16, (8, 8, 7))]


@pytest.mark.parametrize("full, ramp", RAMPS)
def test_equals_megatrons_calculator(full: int, ramp: tuple[int, ...]) -> None:
    """Their rule in exact arithmetic: start + increment * floor(consumed / (samples / increments)), then full."""
    start, increment, samples = ramp
    batches = BatchSize(full, ramp)
    for consumed in range(samples + 3 * full):
        share = consumed * ((full - start) // increment) // samples
        assert batches.at(consumed) == (full if consumed > samples else start + increment * share)


@pytest.mark.parametrize("full, ramp", [*RAMPS, (5, ())])
def test_consumed_after_is_the_sum_of_the_batches(full: int, ramp: tuple[int, ...]) -> None:
    batches, consumed, met = BatchSize(full, ramp), 0, set()
    for steps in range(200):
        assert batches.consumed_after(steps) == consumed
        met.add(batches.at(consumed))
        consumed += batches.at(consumed)
    assert met <= set(batches.sizes()) and batches.sizes() == sorted(batches.sizes())
    assert batches.sizes()[-1] == full


def test_a_trillion_samples_are_counted_at_once() -> None:
    assert BatchSize(1024, (32, 32, 10**9)).consumed_after(10**12) > 10**14


@pytest.mark.parametrize("ramp, message", [
    ((2, 2), "batch_ramp = [2, 2] must be [start, increment, samples], each at least 1; or [] for none"),
    ((0, 2, 9), "must be [start, increment, samples]"),
    ((8, 2, 9), "start 8 is not below global_batch 8; use less, or [] for no ramp"),
    ((3, 2, 9), "global_batch 8 - start 3 is not divisible by increment 2; nearest start: 2, 4"),
])  # fmt: skip
def test_refusals(ramp: tuple[int, ...], message: str) -> None:
    (problem,) = ramp_problems(8, ramp)
    assert message in problem


def test_every_batch_must_divide() -> None:
    assert batch_problems(32, (16, 8, 99), dp=2, micro_batch=4) == []
    assert batch_problems(30, (6, 12, 99), dp=2, micro_batch=4) == [
        "train.global_batch 30 is not divisible by dp 2 x train.micro_batch 4; nearest: 24, 32",
        "train.batch_ramp's start 6 is not divisible by dp 2 x train.micro_batch 4; nearest: 8",
        "train.batch_ramp's increment 12 is not divisible by dp 2 x train.micro_batch 4; nearest: 8, 16",
    ]
