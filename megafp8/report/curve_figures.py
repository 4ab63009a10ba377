"""Drawings of what changes over a run: loss and its difference, validation, speed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from megafp8.report.curves import Difference, half_width, smooth, thin
from megafp8.report.headline import compact, fact
from megafp8.report.runs import Run
from megafp8.report.style import COLOURS, RC, Picture, new_figure, render, run_colour, run_width

WIDTH = 9.6  # inches; the page shows a figure at the width of its column
_MANY = 3  # runs; beyond, single steps of all of them would hide the averages


def loss_figure(runs: Sequence[Run], others: Sequence[Difference | None]) -> Picture:
    """Training loss of all runs, and below it each difference from the first against the step-to-step noise."""
    shown = [(i, d) for i, d in enumerate(others, 1) if d is not None]
    with matplotlib.rc_context(RC):
        figure = new_figure(WIDTH, 6.2 if shown else 3.7)
        heights = [1.8, 1.0] if shown else [1.0]
        grid = figure.add_gridspec(len(heights), 2, width_ratios=[1.7, 1.0], height_ratios=heights)
        whole, late = figure.add_subplot(grid[0, 0]), figure.add_subplot(grid[0, 1])
        draw_losses(whole, runs)
        _draw_entropy(whole, runs)
        whole.set_title("Training loss, nats a token")
        whole.legend(loc="upper right", bbox_to_anchor=(1.0, 0.99))
        draw_losses(late, runs)
        zoom(late, runs)
        late.set_title("The last third, enlarged")
        if shown:
            bottom = figure.add_subplot(grid[1, :])
            _draw_differences(bottom, runs, shown)
            step_axis(bottom)
        for axes in (whole, late):
            step_axis(axes)
        return render(figure, "loss", _loss_words(runs, bool(shown)))


def _loss_words(runs: Sequence[Run], compared: bool) -> str:
    text = f"Training loss over steps of {', '.join(run.name for run in runs)}, against the unigram entropy"
    return text + ("; below, the smoothed difference and the step-to-step noise" if compared else "")


def draw_losses(axes: Axes, runs: Sequence[Run]) -> None:
    """Single steps thin (of the first run alone if there are many), their average bold, a colour a run."""
    for index, run in enumerate(runs):
        losses, steps, colour = run.series("loss"), run.steps, run_colour(index)
        keep, trend = thin(len(steps)), smooth(losses, half_width(len(losses)))
        if index == 0 or len(runs) <= _MANY:
            axes.plot(steps[keep], losses[keep], color=colour, alpha=0.28, linewidth=0.8)
        label = f"{run.name} ({run.precision})"
        axes.plot(steps[keep], trend[keep], color=colour, linewidth=run_width(index), label=label)


def _draw_entropy(axes: Axes, runs: Sequence[Run]) -> None:
    entropies = {round(n, 6) for n in (fact(run, "unigram_entropy_nats") for run in runs) if np.isfinite(n)}
    for entropy in sorted(entropies):
        axes.axhline(entropy, color=COLOURS["muted"], linewidth=1.0, linestyle=(0, (5, 3)))
        axes.annotate(
            f"unigram entropy {entropy:.3f}", (1.0, entropy), (-2, 4), ha="right", color=COLOURS["muted"],
            xycoords=("axes fraction", "data"), textcoords="offset points",
        )  # fmt: skip


def zoom(axes: Axes, runs: Sequence[Run]) -> None:
    """Limits around the last third of the longest run."""
    last = max(int(run.steps[-1]) for run in runs)
    first = last - last // 3
    tails = [run.series("loss")[run.steps >= first] for run in runs]
    values = np.concatenate(tails)
    values = values[np.isfinite(values)]
    if len(values):
        low, high = float(values.min()), float(values.max())
        pad = 0.06 * (high - low) or 0.01
        axes.set_ylim(low - pad, high + pad)
    axes.set_xlim(first, last + max(1, last // 100))


def _draw_differences(axes: Axes, runs: Sequence[Run], shown: Sequence[tuple[int, Difference]]) -> None:
    noise = shown[0][1].noise
    for index, diff in shown:
        keep = thin(len(diff.steps))
        colour = run_colour(index)
        if len(runs) <= _MANY:
            axes.plot(diff.steps[keep], diff.raw[keep], color=colour, alpha=0.28, linewidth=0.8)
        label = f"{runs[index].name} \u2212 {runs[0].name}"
        axes.plot(diff.steps[keep], diff.smoothed[keep], color=colour, label=label)
    axes.axhline(0.0, color=COLOURS["muted"], linewidth=1.0)
    late = np.concatenate([np.abs(diff.raw[len(diff.raw) // 4 :]) for _, diff in shown])
    reach = float(np.nanpercentile(late, 99.5)) * 1.3 if np.isfinite(late).any() else 1.0
    if np.isfinite(noise) and noise > 0:
        axes.axhspan(-noise, noise, color=COLOURS["soft"], alpha=0.45, linewidth=0)
        axes.annotate(
            f"\u00b1 step-to-step noise of {runs[0].name}, {noise:.3f}", (1.0, noise), (-2, 3), ha="right",
            xycoords=("axes fraction", "data"), textcoords="offset points", color=COLOURS["muted"],
        )  # fmt: skip
        reach = max(reach, 1.7 * noise)
    axes.set_ylim(-reach or -1.0, reach or 1.0)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:+.3g}".replace("-", "\u2212") if v else "0"))
    axes.set_title("Difference of training losses, nats a token")
    axes.legend(loc="lower right", ncols=3)


def step_axis(axes: Axes) -> None:
    """Label and ticks of an axis of steps."""
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, steps=[1, 2, 2.5, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:,.0f}" if v < 1e5 else compact(v)))


_MARKERS = ("o", "s", "^", "D", "v", "P")


def validation_figure(runs: Sequence[Run]) -> Picture | None:
    """Validation loss of every set on the left axis, the same as perplexity on the right; None if there is none."""
    sets = sorted({name for run in runs for name in run.evals})
    if not sets:
        return None
    with matplotlib.rc_context(RC):
        figure = new_figure(WIDTH, 3.6)
        all_axes = figure.subplots(1, len(sets), squeeze=False)[0]
        for axes, name in zip(all_axes, sets):
            _draw_validation(axes, runs, name)
        all_axes[0].legend(loc="upper right")
        words = f"Validation loss and perplexity over steps of {', '.join(run.name for run in runs)}"
        return render(figure, "validation", words)


def _draw_validation(axes: Axes, runs: Sequence[Run], name: str) -> None:
    for index, run in enumerate(runs):
        records = run.evals.get(name, [])
        if records:
            steps, losses = [r["step"] for r in records], [float(r["loss"]) for r in records]
            marker = _MARKERS[index % len(_MARKERS)]
            size = 7.5 if index == 0 else 4.5
            axes.plot(
                steps, losses, color=run_colour(index), linewidth=run_width(index), marker=marker, markersize=size,
                label=run.name,
            )  # fmt: skip
    axes.set_title("Validation loss, nats a token" + ("" if name == "valid" else f": {name}"))
    step_axis(axes)
    low, high = axes.get_ylim()
    right = axes.twinx()
    right.grid(False)
    right.set_ylim(low, high)
    right.spines["right"].set_visible(True)
    ticks = _perplexity_ticks(low, high)
    right.yaxis.set_major_locator(FixedLocator([float(np.log(t)) for t in ticks]))
    right.yaxis.set_minor_locator(NullLocator())
    right.set_yticklabels([f"{t:,.4g}" for t in ticks])
    right.set_ylabel("perplexity")


def _perplexity_ticks(low: float, high: float) -> list[float]:
    """Round perplexities between exp(low) and exp(high), at most about eight."""
    for steps in ((1, 1.5, 2, 3, 4, 5, 6, 8), (1, 2, 3, 5), (1, 3), (1,)):
        ticks = [m * 10.0**e for e in range(-1, 12) for m in steps if low <= np.log(m * 10.0**e) <= high]
        if len(ticks) <= 8:
            break
    if len(ticks) >= 3:
        return ticks
    first, last = float(np.exp(low)), float(np.exp(high))
    values = MaxNLocator(5, steps=[1, 2, 5, 10]).tick_values(first, last)
    return [float(tick) for tick in values if first <= tick <= last and tick > 0]


_CONVENTIONS: tuple[tuple[str, Any], ...] = (("mfu_full", (0, (4, 2))), ("mfu_causal", "-"))


def speed_figure(runs: Sequence[Run]) -> Picture | None:
    """Tokens a second, and MFU with attention counted causally (solid) and in full (dashed)."""
    if not any(np.isfinite(run.series("tokens_per_second")).any() for run in runs):
        return None
    with matplotlib.rc_context(RC):
        figure = new_figure(WIDTH, 3.4)
        left, right = figure.subplots(1, 2)
        for index, run in enumerate(runs):
            colour, steps = run_colour(index), run.steps
            keep, half = thin(len(steps)), half_width(len(steps))
            tokens = run.series("tokens_per_second")
            left.plot(steps[keep], tokens[keep], color=colour, alpha=0.28, linewidth=0.8)
            left.plot(steps[keep], smooth(tokens, half)[keep], color=colour, label=run.name)
            for key, style in _CONVENTIONS:
                right.plot(steps[keep], smooth(run.mfu(key), half)[keep], color=colour, linestyle=style)
        left.set_title("Tokens a second, all ranks")
        left.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:,.0f}" if v < 1e5 else compact(v)))
        right.set_title("Model FLOPs utilisation, % of the BF16 peak")
        for axes in (left, right):
            axes.set_ylim(bottom=0, top=axes.get_ylim()[1] * 1.12)
            step_axis(axes)
        left.legend(loc="lower right")
        for key, style in _CONVENTIONS:  # colours are the runs', as on the left
            label = f"{key.removeprefix('mfu_')} attention"
            right.plot([], [], color=COLOURS["muted"], linestyle=style, label=label)
        right.legend(loc="lower right")
        return render(figure, "speed", "Tokens a second and MFU in both attention conventions over steps")
