"""The page's first table and sentence: what each run is and how it ended, and how the others differ from the first."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from megafp8.report.curves import Difference, steady_median, tail_mean, tokens_per_step, validation_gap
from megafp8.report.runs import Run

UNKNOWN = "–"


@dataclass(frozen=True)
class Row:
    """A line of the table: a value a run, and for each run after the first its difference from the first."""

    label: str
    hint: str
    values: list[str]
    differences: list[str]


def compact(value: float, digits: int = 3) -> str:
    """A count in powers of a thousand: 5.24 M, 1.5 B; the dash for NaN."""
    if not math.isfinite(value):
        return UNKNOWN
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= size:
            return f"{value / size:.{digits}g} {unit}"
    return f"{value:.{digits}g}"


def fixed(value: float, decimals: int) -> str:
    """A number with a fixed count of decimals and a true minus; the dash for NaN."""
    return f"{value:,.{decimals}f}".replace("-", "\u2212") if math.isfinite(value) else UNKNOWN


def signed(value: float, decimals: int) -> str:
    """Like `fixed`, with its sign."""
    return f"{value:+,.{decimals}f}".replace("-", "\u2212") if math.isfinite(value) else UNKNOWN


def duration(seconds: float) -> str:
    """Hours, minutes and seconds as 1 h 02 min or 3 min 07 s."""
    if not math.isfinite(seconds):
        return UNKNOWN
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s" if minutes else f"{seconds:.3g} s"


def rate(flops: float) -> str:
    """FLOP/s of a peak in GFLOP/s or TFLOP/s."""
    if not math.isfinite(flops):
        return UNKNOWN
    return f"{flops / 1e12:,.4g} TFLOP/s" if flops >= 1e12 else f"{flops / 1e9:,.4g} GFLOP/s"


def fact(run: Run, key: str) -> float:
    """A number of run.json, NaN if it is not there."""
    value = run.facts.get(key)
    return float(value) if isinstance(value, (int, float)) else math.nan


def _relative(label: str, hint: str, numbers: list[float], values: list[str]) -> Row:
    return Row(label, hint, values, [_change(n / numbers[0] if numbers[0] else math.nan) for n in numbers[1:]])


def _change(ratio: float) -> str:
    return signed(100.0 * (ratio - 1.0), 1) + " %" if math.isfinite(ratio) else UNKNOWN


def exp(loss: float) -> float:
    """Perplexity of a loss, infinite where a float ends."""
    return math.exp(loss) if not loss > 700 else math.inf


def _plain(label: str, hint: str, values: list[str]) -> Row:
    return Row(label, hint, values, ["" for _ in values[1:]])


def rows(runs: list[Run], others: list[Difference | None]) -> list[Row]:
    """The table: what the run was, how well it learned, how fast it went.

    Losses are subtracted at the last steps that both runs have: a run that is still on its way is not the worse for it.
    """
    return [*_identity(runs), *_quality(runs, others), *_speed(runs)]


def _identity(runs: list[Run]) -> list[Row]:
    tokens = [float(run.series("consumed_tokens")[-1]) for run in runs]
    steps = [f"{run.steps[-1]:,}" + _of_planned(run) for run in runs]
    return [
        _plain("Precision", "of the matrix products of the linear layers", [run.precision for run in runs]),
        _plain("Parameters", "", [compact(fact(run, "num_parameters")) for run in runs]),
        _plain("Tokens trained on", "", [compact(n) for n in tokens]),
        _plain("Steps", "", steps),
        _plain("Tokens a step", "", [fixed(tokens_per_step(run), 0) for run in runs]),
    ]


def _of_planned(run: Run) -> str:
    planned = run.config.get("train", {}).get("steps")
    return f" of {planned:,}" if isinstance(planned, int) and planned != run.steps[-1] else ""


def _quality(runs: list[Run], others: list[Difference | None]) -> list[Row]:
    losses = [fixed(tail_mean(run.series("loss")), 4) for run in runs]
    gaps = [signed(diff.final if diff is not None else math.nan, 4) for diff in others]
    found = [Row("Final training loss", "nats a token, mean of the last 5 % of steps, at least 10", losses, gaps)]
    for name in sorted({name for run in runs for name in run.evals}):
        label = "validation" if name == "valid" else f"validation, {name}"
        last = [run.evals[name][-1] if name in run.evals else {} for run in runs]
        numbers = [float(record.get("loss", math.nan)) for record in last]
        apart = [validation_gap(run, runs[0], name) for run in runs[1:]]
        values, hint = [fixed(n, 4) for n in numbers], "nats a token, after the last step evaluated"
        found.append(Row(f"Final {label} loss", hint, values, [signed(gap, 4) for gap in apart]))
        values = [fixed(exp(n), 2) for n in numbers]
        changes = [_change(exp(gap)) for gap in apart]
        found.append(Row(f"Final {label} perplexity", "exp of that loss", values, changes))
    skipped = [run.series("skipped")[-1] for run in runs]
    if np.nansum(skipped) > 0:
        found.append(_plain("Steps skipped", "loss or gradient not finite", [fixed(n, 0) for n in skipped]))
    return found


def _speed(runs: list[Run]) -> list[Row]:
    speed = [steady_median(run.series("tokens_per_second")) for run in runs]
    found = [_relative("Tokens a second", "median over steps, all ranks", speed, [fixed(n, 0) for n in speed])]
    for key, label, hint in (
        ("mfu_causal", "MFU, causal attention", "scores counted where the mask lets them through"),
        ("mfu_full", "MFU, full attention", "scores counted for all pairs of positions"),
    ):
        shares = [steady_median(run.mfu(key)) for run in runs]
        found.append(_relative(label, hint, shares, [fixed(n, 1) + " %" if n == n else UNKNOWN for n in shares]))
    memory = [float(np.nanmax([*run.series("memory_bytes"), -1.0])) for run in runs]
    memory = [n if n >= 0 else math.nan for n in memory]
    shown = [f"{n / 2**30:.2f} GiB" if math.isfinite(n) else UNKNOWN for n in memory]
    found.append(_relative("Peak memory", "of rank 0", memory, shown))
    seconds = [float(run.series("run_seconds")[-1]) for run in runs]
    found.append(_plain("Time", "of all attempts, evaluation and saving included", [duration(s) for s in seconds]))
    return found


def peak_notes(runs: list[Run]) -> list[str]:
    """What MFU is counted against, a sentence for all runs or one for each."""
    texts = [_peak_text(run) for run in runs]
    if len(set(texts)) == 1:
        several = len({fact(run, "peak_flops") for run in runs if math.isfinite(run.peak_flops)}) > 1
        return [f"MFU is counted against {texts[0]}" + ("; the highest that these runs measured." if several else ".")]
    return [f"{run.name}: MFU is counted against {text}." for run, text in zip(runs, texts)]


def _peak_text(run: Run) -> str:
    peak = run.peak_flops
    source = run.facts.get("peak_source") or "source not recorded"
    return f"a BF16 peak of {rate(peak)} a rank ({source})" if math.isfinite(peak) else "a peak that is not recorded"


def verdict(runs: list[Run], others: list[Difference | None]) -> list[str]:
    """The comparison in sentences, one for each run after the first; what one run learned if it is alone."""
    if len(runs) == 1:
        return [_learned(runs[0])]
    return [_compared(run, runs[0], diff) for run, diff in zip(runs[1:], others)]


def _learned(run: Run) -> str:
    loss, entropy = tail_mean(run.series("loss")), fact(run, "unigram_entropy_nats")
    text = f"{run.name} ends at a training loss of {fixed(loss, 3)} nats a token"
    if not math.isfinite(entropy):
        return text + "."
    side = "below" if loss < entropy else "above"
    return f"{text}, {fixed(abs(entropy - loss), 3)} {side} the unigram entropy of its tokens ({fixed(entropy, 3)})."


def _compared(run: Run, baseline: Run, diff: Difference | None) -> str:
    if diff is None:
        return f"{run.name} and {baseline.name} share no steps of equal size, so their curves are not subtracted."
    together = int(diff.steps[-1])
    when = "ends" if together == run.steps[-1] == baseline.steps[-1] else f"at step {together:,} is"
    text = f"{run.name} {when} {_above(diff.final)} {baseline.name} in training loss"
    if math.isfinite(diff.noise) and diff.noise > 0:
        text += f", {abs(diff.final) / diff.noise:.2f} times the step-to-step noise of {diff.noise:.4f}"
    for name in sorted(run.evals.keys() & baseline.evals.keys()):
        gap = validation_gap(run, baseline, name)
        text += f"; {_above(gap)} in validation loss" + ("" if name == "valid" else f" on {name}")
    return text + "."


def _above(gap: float) -> str:
    return f"{abs(gap):.4f} nats {'above' if gap >= 0 else 'below'}" if math.isfinite(gap) else "unknown nats from"
