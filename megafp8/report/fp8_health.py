"""FP8 statistics as grids: one row a layer's GEMM operand, one column a recorded step. No drawing here."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from megafp8.report.runs import Run

ROLES = ("input", "weight", "grad_output")
STATISTICS = ("underflows%", "overflows%")


@dataclass(frozen=True)
class Grid:
    """Percentages of one statistic of one role.

    Attributes:
        values: float64 [num modules, num steps], NaN where nothing was recorded.
        modules: row names in model order.
        steps: int64 [num steps].
    """

    values: np.ndarray
    modules: list[str]
    steps: np.ndarray

    @property
    def worst(self) -> tuple[str, int, float]:
        """Module, step and percentage of the highest value."""
        row, column = np.unravel_index(np.nanargmax(self.values), self.values.shape)
        return self.modules[row], int(self.steps[column]), float(self.values[row, column])

    @property
    def final_mean(self) -> float:
        """Mean over modules in the last recorded step."""
        return float(np.nanmean(self.values[:, -1]))


def grids(run: Run) -> dict[tuple[str, str], Grid]:
    """Grids by (statistic, role); empty for a run without FP8 statistics, roles without any value left out."""
    steps = np.array([record["step"] for record in run.fp8], dtype=np.int64)
    table: dict[tuple[str, str], dict[str, dict[int, float]]] = {}
    for column, record in enumerate(run.fp8):
        for name, value in record["stats"].items():
            module, role, statistic = [*name.rsplit(".", 2), "", ""][:3]
            if role in ROLES and statistic in STATISTICS and isinstance(value, (int, float)):
                table.setdefault((statistic, role), {}).setdefault(module, {})[column] = float(value)
    found: dict[tuple[str, str], Grid] = {}
    for key, rows in table.items():
        modules = sorted(rows, key=natural)
        values = np.full((len(modules), len(steps)), np.nan)
        for row, module in enumerate(modules):
            for column, value in rows[module].items():
                values[row, column] = value
        found[key] = Grid(values, modules, steps)
    return found


_ORDER = ("qkv", "out", "gate_up", "up", "down")  # the way a token takes through a layer


def natural(module: str) -> tuple[object, ...]:
    """Sort key: layers by number, within a layer in the order in which a token meets them."""
    numbers = tuple(int(n) for n in re.findall(r"\d+", module))
    last = module.rsplit(".", 1)[-1]
    return (*numbers, _ORDER.index(last) if last in _ORDER else len(_ORDER), module)
