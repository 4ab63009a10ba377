"""Transformer Engine as a library: loaded when it is asked for, its recipes from ours, and what it cannot do.

The only place that imports transformer_engine. Versions below MINIMUM lack names that this package uses.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from megafp8.core.errors import ConfigError
from megafp8.fp8.recipe import Recipe
from megafp8.nn.te_config import installed_problem

_NAMES = {
    "delayed": "DelayedScaling",
    "current": "Float8CurrentScaling",
    "blockwise": "Float8BlockScaling",
    "mxfp8": "MXFP8BlockScaling",
    "nvfp4": "NVFP4BlockScaling",
}
# options that are fields of Transformer Engine's recipe under the same name; the rest is handled below
_FIELDS = {
    "delayed": ("margin", "amax_history_len", "amax_compute_algo", "reduce_amax"),
    "current": ("use_power_2_scales",),
    "blockwise": ("use_f32_scales", "x_block_scaling_dim", "w_block_scaling_dim", "grad_block_scaling_dim"),
    "mxfp8": ("enable_2d_quantization",),
    "nvfp4": ("disable_rht", "disable_stochastic_rounding", "disable_2d_quantization"),
}
_AVAILABLE = {
    "delayed": "is_fp8_available",
    "current": "is_fp8_available",
    "blockwise": "is_fp8_block_scaling_available",
    "mxfp8": "is_mxfp8_available",
    "nvfp4": "is_nvfp4_available",
}


def library() -> Any:
    """`transformer_engine.pytorch`.

    Raises:
        ConfigError: it is not there, too old, or does not load; with what would work.
    """
    problem = installed_problem()
    if problem:
        raise ConfigError(problem)
    try:
        import transformer_engine.pytorch as te
    except (ImportError, OSError, RuntimeError) as error:
        raise ConfigError(
            f"precision.backend = 'te': Transformer Engine does not load ({type(error).__name__}: {error}); "
            "use native or auto"
        ) from error
    return te


def recipes_module() -> ModuleType:
    """`transformer_engine.common.recipe`."""
    import transformer_engine.common.recipe as recipes

    module: ModuleType = recipes
    return module


def library_recipe(recipe: Recipe) -> Any:
    """Transformer Engine's recipe of the same name and options.

    Raises:
        ConfigError: the recipe is not one of Transformer Engine's, or an option of it is not.
    """
    recipes = recipes_module()
    if recipe.name not in _NAMES:
        raise ConfigError(
            f"precision.recipe = {recipe.name!r}: Transformer Engine has {', '.join(_NAMES)}; use one of them, or "
            "precision.backend = 'native' or 'emulated'"
        )
    fields = {name: getattr(recipe, name) for name in _FIELDS[recipe.name]}
    if hasattr(recipe, "fp8_format"):
        fields["fp8_format"] = recipes.Format[recipe.fp8_format]
    made = getattr(recipes, _NAMES[recipe.name])(**fields)
    if recipe.name in ("current", "blockwise"):
        # what the class holds was made from environment variables, not from the fields above
        power_2 = recipe.use_power_2_scales if recipe.name == "current" else not recipe.use_f32_scales  # type: ignore[attr-defined]
        rules = recipes.QParams(power_2_scale=power_2, amax_epsilon=recipe.amax_epsilon)  # type: ignore[attr-defined]
        made.fp8_quant_fwd_inp = made.fp8_quant_fwd_weight = made.fp8_quant_bwd_grad = rules
    return made


def hardware_problem(te: Any, recipe: Recipe) -> str | None:
    """Why this GPU cannot run the recipe, in Transformer Engine's words; None: it can."""
    works, reason = getattr(te, _AVAILABLE[recipe.name])(return_reason=True)
    if works:
        return None
    capable = [name for name, check in _AVAILABLE.items() if getattr(te, check)()]
    return (
        f"precision.recipe = {recipe.name!r} with backend 'te': {reason or 'this GPU cannot'}; recipes that this GPU "
        f"runs: {', '.join(capable) or 'none'}"
    )


def gpu_problem(device: torch.device | str) -> str | None:
    """Why Transformer Engine cannot work on `device`; None: it can. The meta device is for looking at a model."""
    kind = torch.device(device).type
    if kind == "cuda" or (kind == "meta" and torch.cuda.is_available()):
        return None
    return (
        f"precision.backend = 'te': Transformer Engine needs an NVIDIA GPU and this run is on {kind}; "
        "use emulated (the same bytes and scales on any machine) or auto"
    )
