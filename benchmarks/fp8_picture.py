"""Pictures of the FP8 benchmarks: bars with their numbers, and the bound that they keep as a line."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes

_CLEAR = {"facecolor": "white", "edgecolor": "none", "pad": 1.0}
_BAR, _BOUND = "#1f5fa8", "#b03030"


def draw_steps(rows: Mapping[str, Mapping[str, Any]], most_ratio: float, most_statistics: float, path: Path) -> None:
    """Step ratios to BF16 and what statistics add, in CPU seconds."""
    names = list(rows)
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 0.5 * len(names) + 1.6), layout="constrained")
    _bars(left, names, [rows[n]["ratio_cpu_seconds"] for n in names], most_ratio, "{:.2f}")
    left.axvline(1.0, color="#666666", linewidth=0.8, linestyle=":")
    left.set(xlabel="step, times the BF16 step (dotted)")
    _bars(right, names, [rows[n]["statistics_cpu_seconds"] * 100 for n in names], most_statistics * 100, "{:+.1f} %")
    right.set(xlabel="statistics of every tensor, % of the step")
    figure.suptitle("FP8 emulated on a CPU, mode fast, bench model; red: the bound")
    _save(figure, path)


def draw_quantizers(rows: Mapping[str, Mapping[str, Any]], least: float, path: Path) -> None:
    """Compiled against as written."""
    names = list(rows)
    figure, panel = pyplot.subplots(figsize=(9, 0.4 * len(names) + 1.4), layout="constrained")
    _bars(panel, names, [rows[n]["speedup"] for n in names], least, "{:.0f} x")
    panel.set(xlabel="quantizers, compiled against as written, times faster (red: the bound)", xscale="log")
    panel.set_xlim(1.0, 3.0 * max(rows[n]["speedup"] for n in names))
    _save(figure, path)


def _bars(panel: Axes, names: list[str], values: list[float], bound: float, form: str) -> None:
    bars = panel.barh(names, values, color=_BAR, height=0.6)
    panel.axvline(bound, color=_BOUND, linewidth=1.2)
    panel.bar_label(bars, [form.format(v) for v in values], padding=4, fontsize=9, bbox=_CLEAR)
    panel.invert_yaxis()
    panel.margins(x=0.18)
    panel.spines[["top", "right"]].set_visible(False)


def _save(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    pyplot.close(figure)
