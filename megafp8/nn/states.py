"""From a precision section to the FP8 state of each linear: plan, recipes, backend, and their refusals."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from megafp8.core.errors import ConfigError
from megafp8.core.log import event, get_logger
from megafp8.fp8.backend import backend as fp8_backend
from megafp8.fp8.linear import LinearState
from megafp8.fp8.recipe import recipe as fp8_recipe
from megafp8.nn.precision import PrecisionConfig, dim_problems, plan_gemms

_logger = get_logger(__name__)
PREFIX = "fp8."  # of FP8 state's names in a checkpoint: fp8.<module>.<role>.<field>
WARMUP = "fp8_warmup_until"  # in a checkpoint's meta: the last step of the warm-up


def linear_states(
    precision: PrecisionConfig,
    shapes: Mapping[str, tuple[int, int, str]],
    *,
    num_layers: int,
    tp: int,
    device: torch.device | str,
    compiled: bool,
) -> dict[str, LinearState]:
    """The FP8 state of every linear that the plan puts in FP8, by name.

    Args:
        shapes: `{linear: (in_features, out_features, which of them tp splits, if any)}`, whole dims.

    Raises:
        ConfigError: a pattern without a match, dims that FP8 cannot take, a backend that refuses; all at once.
    """
    plan, problems = plan_gemms(precision, list(shapes), num_layers)
    problems += dim_problems(plan, shapes, tp)
    if problems:
        raise ConfigError("\n".join(problems))
    used = sorted({name for name in plan.values() if name != "none"})
    if not used:
        return {}
    recipes: dict[str, Any] = {name: fp8_recipe(name, **precision.options_of(name)) for name in used}
    backends = {
        name: fp8_backend(precision.backend, precision.emulation, device=device, compiled=compiled, recipe=made)
        for name, made in recipes.items()
    }
    states = {}
    refusals: dict[str, None] = {}
    for name, (inputs, outputs, side) in shapes.items():
        if plan[name] == "none":
            continue
        local = (inputs // tp if side == "in" else inputs, outputs // tp if side == "out" else outputs)
        chosen = backends[plan[name]]
        reason = chosen.supports(recipes[plan[name]], *local)
        if reason:
            refusals[f"{name.split('.', 2)[2]} in recipe {plan[name]}: backend {chosen.name}: {reason}"] = None
        wide = precision.amax_group == "all"
        states[name] = LinearState(
            name, recipes[plan[name]], chosen, device, shared_widely=wide, warmup_until=precision.warmup_steps
        )
    if refusals:
        raise ConfigError("\n".join(refusals))
    for name, chosen in backends.items():
        count = sum(recipe == name for recipe in plan.values())
        event(_logger, "fp8", recipe=name, backend=chosen.name, reason=chosen.reason, linears=count)
    return states
