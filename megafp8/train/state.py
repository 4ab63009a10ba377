"""A run's state to and from a checkpoint: which tensors, which labels, which numbers beside them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from megafp8.checkpoint import load_newest, save, tensor_names
from megafp8.core.config import to_dict
from megafp8.core.errors import CheckpointError
from megafp8.core.layout import Layout
from megafp8.core.log import event, get_logger
from megafp8.parallel.collectives import all_reduce_
from megafp8.train.setup import Parts, code_version

logger = get_logger(__name__)
_FP8 = "fp8."  # what names of FP8 state start with
_MOMENTS = "optimizer.exp_avg"  # and those of both of Adam's moments


def tensors_of(parts: Parts) -> tuple[dict[str, torch.Tensor], dict[str, Layout]]:
    """Live tensors of optimizer, FP8 state and experts' balance by global name, and their layouts.

    The compute-dtype weights are not among them: they are a rounding of the masters.
    """
    tensors, layouts = dict(parts.optimizer.tensors()), dict(parts.optimizer.layouts())
    for module, state in parts.fp8_states.items():
        for name, tensor in state.tensors().items():
            tensors[f"{_FP8}{module}.{name}"] = tensor
            layouts[f"{_FP8}{module}.{name}"] = Layout(tuple(tensor.shape))
    for module, router in parts.routers.items():
        if router.bias is not None:
            tensors[f"moe.{module}.bias"] = router.bias
            layouts[f"moe.{module}.bias"] = Layout(tuple(router.bias.shape))
    return tensors, layouts


def save_run(parts: Parts, step: int, progress: dict[str, Any]) -> Path:
    """Write <run>/checkpoints/step_<step>; collective. `progress` goes into the manifest beside the config."""
    parts.optimizer.wait()  # no weights are on their way while ranks write, nor when a run ends after this
    tensors, layouts = tensors_of(parts)
    meta = {
        "step": step,
        "consumed_samples": parts.loader.consumed_samples,
        "optimizer_steps": parts.optimizer.step_count,
        "config": to_dict(parts.config),
        "tokenizer": parts.corpus,
        "code_version": code_version(),
        **progress,
    }
    path = save(parts.config.dir / "checkpoints", step, tensors, layouts, parts.mesh, meta)
    parts.optimizer.drop_copies()
    return path


def _compare_precision(parts: Parts, path: Path, meta: Mapping[str, Any], mine: set[str]) -> None:
    """A run may go on in another recipe, said aloud; in the same one, no FP8 state may be missing.

    `mine`: names of this rank's FP8 state.
    """
    before, now = meta["config"]["precision"], to_dict(parts.config)["precision"]
    missing = torch.tensor(len(mine - tensor_names(path, _FP8)))
    all_reduce_(missing, parts.mesh.group_of(("pp", "dp", "cp", "tp")), "max")  # stages hold different states
    if before != now:
        changed: dict[str, Any] = {
            key: f"{before.get(key)} -> {value}" for key, value in now.items() if before.get(key) != value
        }
        changed["fp8_tensors_afresh"] = int(missing)
        event(logger, "precision is not the checkpoint's", level=logging.WARNING, **changed)
    elif missing:
        problem = f"{int(missing)} tensors of FP8 state are missing on a rank"
        raise CheckpointError(f"{path}: {problem}; use an older checkpoint")


def _compare_moments(parts: Parts, meta: Mapping[str, Any]) -> None:
    """Moments may be kept in another dtype than they were saved from, said aloud."""
    before, now = meta["config"]["optimizer"], to_dict(parts.config)["optimizer"]
    keys = ("exp_avg_dtype", "exp_avg_sq_dtype")
    changed: dict[str, Any] = {
        key: f"{before.get(key, 'fp32')} -> {now[key]}"
        for key in keys
        if before.get(key, "fp32") != now[key]
    }
    if changed:
        event(logger, "optimizer moments are converted", level=logging.WARNING, **changed)


def load_newest_run(parts: Parts) -> tuple[Path, dict[str, Any]] | None:
    """Fill this run from its newest intact checkpoint, of any mesh; collective.

    Returns:
        its folder and its meta; None if the run has none yet.

    Raises:
        CheckpointError: none is intact, or the newest is of another architecture or tokenizer, or lacks FP8 state that
            its own configuration asks for.
    """
    tensors, layouts = tensors_of(parts)
    folder = parts.config.dir / "checkpoints"
    found = load_newest(folder, tensors, layouts, parts.mesh, optional=_FP8, converted=_MOMENTS)
    if found is None:
        return None
    path, meta = found
    _compare_precision(parts, path, meta, {name for name in tensors if name.startswith(_FP8)})
    _compare_moments(parts, meta)
    if meta["tokenizer"]["fingerprint"] != parts.corpus["fingerprint"]:
        raise CheckpointError(
            f"{path}: trained with tokenizer {meta['tokenizer']['fingerprint'][:12]}, the data has "
            f"{parts.corpus['fingerprint'][:12]}; use the corpus of that tokenizer or another run.dir"
        )
    parts.optimizer.step_count = meta["optimizer_steps"]
    parts.optimizer.load_done()
    parts.loader.consumed_samples = meta["consumed_samples"]
    for state in parts.fp8_states.values():
        state.drop_weight_cache()
    return path, meta
