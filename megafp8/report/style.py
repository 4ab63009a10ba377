"""How figures look: one style, and colours that the page can swap for its dark scheme.

A figure is drawn once, in the light colours below. In its SVG each of them becomes a CSS variable, so that the
reader's light or dark scheme reaches into it; the PNG beside the page keeps the light ones.
"""

from __future__ import annotations

import io
import re
from dataclasses import dataclass
from typing import Any

import matplotlib
from matplotlib.figure import Figure as MplFigure

# Light colours by CSS variable. The run colours keep 4.5:1 on white and differ in lightness as well as in hue.
COLOURS = {
    "ink": "#1b1f24",
    "muted": "#5d6672",
    "grid": "#e3e6ea",
    "run0": "#1f5fbf",
    "run1": "#c2410c",
    "run2": "#0f766e",
    "run3": "#7e3bb3",
    "run4": "#8a6d00",
    "run5": "#b0246b",
    "run6": "#3f6212",
    "run7": "#475569",
    "soft": "#c9d3df",
}
RUN_COLOURS = [COLOURS[f"run{i}"] for i in range(8)]

RC: Any = {  # matplotlib types its keys one by one
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9.5,
    "axes.edgecolor": COLOURS["muted"],
    "axes.labelcolor": COLOURS["muted"],
    "axes.titlecolor": COLOURS["ink"],
    "axes.titlesize": 10.5,
    "axes.titlelocation": "left",
    "axes.titlepad": 8,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": COLOURS["grid"],
    "grid.linewidth": 0.8,
    "xtick.color": COLOURS["muted"],
    "ytick.color": COLOURS["muted"],
    "xtick.major.size": 3,
    "ytick.major.size": 3,
    "text.color": COLOURS["ink"],
    "legend.frameon": False,
    "legend.fontsize": 9.5,
    "lines.linewidth": 1.8,
    "lines.solid_capstyle": "round",
    "figure.constrained_layout.use": True,
    "svg.fonttype": "none",
    "savefig.dpi": 160,
}


@dataclass(frozen=True)
class Picture:
    """A finished figure: its file name without ending, what it shows in words, and its two forms."""

    name: str
    alt: str
    svg: str
    png: bytes


def run_colour(index: int) -> str:
    """The colour of the run with this index; they repeat after eight."""
    return RUN_COLOURS[index % len(RUN_COLOURS)]


def run_width(index: int) -> float:
    """Line width in points: the baseline lies wide below the others, so that equal curves stay both visible."""
    return 3.4 if index == 0 else 1.6


def new_figure(width: float, height: float) -> MplFigure:
    """An empty figure, inches; no window, no global state of pyplot."""
    return MplFigure(figsize=(width, height))


def render(figure: MplFigure, name: str, alt: str) -> Picture:
    """Both forms of a figure; the same figure gives the same bytes."""
    png, svg = io.BytesIO(), io.StringIO()
    figure.savefig(png, format="png", facecolor="white", metadata={"Software": None})
    with matplotlib.rc_context({"svg.hashsalt": name}):
        figure.savefig(svg, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return Picture(name, alt, _inline(svg.getvalue(), name, alt), png.getvalue())


def _inline(svg: str, name: str, alt: str) -> str:
    """The SVG element alone, its colours as CSS variables, its ids its own, its size the page's business."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    # glyphs and markers get ids that count from one in every figure: make them the figure's own
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = re.sub(r'(xlink:href="|url\()#', rf"\1#{name}-", svg)
    for variable, colour in COLOURS.items():
        svg = svg.replace(colour, f"var(--{variable})")
    label = alt.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")
    return svg.replace("<svg", f'<svg role="img" aria-label="{label}"', 1)
