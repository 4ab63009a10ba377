"""FP8 statistics as grids: one row a layer's GEMM operand, one column a recorded step. No drawing here."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from megafp8.fp8.stats import PREFIXES
from megafp8.report.runs import Run

Key = tuple[str, str]  # statistic and role
ROLES = ("input", "weight", "grad_output")
ROLE_WORDS = {"input": "input", "weight": "weight", "grad_output": "output gradient"}
SHARES = ("underflows%", "overflows%")
RATIO = "amax_ratio"
ERROR = "mse"
_OTHERS = {f"{prefix}{name}" for prefix in PREFIXES.values() for name in ("underflows%", ERROR)}
_WANTED = {*SHARES, RATIO, ERROR, *_OTHERS}


@dataclass(frozen=True)
class Grid:
    """The values of one statistic of one role.

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
        """Module, step and value of the highest one."""
        row, column = np.unravel_index(np.nanargmax(self.values), self.values.shape)
        return self.modules[row], int(self.steps[column]), float(self.values[row, column])

    @property
    def final_mean(self) -> float:
        """Mean over modules in the last recorded step."""
        return float(np.nanmean(self.values[:, -1]))


def grids(run: Run) -> dict[Key, Grid]:
    """Grids by (statistic, role); empty for a run without FP8 statistics, roles without any value left out."""
    steps = np.array([record["step"] for record in run.fp8], dtype=np.int64)
    table: dict[Key, dict[str, dict[int, float]]] = {}
    for column, record in enumerate(run.fp8):
        for name, value in record["stats"].items():
            module, role, statistic = [*name.rsplit(".", 2), "", ""][:3]
            if role in ROLES and statistic in _WANTED and isinstance(value, (int, float)):
                table.setdefault((statistic, role), {}).setdefault(module, {})[column] = float(value)
    found: dict[Key, Grid] = {}
    for key, rows in table.items():
        modules = sorted(rows, key=natural)
        values = np.full((len(modules), len(steps)), np.nan)
        for row, module in enumerate(modules):
            for column, value in rows[module].items():
                values[row, column] = value
        found[key] = Grid(values, modules, steps)
    return found


def recipes_not_in_use(found: Mapping[Key, Grid]) -> dict[str, str]:
    """Prefix -> name of the recipes that were measured without being in use."""
    return {prefix: name for name, prefix in PREFIXES.items() if any(f"{prefix}underflows%" == key for key, _ in found)}


def error_ratio(found: Mapping[Key, Grid], prefix: str, role: str) -> float:
    """Squared error of another recipe over that of the one in use, median over modules and steps; NaN if unknown."""
    other, here = found.get((f"{prefix}{ERROR}", role)), found.get((ERROR, role))
    if other is None or here is None or other.modules != here.modules:
        return float("nan")
    known = (here.values > 0) & np.isfinite(other.values)
    return float(np.median(other.values[known] / here.values[known])) if known.any() else float("nan")


_ORDER = ("qkv", "out", "gate_up", "up", "down")  # the way a token takes through a layer


def natural(module: str) -> tuple[object, ...]:
    """Sort key: layers by number, within a layer in the order in which a token meets them."""
    numbers = tuple(int(n) for n in re.findall(r"\d+", module))
    last = module.rsplit(".", 1)[-1]
    return (*numbers, _ORDER.index(last) if last in _ORDER else len(_ORDER), module)
