"""A checkpoint as a model to run: weights in the dtype asked for, on one process, with its tokenizer.

The checkpoint alone decides the model: its manifest holds the resolved configuration.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megafp8.checkpoint import find, iterate_tensors, read_meta
from megafp8.core.config import build as build_config
from megafp8.core.errors import CheckpointError, ConfigError, DataError
from megafp8.data.marks import ENDS_ONLY, Marks
from megafp8.data.tokenizer import Tokenizer, load_tokenizer
from megafp8.models import ModelConfig, build
from megafp8.models.decoder import Decoder
from megafp8.models.names import check_names

MASTER = "optimizer.master."  # the weights are stored once, at full precision, as the optimizer's masters
BALANCE = "moe."  # biases of experts' routers, which no optimizer holds; never rounded, for they decide choices
_MAX_LISTED = 20  # tensors in one message
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class Loaded:
    """A model ready to run, and what belongs to it. `sequence_length` is training's, in tokens."""

    path: Path
    model: Decoder
    config: ModelConfig
    tokenizer: Tokenizer
    sequence_length: int
    marks: Marks = ENDS_ONLY

    def prompt_ids(self, text: str) -> list[int]:
        """Ids of a text to continue, begun as the documents of training were; at least one."""
        ids = [*self.marks.before(self.tokenizer), *self.tokenizer.encode(text)]
        return ids or [self.marks.context(self.tokenizer)]


def model_config(path: Path) -> ModelConfig:
    """The model section of a checkpoint.

    Raises:
        CheckpointError: damaged, or its configuration is not one of ours.
    """
    section = read_meta(path).get("config", {}).get("model")
    if section is None:
        raise CheckpointError(f"{path}: its manifest holds no model configuration; it was not written by a run")
    try:
        return build_config(ModelConfig, section)
    except ConfigError as error:
        lines = "; ".join(str(error).splitlines())
        raise CheckpointError(f"{path}: its model configuration is not of this version: {lines}") from error


def tokenizer_path(path: Path, given: str | Path | None = None) -> str:
    """Where the tokenizer of a checkpoint is: `given`, else what its configuration names, else the run's own copy.

    Raises:
        DataError: it names none, or it is another one than the model was trained with.
    """
    meta = read_meta(path)
    spec = str(given or meta.get("config", {}).get("data", {}).get("tokenizer") or "")
    if not spec:
        raise DataError(f"{path}: names no tokenizer; name it with --tokenizer")
    kept = path.parent.parent / "tokenizer"  # the run's own copy
    if not given and spec != "bytes" and not Path(spec).exists() and kept.is_dir():
        spec = str(kept)
    try:
        found = load_tokenizer(spec).fingerprint
    except DataError as error:
        raise DataError(f"{error}; name where it is now with --tokenizer") from None
    wanted = (meta.get("tokenizer") or {}).get("fingerprint", found)
    if found != wanted:
        raise DataError(f"{spec}: tokenizer {found[:12]} is not {wanted[:12]}, which the model was trained with")
    return spec


def weights(path: Path, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    """The model's whole tensors by our names, in `dtype` (None: as stored), on the CPU.

    Raises:
        CheckpointError: damaged, or it holds no weights.
    """
    found = in_dtype({name.removeprefix(MASTER): t for name, t in iterate_tensors(path, MASTER)}, dtype)
    if not found:
        raise CheckpointError(f"{path}: holds no weights ({MASTER}*); it was not written by a run")
    return found | {name.removeprefix(BALANCE): tensor for name, tensor in iterate_tensors(path, BALANCE)}


def in_dtype(tensors: Mapping[str, torch.Tensor], dtype: torch.dtype | None) -> dict[str, torch.Tensor]:
    """`tensors` in `dtype` (None: as they are), but for the routers' biases, which are never rounded."""
    return {name: t if name.endswith(".router.bias") else t.to(dtype) for name, t in tensors.items()}


def stored_name(name: str) -> str:
    """The name under which a checkpoint holds a weight or a router's bias."""
    return f"{BALANCE if name.endswith('.router.bias') else MASTER}{name}"


def weight_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """{our name: whole shape} of what a model of this config stores: its parameters and its routers' biases."""
    return _shapes_of(build(config, device="meta"))


def _shapes_of(model: Decoder) -> dict[str, tuple[int, ...]]:
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    return shapes | {n: tuple(b.shape) for n, b in model.named_buffers() if n.endswith(".router.bias")}


def check_shapes(wanted: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]]) -> None:
    """Hold the weights that are there against those of a configuration.

    Raises:
        CheckpointError: names or shapes differ; lists them.
    """
    check_names("the weights", wanted, found)
    wrong = [f"{n} has shape {found[n]}, not {wanted[n]}" for n in sorted(wanted) if tuple(found[n]) != wanted[n]]
    if wrong:
        more = f"; and {len(wrong) - _MAX_LISTED} more" if len(wrong) > _MAX_LISTED else ""
        lines = "; ".join(wrong[:_MAX_LISTED])
        raise CheckpointError(f"the weights are not those of the configuration: {lines}{more}")


def check_weights(config: ModelConfig, tensors: Mapping[str, torch.Tensor]) -> Decoder:
    """Hold `tensors` against the config; returns the model that they fit, without memory (on meta).

    Raises:
        CheckpointError: names or shapes are not those of the config; lists them.
    """
    model = build(config, dtype=next(iter(tensors.values())).dtype, device="meta")
    check_shapes(_shapes_of(model), {name: tuple(tensor.shape) for name, tensor in tensors.items()})
    return model


def build_model(config: ModelConfig, tensors: Mapping[str, torch.Tensor], *, device: str = "cpu") -> Decoder:
    """A model over `tensors`, which it takes as they are; for inference only.

    Raises:
        CheckpointError: names or shapes are not those of the config.
    """
    model = check_weights(config, tensors)
    for name, tensor in tensors.items():
        place, _, leaf = name.rpartition(".")
        module, value = model.get_submodule(place), tensor.to(device)
        is_buffer = leaf in module._buffers
        setattr(module, leaf, value if is_buffer else torch.nn.Parameter(value, requires_grad=False))
    return model.eval()


def load_model(
    path: Path | str,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cpu",
    tokenizer: str | Path | None = None,
) -> Loaded:
    """Load the checkpoint `path`, or the newest complete one of a run.

    Args:
        dtype: to compute in.
        tokenizer: where its file is, if it has moved since training.

    Raises:
        CheckpointError: none there, damaged, or not one of ours.
        DataError: the tokenizer is missing or another one.
    """
    path = find(path)
    config = model_config(path)
    spec = tokenizer_path(path, tokenizer)
    meta: dict[str, Any] = read_meta(path)
    length = meta["config"].get("data", {}).get("sequence_length", config.max_sequence_length)
    model = build_model(config, weights(path, dtype), device=device)
    marks = Marks.of(read_meta(path).get("tokenizer") or {})
    return Loaded(path, model, config, load_tokenizer(spec), length, marks)
