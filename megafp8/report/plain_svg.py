"""Line drawings written as SVG by hand: no library to load, colours straight from the page's variables."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from megafp8.corpus.figures import EDGES

WIDTH, HEIGHT = 960, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 12, 14, 44
_UNITS = ((10**9, "B"), (10**6, "M"), (10**3, "k"))


@dataclass(frozen=True)
class Series:
    """Lengths of one group of documents, by the lower end of their bin.

    Attributes:
        colour: a variable of the page.
        dashed: drawn thin and dashed.
    """

    name: str
    bins: dict[str, int]
    colour: str
    dashed: bool = False


def lengths_svg(series: Sequence[Series], axis: str, alt: str) -> str:
    """How lengths are spread: share of each group's documents for each doubling of the length.

    Args:
        axis: what is counted, below the horizontal axis.
        alt: what the drawing shows, in words.
    """
    lines = [(one, _points(one.bins)) for one in series if one.bins]
    if not lines:
        return ""
    low = math.floor(min(points[0][0] for _, points in lines))
    high = max(math.ceil(max(points[-1][0] for _, points in lines)), low + 1)
    top = max(share for _, points in lines for _, share in points)
    step = _nice(top / 4)
    top = step * math.ceil(top / step)

    def x(value: float) -> float:
        return _LEFT + (value - low) / (high - low) * (WIDTH - _LEFT - _RIGHT)

    def y(share: float) -> float:
        return HEIGHT - _BOTTOM - share / top * (HEIGHT - _TOP - _BOTTOM)

    parts = [_grid_line(y(i * step), f"{100 * i * step:g} %") for i in range(round(top / step) + 1)]
    parts += [_tick(x(math.log2(value)), value) for value in _tick_values(low, high)]
    for one, points in lines:
        path = "M" + " ".join(f"{x(at):.1f},{y(share):.1f}" for at, share in points)
        style = ' stroke-width="1.6" stroke-dasharray="5 4"' if one.dashed else ' stroke-width="2.2"'
        parts.append(f'<path d="{path}" fill="none" stroke="var(--{one.colour})" stroke-linejoin="round"{style}/>')
    middle = (_LEFT + WIDTH - _RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{HEIGHT - 6}" text-anchor="middle" fill="var(--muted)">{escape(axis)}</text>')
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(alt)}" font-size="13" '
        f'xmlns="http://www.w3.org/2000/svg">{"".join(parts)}</svg>'
    )


def _points(bins: dict[str, int]) -> list[tuple[float, float]]:
    """Corners of the outline: (log2 of the length, share of the documents for each doubling)."""
    total = sum(bins.values())
    edges = [max(int(edge), 1) for edge in EDGES.tolist()]
    used = sorted(int(edge) for edge in bins)
    first, last = int(EDGES.searchsorted(used[0])), int(EDGES.searchsorted(used[-1]))
    points = [(math.log2(edges[first]), 0.0)]
    for at in range(first, last + 1):
        begin, end = math.log2(edges[at]), math.log2(max(edges[at + 1], edges[at] + 1))
        share = bins.get(str(int(EDGES[at])), 0) / total / (end - begin)
        points += [(begin, share), (end, share)]
    return [*points, (points[-1][0], 0.0)]


def _nice(value: float) -> float:
    """The next of 1, 2, 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= value * (1 - 1e-9))


def _tick_values(low: int, high: int) -> list[int]:
    tens = [10**power for power in range(14) if low <= math.log2(10**power) <= high]
    return tens if len(tens) > 1 else [2**power for power in range(low, high + 1)]


def _tick(x: float, value: int) -> str:
    label = next((f"{value // size}{unit}" for size, unit in _UNITS if value >= size and not value % size), str(value))
    bottom = HEIGHT - _BOTTOM
    return (
        f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{bottom}" stroke="var(--grid)"/>'
        f'<text x="{x:.1f}" y="{bottom + 17}" text-anchor="middle" fill="var(--muted)">{label}</text>'
    )


def _grid_line(y: float, label: str) -> str:
    return (
        f'<line x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="var(--grid)"/>'
        f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end" fill="var(--muted)">{label}</text>'
    )
