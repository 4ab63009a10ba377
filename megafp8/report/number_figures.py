"""Drawings of numbers in FP8: what underflows and overflows where, and how weights fall on representable values."""

from __future__ import annotations

from collections.abc import Mapping

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, LogNorm
from matplotlib.figure import Figure as MplFigure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from megafp8.fp8.formats import Format
from megafp8.report.fp8_health import ROLES, STATISTICS, Grid
from megafp8.report.style import COLOURS, RC, Picture, new_figure, render
from megafp8.report.weights import FORMATS, LINEAR_EDGES, LOG2_EDGES, WeightSpread, magnitudes

WIDTH = 9.6
_LOW_PERCENT, _HIGH_PERCENT = 1e-4, 100.0
# one hue, light to dark: order is readable in grey print too; both ends differ from either page colour
_HEAT = LinearSegmentedColormap.from_list("heat", ["#dbe7f3", "#8db7dd", "#3f7fc1", "#1d4f91", "#0a2a57"])
_ROLE_TITLES = {"input": "input", "weight": "weight", "grad_output": "output gradient"}
_STATISTIC_TITLES = {"underflows%": "underflow", "overflows%": "overflow"}


def heat_figure(grids: Mapping[tuple[str, str], Grid], name: str, run_name: str) -> Picture:
    """Underflow (top row) and overflow (bottom row) by role: rows are GEMMs in model order, columns are steps."""
    num_rows = max(len(grid.modules) for grid in grids.values())
    with matplotlib.rc_context(RC):
        figure = new_figure(WIDTH, 2.0 + 2 * min(max(0.13 * num_rows, 1.1), 3.4))
        cells = figure.subplots(len(STATISTICS), len(ROLES), sharex=True, sharey=True)
        mesh = None
        for row, statistic in enumerate(STATISTICS):
            for column, role in enumerate(ROLES):
                grid = grids.get((statistic, role))
                title = f"{_ROLE_TITLES[role]}: {_STATISTIC_TITLES[statistic]}"
                drawn = _draw_grid(cells[row][column], grid, title)
                mesh = drawn if drawn is not None else mesh
        for axes in cells[-1]:
            axes.set_xlabel("step")
        if mesh is not None:
            _draw_bar(figure, mesh, list(cells.flat))
        words = f"Share of elements that underflow and overflow in FP8, by layer and step, of {run_name}"
        return render(figure, name, words)


def _draw_grid(axes: Axes, grid: Grid | None, title: str) -> object:
    axes.set_title(title, fontsize=9.5)
    axes.grid(False)
    if grid is None:
        axes.text(0.5, 0.5, "not recorded", ha="center", va="center", transform=axes.transAxes, color=COLOURS["muted"])
        return None
    values = np.ma.masked_less_equal(np.nan_to_num(grid.values), 0.0)
    shown = np.clip(values, _LOW_PERCENT, _HIGH_PERCENT)
    edges = _edges(grid.steps)
    mesh = axes.pcolormesh(
        edges, np.arange(len(grid.modules) + 1), shown, cmap=_HEAT, norm=LogNorm(_LOW_PERCENT, _HIGH_PERCENT),
        rasterized=True,
    )  # fmt: skip
    if not np.ma.count(shown):
        axes.text(0.5, 0.5, "none", ha="center", va="center", transform=axes.transAxes, color=COLOURS["muted"])
    axes.set_ylim(len(grid.modules), 0)
    axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
    labels = _row_labels(grid.modules)
    axes.yaxis.set_major_locator(FixedLocator([position for position, _ in labels]))
    axes.set_yticklabels([label for _, label in labels], fontsize=7.5)
    axes.tick_params(axis="y", length=0)
    return mesh


def _edges(steps: np.ndarray) -> np.ndarray:
    """Cell borders halfway between recorded steps."""
    if len(steps) == 1:
        return np.array([steps[0] - 0.5, steps[0] + 0.5])
    middle = (steps[1:] + steps[:-1]) / 2.0
    return np.concatenate([[steps[0] - (middle[0] - steps[0])], middle, [steps[-1] + (steps[-1] - middle[-1])]])


def _row_labels(modules: list[str]) -> list[tuple[float, str]]:
    """Every row's short name while they fit, else one label a layer, else every n-th layer."""
    short = [module.removeprefix("layers.").replace("attention.", "").replace("mlp.", "") for module in modules]
    if len(modules) <= 24:
        return [(row + 0.5, name) for row, name in enumerate(short)]
    first: dict[str, int] = {}
    for row, name in enumerate(short):
        first.setdefault(name.split(".")[0], row)
    every = max(1, len(first) // 16)
    return [(row + 0.5, f"layer {layer}") for number, (layer, row) in enumerate(first.items()) if number % every == 0]


def _draw_bar(figure: MplFigure, mesh: object, cells: list[Axes]) -> None:
    bar = figure.colorbar(mesh, ax=cells, shrink=0.7, aspect=32, pad=0.015)  # type: ignore[arg-type]
    bar.outline.set_visible(False)
    bar.set_ticks([1e-4, 1e-3, 1e-2, 0.1, 1, 10, 100])
    bar.ax.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g} %" if v > 2e-4 else "\u2264 0.0001 %"))
    bar.ax.yaxis.set_minor_locator(NullLocator())
    bar.ax.tick_params(labelsize=8)


def weight_figure(spread: WeightSpread, run_name: str) -> Picture:
    """The histogram of the model's weights over the values that E4M3 and E5M2 can represent."""
    with matplotlib.rc_context(RC):
        figure = new_figure(WIDTH, 6.2)
        cells = figure.subplots(4, 1, height_ratios=[2.2, 0.62, 2.2, 0.62])
        _draw_linear(cells[0], spread)
        _draw_rug(cells[1], signed=True)
        _draw_log(cells[2], spread)
        _draw_rug(cells[3], signed=False)
        words = f"Histogram of the weights of {run_name} over the representable values of E4M3 and E5M2"
        return render(figure, "weights", words)


def _draw_linear(axes: Axes, spread: WeightSpread) -> None:
    centres = (LINEAR_EDGES[1:] + LINEAR_EDGES[:-1]) / 2.0
    axes.fill_between(centres, spread.linear_counts, step="mid", color=COLOURS["soft"], linewidth=0)
    axes.set_xlim(-1.02, 1.02)
    axes.set_title("Weights, and the values that each format has to round them to")
    _bare(axes)


def _draw_log(axes: Axes, spread: WeightSpread) -> None:
    centres = (LOG2_EDGES[1:] + LOG2_EDGES[:-1]) / 2.0
    axes.fill_between(centres, spread.log2_counts, step="mid", color=COLOURS["soft"], linewidth=0)
    axes.set_xlim(*_log_limits())
    for colour, fmt in zip(_FORMAT_COLOURS, FORMATS):
        edge = float(np.log2(fmt.smallest / fmt.max)) - 1.0  # half of the smallest value rounds to zero
        axes.axvline(edge, color=colour, linewidth=1.2, linestyle=(0, (4, 2)))
        axes.annotate(
            f"{fmt.name}: zero\nto the left", (edge, 1.0), (4, -2), va="top", color=colour, fontsize=8.5,
            xycoords=("data", "axes fraction"), textcoords="offset points",
        )  # fmt: skip
    axes.set_title("The same by magnitude, on a scale of powers of two")
    _bare(axes)


_FORMAT_COLOURS = (COLOURS["run0"], COLOURS["run1"])


def _log_limits() -> tuple[float, float]:
    return float(np.log2(FORMATS[1].smallest / FORMATS[1].max)) - 3.0, 0.5


def _bare(axes: Axes) -> None:
    axes.set_yticks([])
    axes.set_ylim(bottom=0)
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="x", labelbottom=False, length=0)


def _draw_rug(axes: Axes, *, signed: bool) -> None:
    for height, colour, fmt in zip((0.75, 0.25), _FORMAT_COLOURS, FORMATS):
        axes.vlines(_positions(fmt, signed), height - 0.19, height + 0.19, color=colour, linewidth=0.7)
    axes.set_ylim(0, 1)
    axes.set_yticks([0.75, 0.25], [fmt.name for fmt in FORMATS])
    for label, colour in zip(axes.get_yticklabels(), _FORMAT_COLOURS):
        label.set_color(colour)
    axes.tick_params(axis="y", length=0)
    axes.grid(False)
    axes.spines["left"].set_visible(False)
    if signed:
        axes.set_xlim(-1.02, 1.02)
        axes.set_xticks([-1, -0.5, 0, 0.5, 1], ["\u22121", "\u22120.5", "0", "0.5", "1"])
        axes.set_xlabel("weight over the largest magnitude of its tensor")
    else:
        axes.set_xlim(*_log_limits())
        axes.xaxis.set_major_locator(MaxNLocator(9, integer=True))
        axes.tick_params(axis="x", labelsize=10.5)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda v, _: _power_of_two(round(v))))


def _power_of_two(exponent: int) -> str:
    raised = str(exponent).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return f"2{raised}" if exponent else "1"


def _positions(fmt: Format, signed: bool) -> np.ndarray:
    values = magnitudes(fmt)
    return np.concatenate([-values[::-1], [0.0], values]) if signed else np.log2(values)
