"""Tokens a second against time per token: one curve a precision, the latency budget, and what fits into it."""

from __future__ import annotations

import re
from collections.abc import Sequence

import matplotlib
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from megafp8.infer.sweep import Capacity, Curve, capacity
from megafp8.report.headline import compact
from megafp8.report.style import COLOURS, RC, Picture, new_figure, render, run_colour

WIDTH, HEIGHT = 9.6, 5.2  # inches
_MARKERS = ("o", "s", "^", "D", "v", "P")


def latency_figure(curves: Sequence[Curve], title: str, *, budget_seconds: float | None, note: str = "") -> Picture:
    """Draw `curves`; `note` stands large below the title, for what a reader must not miss."""
    with matplotlib.rc_context(RC):
        figure = new_figure(WIDTH, HEIGHT)
        axes = figure.subplots()
        for index, curve in enumerate(curves):
            _draw_curve(axes, curve, index)
        axes.set_xlim(0, 1.12e3 * max(p.token_p90 for curve in curves for p in curve.points))
        axes.set_ylim(0, 1.16 * max(p.tokens_per_second for curve in curves for p in curve.points))
        if budget_seconds is not None:
            _draw_budget(axes, curves, budget_seconds)
        axes.set_xlabel("time per token, ms (median; the thin line reaches to the 90th percentile)")
        axes.set_ylabel("new tokens a second, all rows (small numbers: batch size)")
        axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:,.0f}" if v < 1e5 else compact(v)))
        axes.legend(loc="lower right")
        axes.set_title(title, pad=24 if note else 8)
        if note:
            axes.annotate(
                note, (0, 1), (0, 7), xycoords="axes fraction", textcoords="offset points", color=COLOURS["run1"]
            )
        return render(figure, "latency", _words(curves, budget_seconds, note))


def standalone_svg(picture: Picture) -> str:
    """The drawing as a file of its own: with colours for variables, on white."""
    svg = picture.svg
    for variable, colour in COLOURS.items():
        svg = svg.replace(f"var(--{variable})", colour)
    box = re.search(r'viewBox="0 0 (\S+) (\S+)"', svg)
    assert box is not None, "matplotlib gives every drawing a box"
    end = svg.index(">", svg.index("<svg")) + 1
    paper = f'<rect width="{box[1]}" height="{box[2]}" fill="white"/>'
    return f'<?xml version="1.0" encoding="utf-8"?>\n{svg[:end]}{paper}{svg[end:]}'


def _draw_curve(axes: Axes, curve: Curve, index: int) -> None:
    times, rates = [1e3 * p.token for p in curve.points], [p.tokens_per_second for p in curve.points]
    colour, marker = run_colour(index), _MARKERS[index % len(_MARKERS)]
    axes.hlines(rates, times, [1e3 * p.token_p90 for p in curve.points], color=colour, linewidth=1.0, alpha=0.55)
    label = curve.label + (" (emulated)" if curve.emulated else "")
    style = (0, (4, 2)) if curve.emulated else "-"
    axes.plot(times, rates, color=colour, linestyle=style, marker=marker, markersize=5.5, label=label)
    for point, x, y in zip(curve.points, times, rates, strict=True):
        axes.annotate(
            str(point.batch), (x, y), (-4, 5), textcoords="offset points", color=colour, ha="right", fontsize=8
        )


def _draw_budget(axes: Axes, curves: Sequence[Curve], budget_seconds: float) -> None:
    """The budget as a line, if it lies within the picture, and each curve's capacity as a ring."""
    budget, (_, right), (_, top) = 1e3 * budget_seconds, axes.get_xlim(), axes.get_ylim()
    if budget <= right:
        axes.axvline(budget, color=COLOURS["muted"], linewidth=1.2, linestyle=(0, (5, 3)))
    far = budget > 0.6 * right
    axes.annotate(
        f"budget {budget:g} ms" + (" (beyond the picture)" if budget > right else ""), (min(budget, right), top),
        (-5 if far else 5, -11), textcoords="offset points", color=COLOURS["muted"], ha="right" if far else "left",
    )  # fmt: skip
    for index, curve in enumerate(curves):
        found = capacity(curve.points, budget_seconds)
        if found is not None:
            axes.plot(
                1e3 * found.token, found.tokens_per_second, marker="o", markersize=13, markerfacecolor="none",
                markeredgecolor=run_colour(index), markeredgewidth=1.8,
            )  # fmt: skip
            at_edge = 1e3 * found.token > 0.7 * right  # there its words would run out of the picture
            axes.annotate(
                capacity_words(found), (1e3 * found.token, found.tokens_per_second), (-22, 6) if at_edge else (11, -13),
                textcoords="offset points", color=run_colour(index), fontweight="bold",
                ha="right" if at_edge else "left",
            )  # fmt: skip


def capacity_words(found: Capacity | None) -> str:
    """A capacity in a few words."""
    if found is None:
        return "none fits"
    return f"{found.tokens_per_second:,.{0 if found.tokens_per_second >= 100 else 1}f} tokens/s" + (
        " or more" if found.is_last else ""
    )


def _words(curves: Sequence[Curve], budget_seconds: float | None, note: str) -> str:
    text = f"Tokens a second against time per token of {', '.join(curve.label for curve in curves)}"
    if budget_seconds is not None:
        fits = (f"{curve.label} {capacity_words(capacity(curve.points, budget_seconds))}" for curve in curves)
        text += f"; within {1e3 * budget_seconds:g} ms a token: {', '.join(fits)}"
    return f"{text}. {note}".rstrip(". ")
