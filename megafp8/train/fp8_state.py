"""FP8 state out of a checkpoint: of the same recipe as it is, of another one converted, dropped or warmed up anew.

What a checkpoint has and what the run wants may differ for each linear. Delayed scaling of other options keeps the
newest amaxes, and its scales follow from them. Where a tensor of delayed scaling has no state there, all of them warm
up again from the step of the checkpoint. State that no linear wants is dropped. A warning says each of these.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from megafp8.checkpoint import tensor_shapes
from megafp8.core.config import build, to_dict
from megafp8.core.errors import CheckpointError, ConfigError
from megafp8.core.log import event, get_logger
from megafp8.fp8.recipe import ROLES
from megafp8.fp8.recipe import recipe as fp8_recipe
from megafp8.fp8.recipes.delayed import Delayed, carried_over
from megafp8.models.config import quantizable_shapes
from megafp8.nn.precision import PrecisionConfig, plan_gemms
from megafp8.nn.states import PREFIX, WARMUP
from megafp8.parallel.collectives import all_reduce_
from megafp8.train.setup import Parts

logger = get_logger(__name__)
_FIELDS = ("amax_history", "scale")


def asked_as_stored(tensors: Mapping[str, torch.Tensor], path: Path | None) -> dict[str, torch.Tensor]:
    """`tensors` with room for histories that have another length in the checkpoint at `path` (None: there is none).

    Raises:
        CheckpointError: FP8 state there that this version does not know.
    """
    asked = dict(tensors)
    stored = tensor_shapes(path, PREFIX) if path is not None else {}
    unknown = sorted(name for name in stored if name.rpartition(".")[2] not in _FIELDS)
    if unknown:
        raise CheckpointError(
            f"{path}: holds FP8 state that this version does not know ({', '.join(unknown[:3])}); go on with the "
            "version that saved it"
        )
    for name, tensor in tensors.items():
        if name.endswith(".amax_history") and name in stored and stored[name] != tuple(tensor.shape):
            asked[name] = torch.zeros(stored[name], dtype=tensor.dtype, device=tensor.device)
    return asked


def mend_scales(parts: Parts, loaded: Mapping[str, torch.Tensor]) -> None:
    """Replace scales that cannot be (0, negative, not finite) by what the finite part of their history says, aloud.

    Every rank that holds a tensor's state has loaded the same, so that all decide alike.
    """
    for module, state in parts.fp8_states.items():
        for role in ROLES:
            names = [f"{PREFIX}{module}.{role}.{field}" for field in _FIELDS]
            if not isinstance(state.recipe, Delayed) or any(name not in loaded for name in names):
                continue
            history, scale = (loaded[name] for name in names)
            sound = bool(scale.isfinite().all() and (scale > 0).all() and history.isfinite().all())
            if not sound:
                history.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
                was = float(scale)
                scale.copy_(carried_over(history, torch.ones_like(scale), role, state.recipe, state.recipe)[1])
                fields: dict[str, Any] = {"module": module, "role": role, "was": was, "now": float(scale)}
                event(logger, "FP8 scale is set anew: it cannot be", level=logging.WARNING, **fields)


def restore(parts: Parts, path: Path, meta: Mapping[str, Any], loaded: Mapping[str, torch.Tensor]) -> None:
    """Bring FP8 state into the form that this run wants; collective. `loaded`: filled tensors of `asked_as_stored`.

    Raises:
        CheckpointError: FP8 state is missing that the checkpoint's own configuration asks for, or its recipe is none of
            this version's, so that its scales cannot be converted.
    """
    restore_warmup(parts, meta)
    stored = set(tensor_shapes(path, PREFIX))
    states = parts.fp8_states.items()
    mine = {f"{PREFIX}{module}.{name}": module for module, state in states for name in state.tensors()}
    before = to_dict(PrecisionConfig()) | meta["config"]["precision"]
    now = to_dict(parts.config)["precision"]
    before["fp8_param_gather"] = now["fp8_param_gather"]  # which changes no number
    changed: dict[str, Any] = {key: f"{before[key]} -> {now[key]}" for key in now if before[key] != now[key]}
    old = _precision_of(before, path, needed=bool(stored and mine and changed))
    owed = _delayed_in(parts, old) if old is not None else set()
    absent = [name for name in mine if name not in stored]
    # stages hold different states: what is missing is agreed on
    missing = torch.tensor([len(absent), sum(mine[name] in owed for name in absent)])
    all_reduce_(missing, parts.mesh.group_of(("pp", "dp", "cp", "tp")), "max")
    afresh, lost = missing.tolist()
    if lost:
        raise CheckpointError(f"{path}: {lost} tensors of FP8 state are missing on a rank; use an older checkpoint")
    if not changed:
        return
    event(logger, "precision is not the checkpoint's", level=logging.WARNING, **changed)
    converted = _convert(parts, old, loaded) if old is not None else 0
    if converted:
        event(logger, "FP8 histories are converted to the run's options", level=logging.WARNING, tensors=converted)
    if afresh:
        _start_afresh(parts, meta["step"], afresh)
    if stored and "delayed" not in parts.config.precision.recipes:
        dropped: dict[str, Any] = {"tensors": len(stored), "recipe": f"{before['recipe']} -> {now['recipe']}"}
        event(logger, "FP8 state is dropped: no linear is in delayed scaling now", level=logging.WARNING, **dropped)


def restore_warmup(parts: Parts, meta: Mapping[str, Any]) -> None:
    """Stand where the checkpoint was taken: inside the warm-up or past it; a changed warmup_steps counts from now."""
    steps = parts.config.precision.warmup_steps
    same = meta["config"]["precision"].get("warmup_steps", steps) == steps
    _warm_up(parts, meta["step"], meta.get(WARMUP, steps) if same else steps)


def _warm_up(parts: Parts, step: int, until: int) -> None:
    parts.warmup_until = until
    for state in parts.fp8_states.values():
        state.step = step
        state.warm_up(until)


def _start_afresh(parts: Parts, step: int, tensors: int) -> None:
    """All of delayed scaling warms up again, so that no scale is read before its tensor was seen."""
    steps = parts.config.precision.warmup_steps
    if steps:
        _warm_up(parts, step, step + steps)
    begin = f"warm-up until step {step + steps}" if steps else "no warm-up: scales begin at 1"
    event(logger, "FP8 state starts afresh", level=logging.WARNING, tensors=tensors, begin=begin)


def _precision_of(before: Mapping[str, Any], path: Path, *, needed: bool) -> PrecisionConfig | None:
    """The precision section that the checkpoint was saved under; None if it is none of this version's."""
    fields = ("recipe", "options", "patterns", "first_layers_bf16", "last_layers_bf16")
    try:
        return build(PrecisionConfig, {key: before[key] for key in fields})
    except ConfigError as error:
        if not needed:
            return None
        lines = "; ".join(str(error).splitlines())
        raise CheckpointError(
            f"{path}: its recipe is none of this version's ({lines}), so its FP8 state cannot be converted; go on with "
            'the version that saved it, or without its state: precision.recipe = "current"'
        ) from error


def _delayed_in(parts: Parts, precision: PrecisionConfig) -> set[str]:
    """The linears that `precision` puts in delayed scaling."""
    model = parts.config.model
    plan, _ = plan_gemms(precision, list(quantizable_shapes(model)), model.num_layers)
    return {name for name, recipe in plan.items() if recipe == "delayed"}


def _convert(parts: Parts, old: PrecisionConfig, loaded: Mapping[str, torch.Tensor]) -> int:
    """Delayed scaling's state of other options, for those of this run; how many tensors that were."""
    if "delayed" not in old.recipes:
        return 0
    was, count, held = fp8_recipe("delayed", **old.options_of("delayed")), 0, _delayed_in(parts, old)
    assert isinstance(was, Delayed)
    for module, state in parts.fp8_states.items():
        if module not in held or not isinstance(state.recipe, Delayed) or state.recipe.keeps_state_of(was):
            continue
        live = state.tensors()
        for role in ROLES:
            history, scale = (loaded[f"{PREFIX}{module}.{role}.{field}"] for field in _FIELDS)
            for field, made in zip(_FIELDS, carried_over(history, scale, role, was, state.recipe), strict=True):
                live[f"{role}.{field}"].copy_(made)
            count += 1
    return count
