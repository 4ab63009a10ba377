"""Precision: which GEMM runs in which recipe, decided by module name. No torch: `megafp8 check` reads this.

Embedding, output layer, norms and softmax stay in the compute dtype; only the linears of decoder layers are asked.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from megafp8.core.config import config_dataclass, nearest
from megafp8.core.errors import ConfigError
from megafp8.core.recipe_options import DIM_MULTIPLES, OPTIONS, check_options
from megafp8.nn.te_config import TEConfig, installed_problem

RECIPES = tuple(OPTIONS)


@config_dataclass
class PrecisionConfig:
    """Compute dtype, and FP8 for the linears of the decoder layers."""

    dtype: Annotated[Literal["bf16", "fp32", "fp64"], Field(description="parameters and activations")] = "bf16"
    recipe: Annotated[
        Literal["none", "delayed", "current", "blockwise", "mxfp8", "nvfp4"],
        Field(description="FP8 recipe of the layers' linears"),
    ] = "none"
    options: Annotated[
        dict[str, Any],
        Field(description="the recipe's options; those of a recipe that patterns name in a table of its name"),
    ] = Field(default_factory=dict)
    warmup_steps: Annotated[
        int, Field(ge=0, description="delayed scaling: steps at the start that scale each tensor by its own amax")
    ] = 5
    smooth_swiglu: Annotated[
        bool, Field(description="scale each channel between SwiGLU and the down linear, arXiv:2409.12517")
    ] = False
    backend: Annotated[
        Literal["auto", "emulated", "native", "te"], Field(description="who does FP8 GEMMs; auto logs its choice")
    ] = "auto"
    emulation: Annotated[
        Literal["fast", "exact"], Field(description="exact: fp32 accumulation; fast: the dtype's own GEMM")
    ] = "fast"
    fp8_param_gather: Annotated[
        bool, Field(description='with parallel.dp_shard = "optimizer": gather FP8 weights as codes, not in dtype')
    ] = False
    amax_group: Annotated[
        Literal["all", "tp"], Field(description="delayed scaling: ranks whose amaxes are joined; all = tp x dp x cp")
    ] = "all"
    first_layers_bf16: Annotated[int, Field(ge=0, description="layers at the start kept in dtype")] = 0
    last_layers_bf16: Annotated[int, Field(ge=0, description="layers at the end kept in dtype")] = 0
    patterns: Annotated[
        dict[str, str],
        Field(description='regex found in a linear\'s name -> recipe or "none"; the last that matches wins'),
    ] = Field(default_factory=dict)
    te: Annotated[TEConfig, Field(description='options of Transformer Engine\'s layers (backend = "te")')] = Field(
        default_factory=TEConfig
    )

    def __post_init__(self) -> None:
        problems = self._pattern_problems()
        problems = problems or self._option_problems()  # whose options they are hangs on the patterns
        delayed = "delayed" in self.recipes and self.options_of("delayed").get("reduce_amax", True)
        if not problems and self.amax_group != "all" and not delayed:
            problems.append(
                f"amax_group = {self.amax_group!r}: only delayed scaling with reduce_amax joins amaxes after a "
                "micro-batch; nearest: 'all', or recipe = 'delayed'"
            )
        if problems:
            raise ValueError("\n".join(problems))

    def _pattern_problems(self) -> list[str]:
        problems = []
        for pattern, recipe in self.patterns.items():
            names = ("none", *RECIPES)
            if recipe not in names:
                listed = ", ".join(f'"{name}"' for name in names)
                problems.append(f"patterns: {pattern!r} = {recipe!r} is not one of {listed}{nearest(recipe, names)}")
            try:
                re.compile(pattern)
            except re.error as error:
                problems.append(f"patterns: {pattern!r} is not a regular expression: {error}")
        return problems

    def _option_problems(self) -> list[str]:
        problems = []
        for recipe, table in self.options.items():
            if recipe in RECIPES and not isinstance(table, dict):
                problems.append(f"options.{recipe} = {table!r}: must be a table of this recipe's options")
            elif recipe in RECIPES and recipe not in self.recipes:
                used = ", ".join(self.recipes) or "none"
                problems.append(f"options.{recipe}: no linear is in this recipe (used: {used}); leave the table out")
        if problems:
            return problems
        if self.own_options and not self.owner:
            keys = ", ".join(self.own_options)
            if not self.recipes:
                return [f"options: {keys}: without a recipe there are none; leave them out, or name the recipe"]
            tables = " or ".join(f"options.{recipe}" for recipe in self.recipes)
            return [f"options: {keys}: of which recipe? write them in {tables}"]
        for recipe in self.recipes:
            table = f"options.{recipe}" if recipe in self.options else "options"
            try:
                check_options(recipe, self.options_of(recipe))
            except ConfigError as error:  # a line begins with its option, or is about several
                lines = str(error).splitlines()
                problems += [f"{table}{'.' if re.match(r'[a-z0-9_]+: ', line) else ': '}{line}" for line in lines]
        return problems

    @property
    def recipes(self) -> tuple[str, ...]:
        """The recipes that are named, the section's own first."""
        named = (self.recipe, *self.patterns.values())
        return tuple(dict.fromkeys(name for name in named if name != "none"))

    @property
    def own_options(self) -> dict[str, Any]:
        """The options that stand in no recipe's table."""
        return {key: value for key, value in self.options.items() if key not in RECIPES}

    @property
    def owner(self) -> str:
        """The recipe that `own_options` belong to: the section's, or the only one that patterns name; else empty."""
        if self.recipe != "none":
            return self.recipe
        return self.recipes[0] if len(self.recipes) == 1 else ""

    def options_of(self, recipe: str) -> dict[str, Any]:
        """The options that are written for `recipe`."""
        own = self.own_options if recipe == self.owner else {}
        return {**own, **self.options.get(recipe, {})}

    @property
    def gathers_as_codes(self) -> bool:
        """Whether replicas gather quantized weights as codes."""
        return self.fp8_param_gather

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


def reduces_amax(precision: PrecisionConfig) -> bool:
    """Delayed scaling's `reduce_amax`; True for other recipes."""
    return "delayed" not in precision.recipes or bool(precision.options_of("delayed").get("reduce_amax", True))


def backend_problems(precision: PrecisionConfig) -> list[str]:
    """Why the named backend cannot serve here, if it cannot."""
    if precision.backend != "te":
        return []
    problems = [installed_problem()]
    if precision.dtype == "fp64":
        problems.append(
            "precision.backend = 'te': Transformer Engine has no fp64; use dtype = 'bf16', or backend = 'auto'"
        )
    if len(precision.recipes) > 1:
        problems.append(
            f"precision.backend = 'te': recipes {', '.join(precision.recipes)} in one model; Transformer Engine's "
            'layers take one, beside "none"; leave one, or use native or emulated'
        )
    return [problem for problem in problems if problem]


def gather_problems(precision: PrecisionConfig, dp_shard: str) -> list[str]:
    """Why FP8 weights cannot be gathered as codes under `dp_shard`, a line each; empty if nobody asks for it."""
    if not precision.fp8_param_gather:
        return []
    reasons = []
    if not precision.recipes:
        reasons.append('with recipe = "none" no weight is in FP8; nearest: false, or a recipe')
    if dp_shard != "optimizer":
        why = "fully_shard gathers weights in dtype" if dp_shard == "full" else "no rank gathers weights"
        reasons.append(f'with parallel.dp_shard = "{dp_shard}" {why}; nearest: false, or dp_shard = "optimizer"')
    if precision.backend == "te":
        reasons.append("Transformer Engine's layers quantize their weights themselves; nearest: false")
    square = {
        "blockwise": ("w_block_scaling_dim", 2, 2), "mxfp8": ("enable_2d_quantization", True, False),
        "nvfp4": ("disable_2d_quantization", False, False),
    }  # fmt: skip
    for recipe in precision.recipes:
        if recipe not in square:
            continue
        option, wanted, default = square[recipe]
        if precision.options_of(recipe).get(option, default) != wanted:
            reasons.append(
                f"recipe {recipe}: where a weight's blocks lie along rows, its transpose has other codes, and both "
                f"would travel: no fewer bytes; nearest: false, or options.{option} = {str(wanted).lower()}"
            )
    return [f"precision.fp8_param_gather = true: {reason}" for reason in reasons]


def _kinds(names: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(name.split(".", 2)[2] for name in names))


def dim_problems(plan: Mapping[str, str], shapes: Mapping[str, tuple[int, int, str]], tp: int) -> list[str]:
    """FP8 linears with a dim that their recipe cannot take on `tp` ranks, a line for each kind of linear.

    Args:
        shapes: `{linear: (in_features, out_features, "in" or "out": which of them tp splits)}`.
    """
    found: dict[tuple[str, str, int, str, bool], list[int]] = {}
    for name, (inputs, outputs, side) in shapes.items():
        recipe = plan[name]
        for which, size in (("in", inputs), ("out", outputs)):
            local = size // tp if side == which else size
            if recipe != "none" and local % DIM_MULTIPLES[recipe]:
                _, layer, kind = name.split(".", 2)
                found.setdefault((kind, which, local, recipe, side == which), []).append(int(layer))
    of_kind: dict[str, int] = {}
    for kind in (name.split(".", 2)[2] for name in shapes):
        of_kind[kind] = of_kind.get(kind, 0) + 1
    problems = []
    for (kind, which, local, recipe, split), layers in found.items():
        multiple = DIM_MULTIPLES[recipe]
        where = "*" if len(layers) == of_kind[kind] else spans_shown(layers)
        ranks = f" on each of {tp} tp ranks" if split and tp > 1 else ""
        below = local // multiple * multiple
        near = f"{below} or {below + multiple}" if below else str(multiple)
        problems.append(
            f"layers.{where}.{kind}: {which} dim {local}{ranks} is not a multiple of {multiple}, as recipe {recipe} "
            f"needs; nearest: {near}, or keep the linear out of FP8: "
            f'precision.patterns = {{ "{kind}" = "none" }}'
        )
    return problems


def smooth_problems(precision: PrecisionConfig, plan: Mapping[str, str], activation: str) -> list[str]:
    """Why Smooth-SwiGLU has nothing to smooth, if it is asked for; `activation` of the model's MLPs."""
    if not precision.smooth_swiglu:
        return []
    if activation != "swiglu":
        return [
            f"precision.smooth_swiglu = true: model.activation is {activation!r}, whose channels do not multiply; "
            "nearest: false"
        ]
    if precision.backend == "te":
        return [
            "precision.smooth_swiglu = true: with backend = 'te' Transformer Engine's layers multiply the weight as it "
            "is; nearest: false, or backend = 'auto'"
        ]
    if any(name.endswith(".down") and recipe != "none" for name, recipe in plan.items()):
        return []
    return ["precision.smooth_swiglu = true: no down linear is in FP8, so nothing is smoothed; nearest: false"]


def spans_shown(numbers: Sequence[int]) -> str:
    """Ascending numbers as spans: 0, 2-5."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)


def token_rule(plan: Mapping[str, str]) -> tuple[int, str]:
    """What a rank's tokens of a micro-batch must be a multiple of, and the recipe that says so; (1, "") in no FP8.

    The weight gradient sums over the tokens. Experts' rows are as many as the router sends, and padded.
    """
    used = {recipe for name, recipe in plan.items() if recipe != "none" and ".experts." not in name}
    return max(((DIM_MULTIPLES[recipe], recipe) for recipe in used), default=(1, ""))
