"""Drawings of numbers in FP8: how weights fall on representable values."""

from __future__ import annotations

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator

from megafp8.fp8.formats import Format
from megafp8.report.style import COLOURS, RC, Picture, new_figure, render
from megafp8.report.weights import FORMATS, LINEAR_EDGES, LOG2_EDGES, WeightSpread, magnitudes

WIDTH = 9.6


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
