"""Numbers of the report on curves whose answers are known."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megafp8.report.curves import (
    difference,
    half_width,
    smooth,
    steady_median,
    step_noise,
    tail_mean,
    thin,
    validation_gap,
)
from megafp8.report.runs import read_run
from tests.unit.report.made_run import make_run


def test_smooth_keeps_a_line_and_ignores_what_is_not_finite() -> None:
    line = np.arange(50.0)
    # sums of integers below 2**53 are exact, and so is their division by a count that divides them; at the end stands
    # a least-squares fit of 11 values below 50, whose condition is below 100: 50 * 100 * 2**-52 < 1e-11
    assert np.array_equal(smooth(line, 5)[:-5], line[:-5])
    assert np.allclose(smooth(line, 5), line, rtol=0, atol=1e-11)
    line[20] = np.nan
    smoothed = smooth(line, 5)
    assert np.isfinite(smoothed).all()
    assert smoothed[20] == 20.0  # what is left of the window is still symmetric about 20


def test_smooth_is_the_mean_of_its_window() -> None:
    values = np.random.default_rng(0).normal(size=40)
    # cumulative sums of 40 values of order 1: rounding below 40 * 2**-52 * 10
    assert smooth(values, 3)[10] == pytest.approx(values[7:14].mean(), abs=1e-13)
    assert np.isnan(smooth(np.full(3, np.nan), 1)).all()


def test_the_end_of_a_smoothed_curve_is_no_single_step() -> None:
    noise = np.random.default_rng(0).normal(size=(200, 400))
    ends = np.array([smooth(values, 8)[-1] for values in noise])
    # the end of a line fitted to n = 17 values has a variance of (4 - 6 / (n + 1)) / n = 0.22; 200 samples of it
    # scatter by a tenth: 0.22 + 4 * 0.022 < 0.32, while a single step has 1
    assert ends.var() < 0.32


def test_step_noise_sees_through_trend_and_spikes() -> None:
    rng = np.random.default_rng(1)
    steps = np.arange(20_000)
    losses = 3 + 4 * np.exp(-steps / 3000) + rng.normal(0, 0.05, len(steps))
    losses[rng.integers(0, len(steps), 100)] += 3.0
    # the quartiles of n values scatter by 1.36 sigma / sqrt(n), so sigma from their range by 1.65 % / sqrt(n / 1e4);
    # 200 of 15000 differences moved by spikes shift it by about 1.3 %: 5 % holds both with room
    assert step_noise(losses) == pytest.approx(0.05, rel=0.05)
    assert np.isnan(step_noise(losses[:7]))


def test_final_values() -> None:
    assert tail_mean(np.arange(400.0)) == 389.5  # 380..399
    assert tail_mean(np.arange(50.0)) == 44.5  # 40..49
    assert tail_mean(np.array([3.0])) == 3.0
    assert np.isnan(tail_mean(np.array([np.nan])))
    assert steady_median(np.array([100.0, *([2.0] * 9)])) == 2.0
    assert (half_width(3), half_width(1000)) == (3, 20)


def test_thin_keeps_the_ends_and_everything_that_fits() -> None:
    assert np.array_equal(thin(10), np.arange(10))
    kept = thin(1_000_000)
    assert (kept[0], kept[-1]) == (0, 999_999)
    assert len(kept) <= 2000


def test_difference_of_runs_on_common_steps(tmp_path: Path) -> None:
    baseline = read_run(make_run(tmp_path / "a", steps=200, checkpoint=False))
    run = read_run(make_run(tmp_path / "b", recipe="delayed", steps=120, checkpoint=False))
    diff = difference(run, baseline)
    assert diff is not None
    assert diff.same_data
    assert diff.steps.tolist() == list(range(1, 121))
    assert np.array_equal(diff.raw, run.series("loss") - baseline.series("loss")[:120])
    # made with 0.004 nats and 0.006 nats of noise a step; the mean of the last 10 has 0.006 / sqrt(10), taken 4 times
    assert diff.final == pytest.approx(0.004, abs=4 * 0.006 / np.sqrt(10))
    # quartiles of 90 differences give sigma within 1.65 / sqrt(90) = 17 %, taken 3 times
    assert diff.own_noise == pytest.approx(0.006, rel=0.52)
    assert diff.own_noise < diff.noise / 4


def test_validation_is_subtracted_at_the_last_common_step(tmp_path: Path) -> None:
    baseline = read_run(make_run(tmp_path / "a", steps=200, checkpoint=False))
    run = read_run(make_run(tmp_path / "b", recipe="delayed", steps=100, checkpoint=False))
    # made with 0.003 nats on top at every step; two losses below 16 are right to 2**-49 each
    assert validation_gap(run, baseline, "valid") == pytest.approx(0.003, abs=1e-13)
    assert np.isnan(validation_gap(run, baseline, "other"))


def test_runs_of_other_batch_sizes_are_not_subtracted(tmp_path: Path) -> None:
    baseline = read_run(make_run(tmp_path / "a", steps=20, checkpoint=False))
    other = make_run(tmp_path / "b", steps=20, checkpoint=False)
    text = (other / "metrics.jsonl").read_text().replace('"consumed_tokens": ', '"consumed_tokens": 2')
    (other / "metrics.jsonl").write_text(text)
    assert difference(read_run(other), baseline) is None
