"""Precision: which GEMM runs in which recipe, decided by module name. No torch: `megafp8 check` reads this.

Embedding, output layer, norms and softmax stay in the compute dtype; only the linears of decoder layers are asked.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from megafp8.core.config import config_dataclass

RECIPES = ("delayed", "current")
FP8_MULTIPLE = 16  # the rule of cuBLASLt and torch.scaled_mm for both dims of an FP8 weight


@config_dataclass
class PrecisionConfig:
    """Compute dtype, and FP8 for the linears of the decoder layers."""

    dtype: Annotated[Literal["bf16", "fp32", "fp64"], Field(description="parameters and activations")] = "bf16"
    recipe: Annotated[Literal["none", "delayed", "current"], Field(description="FP8 recipe of the layers' linears")] = (
        "none"
    )
    options: Annotated[dict[str, Any], Field(description="the recipe's options")] = Field(default_factory=dict)
    backend: Annotated[
        Literal["auto", "emulated", "native", "te"], Field(description="who does FP8 GEMMs; auto logs its choice")
    ] = "auto"
    emulation: Annotated[
        Literal["fast", "exact"], Field(description="exact: fp32 accumulation; fast: the dtype's own GEMM")
    ] = "fast"
    amax_group: Annotated[
        Literal["all", "tp"], Field(description="delayed scaling: ranks whose amaxes are joined; all = tp x dp x cp")
    ] = "all"
    first_layers_bf16: Annotated[int, Field(ge=0, description="layers at the start kept in dtype")] = 0
    last_layers_bf16: Annotated[int, Field(ge=0, description="layers at the end kept in dtype")] = 0
    patterns: Annotated[
        dict[str, str],
        Field(description='regex found in a linear\'s name -> recipe or "none"; the last that matches wins'),
    ] = Field(default_factory=dict)

    def __post_init__(self) -> None:
        delayed = "delayed" in (self.recipe, *self.patterns.values()) and self.options.get("reduce_amax", True)
        if self.amax_group != "all" and not delayed:
            raise ValueError(
                f"amax_group = {self.amax_group!r}: only delayed scaling with reduce_amax joins amaxes after a "
                "micro-batch; nearest: 'all', or recipe = 'delayed'"
            )
        for pattern, recipe in self.patterns.items():
            if recipe not in ("none", *RECIPES):
                raise ValueError(f'patterns: {pattern!r} = {recipe!r} is not one of "none", {", ".join(RECIPES)}')
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"patterns: {pattern!r} is not a regular expression: {error}") from None

    @property
    def amax_axes(self) -> tuple[str, ...]:
        """Mesh axes over which delayed scaling's amaxes are joined."""
        return ("tp",) if self.amax_group == "tp" else ("dp", "cp", "tp")


def plan_gemms(precision: PrecisionConfig, names: Sequence[str], num_layers: int) -> tuple[dict[str, str], list[str]]:
    """`{linear's name: recipe or "none"}` and the problems found (patterns that match nothing).

    Args:
        names: the linears of the decoder layers, `layers.{i}.` first.
    """
    first, last = precision.first_layers_bf16, num_layers - precision.last_layers_bf16
    plan: dict[str, str] = {}
    for name in names:
        layer = int(name.split(".")[1])
        plan[name] = precision.recipe if first <= layer < last else "none"
    problems = []
    for pattern, recipe in precision.patterns.items():
        matched = [name for name in names if re.search(pattern, name)]
        plan.update(dict.fromkeys(matched, recipe))
        if not matched:
            problems.append(
                f"precision.patterns: {pattern!r} matches no linear; the linears are {', '.join(_kinds(names))} "
                f"in layers.0 to layers.{num_layers - 1}"
            )
    return plan, problems


def precision_rows(precision: PrecisionConfig, names: Sequence[str], num_layers: int) -> list[tuple[str, str, str]]:
    """The precision table: for each linear its name, its recipe or dtype, and why it is not in FP8 (else empty)."""
    plan, _ = plan_gemms(precision, names, num_layers)
    return [
        (name, precision.dtype, _why_not(precision, name, num_layers)) if recipe == "none" else (name, recipe, "")
        for name, recipe in plan.items()
    ]


def _why_not(precision: PrecisionConfig, name: str, num_layers: int) -> str:
    for pattern, recipe in reversed(precision.patterns.items()):
        if recipe == "none" and re.search(pattern, name):
            return f"pattern {pattern!r}"
    layer = int(name.split(".")[1])
    if precision.recipe != "none" and layer < precision.first_layers_bf16:
        return f"first_layers_bf16 = {precision.first_layers_bf16}"
    if precision.recipe != "none" and layer >= num_layers - precision.last_layers_bf16:
        return f"last_layers_bf16 = {precision.last_layers_bf16}"
    return "recipe = none"


def backend_problems(precision: PrecisionConfig) -> list[str]:
    """Why the named backend cannot serve, if it cannot on any machine."""
    if precision.recipe == "none" or precision.backend != "te":
        return []
    return [
        "precision.backend = 'te': Transformer Engine's layers are not in this version; use auto, which takes the "
        "GPU's own FP8 GEMMs (native) where there are some"
    ]


def _kinds(names: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(name.split(".", 2)[2] for name in names))


def dim_problems(plan: Mapping[str, str], shapes: Mapping[str, tuple[int, int, str]], tp: int) -> list[str]:
    """FP8 linears with a dim that FP8 GEMMs cannot take on `tp` ranks, a line for each kind of linear.

    Args:
        shapes: `{linear: (in_features, out_features, "in" or "out": which of them tp splits)}`.
    """
    problems = {}
    for name, (inputs, outputs, side) in shapes.items():
        local = {"in": inputs // (tp if side == "in" else 1), "out": outputs // (tp if side == "out" else 1)}
        for which, size in local.items():
            if plan[name] == "none" or size % FP8_MULTIPLE == 0:
                continue
            kind = name.split(".", 2)[2]
            problems[kind, which] = (
                f"layers.*.{kind}: {which} dim {size}{f' on each of {tp} tp ranks' if tp > 1 else ''} is not a "
                f"multiple of {FP8_MULTIPLE}, as FP8 needs; nearest: {size // 16 * 16 or 16} or {-(-size // 16) * 16}, "
                f'or keep the linear out of FP8: precision.patterns = {{ "{kind}" = "none" }}'
            )
    return list(problems.values())
