"""Whether what a new run is to begin from can be used: judged without torch, before processes start."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megafp8.checkpoint.folders import find, latest, step_of
from megafp8.checkpoint.manifest import MANIFEST_NAME, read_manifest
from megafp8.core.config import build, to_dict
from megafp8.core.errors import CheckpointError, ConfigError, DataError
from megafp8.core.jsonio import read_json
from megafp8.core.log import event, get_logger
from megafp8.models.config import ModelConfig
from megafp8.models.names import config_from_hf
from megafp8.train.config import RunConfig

logger = get_logger(__name__)

# Keys of [model] that shape no tensor and do not change what the weights compute: they may differ without a word.
_FREE = {
    "preset", "family", "init_std", "max_sequence_length", "hidden_dropout", "attention_dropout", "moe.capacity_factor",
    "moe.drop_policy", "moe.aux_loss", "moe.aux_loss_coeff", "moe.z_loss_coeff", "moe.bias_update_rate",
}  # fmt: skip
# Keys that change what the weights compute but fit them all the same: checkpoint.change_model says that it is meant.
_FITTING = {
    "norm_eps", "rope_theta", "rope_scaling", "moe.top_k", "moe.score", "moe.normalize_top_k", "moe.scaling_factor",
    "moe.num_groups", "moe.top_k_groups",
}  # fmt: skip


def is_foreign(path: Path) -> bool:
    """Whether `path` is a Hugging Face folder rather than a checkpoint or a run of ours."""
    return (path / "config.json").is_file() and not (path / MANIFEST_NAME).exists()


def refuse_unfit(config: RunConfig) -> None:
    """Judge `checkpoint.load_from` as far as that goes without reading a tensor; nothing if it is not to be read.

    Raises:
        CheckpointError: nothing there, damaged, or another model: every key that differs.
        ConfigError: it cannot be used as it is asked to be.
    """
    asked = config.checkpoint
    path = Path(asked.load_from)
    if not asked.load_from or latest(config.dir / "checkpoints") is not None:
        return
    if is_foreign(path):
        if asked.load_what != "weights":
            raise ConfigError(
                f"checkpoint.load_what = {asked.load_what!r}: {path} is a Hugging Face folder, which holds weights "
                'only; nearest: "weights"'
            )
        _refuse_other_model(config, to_dict(config_from_hf(_json(path / "config.json"))), path)
        return
    path = find(path)
    model = read_manifest(path).meta.get("config", {}).get("model")
    if model is None:
        raise CheckpointError(f"{path}: its manifest holds no model configuration; it was not written by a run")
    _refuse_other_model(config, _as_now(model), path)
    if asked.load_what == "run" and step_of(path) >= config.train.steps:
        raise ConfigError(
            f"train.steps = {config.train.steps}: {path} has taken {step_of(path)} steps already; raise it, or begin "
            'at step 0 with its weights: checkpoint.load_what = "weights"'
        )


def _json(path: Path) -> dict[str, Any]:
    try:
        value = read_json(path)
    except DataError as error:
        raise CheckpointError(str(error)) from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: is no JSON object")
    return value


def _as_now(model: Mapping[str, Any]) -> dict[str, Any]:
    """A model section of an older version with this one's defaults; as it is if it has keys that are gone."""
    try:
        return to_dict(build(ModelConfig, model))
    except ConfigError:
        return dict(model)


def _refuse_other_model(config: RunConfig, there: Mapping[str, Any], path: Path) -> None:
    differing = differences(to_dict(config.model), there)
    fitting = [text for key, text in differing.items() if key in _FITTING or key.partition(".")[0] in _FITTING]
    shaping = [text for key, text in differing.items() if text not in fitting]
    if config.checkpoint.load_only:  # of other sizes perhaps: the tensors that are asked for are held against them
        shaping = []
    if shaping:
        raise CheckpointError(
            f"{path}: is of another model: {'; '.join(shaping + fitting)}; give [model] its values, or take the parts "
            "that fit by name: checkpoint.load_only"
        )
    if fitting and not config.checkpoint.change_model:
        raise CheckpointError(
            f"{path}: its weights fit, but compute something else here: {'; '.join(fitting)}; give [model] its values, "
            "or say that it is meant: checkpoint.change_model = true"
        )
    for text in fitting:
        event(logger, "the model is not the checkpoint's", level=logging.WARNING, changed=text)


def differences(here: Mapping[str, Any], there: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Dotted keys of two model sections that differ and matter, each with both values in words."""
    found: dict[str, str] = {}
    for key in {**there, **here}:
        name, a, b = f"{prefix}{key}", here.get(key), there.get(key)
        if name in _FREE or a == b:
            continue
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            found |= differences(a, b, f"{name}.")
        else:
            found[name] = f"model.{name} is {a!r} here, {b!r} there"
    return found
