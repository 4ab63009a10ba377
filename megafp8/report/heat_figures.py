"""Heat maps of FP8 statistics: a row a matrix product in model order, a column a recorded step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Colormap, LinearSegmentedColormap, LogNorm
from matplotlib.figure import Figure as MplFigure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from megafp8.report.fp8_health import RATIO, ROLE_WORDS, ROLES, SHARES, Grid, Key
from megafp8.report.style import COLOURS, RC, Picture, new_figure, render

WIDTH = 9.6


class _Scale(NamedTuple):
    """How numbers become colours, and where the colour bar is marked."""

    colours: Colormap
    lowest: float
    highest: float
    marks: tuple[float, ...]
    unit: str


# one hue, light to dark: order is readable in grey print too; both ends differ from either page colour
_SHARE = _Scale(
    LinearSegmentedColormap.from_list("share", ["#dbe7f3", "#8db7dd", "#3f7fc1", "#1d4f91", "#0a2a57"]),
    1e-4, 100.0, (1e-4, 1e-3, 1e-2, 0.1, 1, 10, 100), " %",
)  # fmt: skip
# two hues around 1: below it the scale leaves room, above it the largest values are clipped
_AROUND_ONE = _Scale(
    LinearSegmentedColormap.from_list("ratio", ["#0a4f6b", "#5fa3bf", "#dfe5e8", "#e8965c", "#8f2f06"]),
    1 / 16, 16.0, (1 / 16, 1 / 4, 1, 4, 16), "\u00d7",
)  # fmt: skip
_TITLES = {"underflows%": "underflow", "overflows%": "overflow", RATIO: "amax over history"}


def heat_figure(grids: Mapping[Key, Grid], name: str, run_name: str) -> Picture:
    """The recipe in use: a row of maps for each statistic that it has, a column for each operand."""
    rows = [
        (_TITLES[statistic], statistic, _AROUND_ONE if statistic == RATIO else _SHARE)
        for statistic in (*SHARES, RATIO)
        if any((statistic, role) in grids for role in ROLES)
    ]
    words = f"Share of elements that underflow and overflow in FP8, by layer and step, of {run_name}"
    return _figure(grids, rows, name, words)


def what_if_figure(grids: Mapping[Key, Grid], recipes: Mapping[str, str], name: str, run_name: str) -> Picture:
    """Underflow in recipes that are not in use; `recipes`: prefix of their statistics -> what they are called."""
    rows = [(f"underflow in {label}", f"{prefix}underflows%", _SHARE) for prefix, label in recipes.items()]
    words = f"Share of elements of {run_name} that would underflow in other recipes, by layer and step"
    return _figure(grids, rows, name, words)


def _figure(grids: Mapping[Key, Grid], rows: Sequence[tuple[str, str, _Scale]], name: str, words: str) -> Picture:
    num_modules = max(len(grid.modules) for grid in grids.values())
    with matplotlib.rc_context(RC):
        figure = new_figure(WIDTH, 1.0 + len(rows) * (0.5 + min(max(0.13 * num_modules, 1.1), 3.4)))
        cells = figure.subplots(len(rows), len(ROLES), sharex=True, sharey=True, squeeze=False)
        drawn: dict[str, tuple[_Scale, Any, list[Axes]]] = {}
        for line, (title, statistic, scale) in zip(cells, rows, strict=True):
            for axes, role in zip(line, ROLES, strict=True):
                mesh = _draw(axes, grids.get((statistic, role)), f"{ROLE_WORDS[role]}: {title}", scale)
                if mesh is not None:
                    drawn.setdefault(scale.unit, (scale, mesh, []))
            if scale.unit in drawn:
                drawn[scale.unit][2].extend(line)
        for axes in cells[-1]:
            axes.set_xlabel("step")
        for scale, mesh, beside in drawn.values():
            _draw_bar(figure, mesh, beside, scale, short=len(beside) == len(ROLES))
        return render(figure, name, words)


def _draw(axes: Axes, grid: Grid | None, title: str, scale: _Scale) -> object:
    axes.set_title(title, fontsize=9.5)
    axes.grid(False)
    if grid is None:
        axes.text(0.5, 0.5, "not recorded", ha="center", va="center", transform=axes.transAxes, color=COLOURS["muted"])
        return None
    values = np.ma.masked_less_equal(np.nan_to_num(grid.values), 0.0)
    shown = np.clip(values, scale.lowest, scale.highest)
    mesh = axes.pcolormesh(
        _edges(grid.steps), np.arange(len(grid.modules) + 1), shown, cmap=scale.colours,
        norm=LogNorm(scale.lowest, scale.highest), rasterized=True,
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


def _draw_bar(figure: MplFigure, mesh: Any, beside: list[Axes], scale: _Scale, *, short: bool) -> None:
    bar = figure.colorbar(mesh, ax=beside, shrink=1.0 if short else 0.7, aspect=14 if short else 32, pad=0.015)
    outline: Any = bar.outline
    outline.set_visible(False)
    bar.set_ticks(list(scale.marks))
    ends = {scale.lowest: "\u2264 ", scale.highest: "" if scale.unit == " %" else "\u2265 "}
    words = {mark: f"{ends.get(mark, '')}{_number(mark, scale)}{scale.unit}" for mark in scale.marks}
    bar.ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: words[min(words, key=lambda m: abs(m - value))]))
    bar.ax.yaxis.set_minor_locator(NullLocator())
    bar.ax.tick_params(labelsize=8)


def _number(value: float, scale: _Scale) -> str:
    if scale is _AROUND_ONE and value < 1:
        return f"1/{round(1 / value)}"
    return f"{value:.4f}" if value < 1e-3 else f"{value:g}"
