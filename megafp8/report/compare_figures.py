"""The comparison as pictures: all curves, their differences from the first run, held-out losses with intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure as MplFigure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from megafp8.report.compare import Numbers, set_names
from megafp8.report.curve_figures import draw_losses, step_axis, zoom
from megafp8.report.curves import Difference, thin
from megafp8.report.runs import Run
from megafp8.report.style import COLOURS, RC, Picture, new_figure, render, run_colour

WIDTH = 9.6
_COLUMNS = 2


def heldout_figure(found: Numbers) -> Picture | None:
    """A panel for each held-out set: every run's difference from the baseline with its interval; None without any."""
    names = _compared(found)
    if not names:
        return None
    with matplotlib.rc_context(RC):
        count = max(len(found["runs"]) - 1, 1)
        rows = -(-len(names) // _COLUMNS)
        figure = new_figure(WIDTH, rows * (0.9 + 0.27 * count))
        cells = figure.subplots(rows, _COLUMNS, squeeze=False)
        _draw_sets(list(cells.flat), found, names)
        return render(figure, "heldout", _words(found, names))


def compare_figure(runs: Sequence[Run], others: Sequence[Difference | None], found: Numbers) -> Picture:
    """One picture of the whole comparison: losses, their differences against the noise, held-out differences."""
    shown = [(i, d) for i, d in enumerate(others, 1) if d is not None]
    names = _compared(found)
    forest = -(-len(names) // _COLUMNS)
    heights = [2.9] + ([2.5] if shown else []) + [0.8 + 0.24 * max(len(runs) - 1, 1)] * forest
    with matplotlib.rc_context(RC | {"savefig.dpi": 120}):  # a picture for a README: small enough to keep there
        figure = new_figure(WIDTH, sum(heights) + 0.3)
        grid = figure.add_gridspec(len(heights), 2, height_ratios=heights)
        cells = [[figure.add_subplot(grid[row, column]) for column in range(2)] for row in range(len(heights))]
        whole, late = cells[0]
        draw_losses(whole, runs)
        draw_losses(late, runs)
        zoom(late, runs)
        whole.set_title("Training loss, nats a token")
        late.set_title("The last third, enlarged")
        for axes in (whole, late):
            step_axis(axes)
        if shown:
            _draw_noise(cells[1][0], runs, shown)
            _draw_close(cells[1][1], runs, shown)
        _draw_sets([axes for row in cells[2 if shown else 1 :] for axes in row], found, names)
        _draw_legend(figure, runs)
        return render(figure, "compare", _words(found, names))


def _compared(found: Numbers) -> list[str]:
    """Sets on which some run has a difference from the baseline."""
    return [n for n in set_names(found) if any((r["heldout"].get(n) or {}).get("difference") for r in found["runs"])]


def _words(found: Numbers, names: Sequence[str]) -> str:
    text = f"Runs {', '.join(run['name'] for run in found['runs'])} against {found['baseline']}"
    return text + (f"; losses on held-out {', '.join(names)} with bootstrap intervals" if names else "")


def _draw_noise(axes: Axes, runs: Sequence[Run], shown: Sequence[tuple[int, Difference]]) -> None:
    """All smoothed differences inside the band of the baseline's step-to-step noise."""
    noise = shown[0][1].noise
    _lines(axes, shown)
    reach = max(float(np.nanmax(np.abs(_late(diff)))) for _, diff in shown)
    if math.isfinite(noise) and noise > 0:
        axes.axhspan(-noise, noise, color=COLOURS["soft"], alpha=0.45, linewidth=0)
        axes.annotate(
            f"± one σ of {runs[0].name} from step to step, {noise:.3f}", (1.0, noise), (-2, 3), ha="right",
            xycoords=("axes fraction", "data"), textcoords="offset points", color=COLOURS["muted"],
        )  # fmt: skip
        reach = max(reach, 1.5 * noise)
    _frame(axes, reach)
    axes.set_title(f"Smoothed difference from {runs[0].name}, nats a token")


def _draw_close(axes: Axes, runs: Sequence[Run], shown: Sequence[tuple[int, Difference]]) -> None:
    """The same enlarged to what runs on the same samples differ by."""
    near = [(i, diff) for i, diff in shown if diff.same_data] or list(shown)
    _lines(axes, near)
    _frame(axes, 1.15 * max(float(np.nanmax(np.abs(_late(diff)))) for _, diff in near))
    axes.set_title("The same, enlarged: runs on the same samples")


def _late(diff: Difference) -> np.ndarray:
    """The smoothed difference without the first tenth, where the loss falls steeply; a zero if nothing is finite."""
    values = diff.smoothed[len(diff.smoothed) // 10 :]
    return values if np.isfinite(values).any() else np.zeros(1)


def _lines(axes: Axes, shown: Sequence[tuple[int, Difference]]) -> None:
    for index, diff in shown:
        keep = thin(len(diff.steps))
        axes.plot(diff.steps[keep], diff.smoothed[keep], color=run_colour(index), linewidth=1.4)
    axes.axhline(0.0, color=COLOURS["muted"], linewidth=1.0)


def _frame(axes: Axes, reach: float) -> None:
    reach = reach if math.isfinite(reach) and reach > 0 else 1.0
    axes.set_ylim(-reach, reach)
    axes.yaxis.set_major_formatter(FuncFormatter(_sign))
    step_axis(axes)


def _sign(value: float, place: object) -> str:
    return f"{value:+.3g}".replace("-", "\u2212") if abs(value) > 1e-12 else "0"


def _draw_sets(cells: Sequence[Axes], found: Numbers, names: Sequence[str]) -> None:
    for axes, name in zip(cells, names):
        _draw_set(axes, found, name)
    for axes in cells[len(names) :]:
        axes.set_axis_off()


def _draw_set(axes: Axes, found: Numbers, name: str) -> None:
    """A dot and a whisker a run, the baseline as the line at zero."""
    labels: list[str] = []
    for index, run in enumerate(found["runs"]):
        judged = run["heldout"].get(name)
        if index == 0:
            continue
        place = len(labels)
        labels.append(run["name"])
        apart = judged["difference"] if judged else None
        if apart is None or apart["value"] is None:
            axes.annotate("not comparable", (0.5, place), xycoords=("axes fraction", "data"), color=COLOURS["muted"])
            continue
        colour = run_colour(index)
        if apart["low"] is not None and apart["high"] is not None:
            axes.plot([apart["low"], apart["high"]], [place, place], color=colour, linewidth=2.2)
        axes.plot([apart["value"]], [place], color=colour, marker="o", markersize=5.5)
    base = found["runs"][0]["heldout"].get(name)
    where = f"’s {base['loss']['value']:.4f}" if base and base["loss"]["value"] is not None else ""
    axes.axvline(0.0, color=COLOURS["muted"], linewidth=1.0)
    axes.set_title(f"Held-out {name}: loss minus {found['baseline']}{where}")
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.grid(False, axis="y")
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.xaxis.set_major_formatter(FuncFormatter(_sign))


def _draw_legend(figure: MplFigure, runs: Sequence[Run]) -> None:
    axes = figure.axes[0]
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles, labels, loc="upper right", fontsize=9.5 if len(runs) < 5 else 8.5)
