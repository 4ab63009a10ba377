"""Numbers out of training curves: smoothing, step-to-step noise, differences. No drawing here."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megafp8.report.runs import Run

# The share of a run, and the fewest steps, over which a final value is averaged: one step alone is mostly noise.
TAIL_SHARE, TAIL_STEPS = 0.05, 10


def smooth(values: np.ndarray, half_width: int) -> np.ndarray:
    """Centred moving average over 2 half_width + 1 values, ignoring NaN. float64, same shape.

    Near the start, where a loss falls steeply, the window shrinks on both sides alike. Near the end, where that would
    leave the last value as noisy as a single step, a straight line fitted to the last window takes over.
    """
    finite = np.isfinite(values)
    sums = np.concatenate([[0.0], np.cumsum(np.where(finite, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(finite)])
    index = np.arange(len(values))
    half = np.minimum(half_width, np.minimum(index, len(values) - 1 - index))
    number = counts[index + half + 1] - counts[index - half]
    total = sums[index + half + 1] - sums[index - half]
    result = np.divide(total, number, out=np.full(len(values), np.nan), where=number > 0)
    window = index[-2 * half_width - 1 :]
    window = window[finite[window]]
    if len(values) > 2 * half_width and len(window) > 2:
        slope, level = np.polyfit(window - index[-1], values[window], 1)
        result[-half_width:] = level + slope * (index[-half_width:] - index[-1])
    return result


def half_width(count: int) -> int:
    """Half of the smoothing window for a curve of `count` points: about 4% of it in all, at least 7 points."""
    return max(3, count // 50)


def step_noise(losses: np.ndarray) -> float:
    """Standard deviation of the loss of single steps around its trend, in nats; NaN for fewer than 8 steps.

    The trend is removed by differencing neighbours, which leaves the noise of both: hence the square root of two. The
    first quarter is left out, where the loss falls steeply. Spikes do not inflate it: the deviation is taken from the
    interquartile range, 1.349 standard deviations of a normal distribution.
    """
    tail = losses[len(losses) // 4 :]
    differences = np.diff(tail[np.isfinite(tail)])
    if len(differences) < 6:
        return float("nan")
    low, high = np.percentile(differences, [25, 75])
    return float((high - low) / 1.349 / np.sqrt(2.0))


def tail_mean(values: np.ndarray) -> float:
    """Mean over the last 5% of a curve (at least 10 values), ignoring NaN; NaN if there is none."""
    tail = values[-max(TAIL_STEPS, round(len(values) * TAIL_SHARE)) :]
    return float(np.mean(tail[np.isfinite(tail)])) if np.isfinite(tail).any() else float("nan")


def steady_median(values: np.ndarray) -> float:
    """Median without the first tenth, where compilation and cold caches are; NaN if there is no value."""
    steady = values[len(values) // 10 :]
    return float(np.median(steady[np.isfinite(steady)])) if np.isfinite(steady).any() else float("nan")


@dataclass(frozen=True)
class Difference:
    """Loss of a run minus that of the baseline, at the steps that both have.

    Attributes:
        steps, raw, smoothed: int64 and float64 [num common steps]; nats.
        noise: step-to-step noise of the baseline, nats.
        own_noise: step-to-step noise of the difference itself, nats.
        final: mean of the raw difference over the last 5% of the steps, nats.
        same_data: whether both saw the same samples in the same order, by their configuration.
    """

    steps: np.ndarray
    raw: np.ndarray
    smoothed: np.ndarray
    noise: float
    own_noise: float
    final: float
    same_data: bool


def difference(run: Run, baseline: Run) -> Difference | None:
    """Compare two runs; None if no step is common or a step means another number of tokens."""
    steps, mine, theirs = np.intersect1d(run.steps, baseline.steps, return_indices=True)
    if len(steps) == 0 or not same_tokens(run, baseline):
        return None
    raw = run.series("loss")[mine] - baseline.series("loss")[theirs]
    return Difference(
        steps=steps,
        raw=raw,
        smoothed=smooth(raw, half_width(len(raw))),
        noise=step_noise(baseline.series("loss")),
        own_noise=step_noise(raw),
        final=tail_mean(raw),
        same_data=_same_data(run, baseline),
    )


def validation_gap(run: Run, baseline: Run, name: str) -> float:
    """Validation loss of a run minus the baseline's, nats, at the last step at which both were evaluated; else NaN."""
    mine, theirs = ({r["step"]: float(r["loss"]) for r in each.evals.get(name, [])} for each in (run, baseline))
    common = mine.keys() & theirs.keys()
    if not common or not same_tokens(run, baseline):
        return float("nan")
    return mine[max(common)] - theirs[max(common)]


def tokens_per_step(run: Run) -> float:
    """Tokens of one step by the last record; NaN if it does not say."""
    tokens = run.series("consumed_tokens")
    return float(tokens[-1] / run.steps[-1]) if run.steps[-1] else float("nan")


def same_tokens(run: Run, other: Run) -> bool:
    """Whether a step of both means the same number of tokens, as far as they say."""
    mine, theirs = tokens_per_step(run), tokens_per_step(other)
    return not (np.isfinite(mine) and np.isfinite(theirs)) or bool(np.isclose(mine, theirs, rtol=1e-6))


def _same_data(run: Run, baseline: Run) -> bool:
    mine, theirs = run.config, baseline.config
    if not mine or not theirs:
        return False
    keys = ("train", "tokenizer", "sequence_length")
    return mine["run"].get("seed") == theirs["run"].get("seed") and all(
        mine["data"].get(key) == theirs["data"].get(key) for key in keys
    )


def thin(count: int, limit: int = 2000) -> np.ndarray:
    """Indices that keep at most about `limit` of `count` points, first and last among them; for drawing only."""
    return np.unique(np.linspace(0, count - 1, min(count, limit)).round().astype(np.int64))
