"""A checkpoint as a model to run: weights in the dtype asked for, on one process, with its tokenizer.

The checkpoint alone decides the model: its manifest holds the resolved configuration.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch

from megafp8.checkpoint import TensorReader, find, iterate_tensors, read_meta
from megafp8.core.config import build as build_config
from megafp8.core.config import nearest
from megafp8.core.errors import CheckpointError, ConfigError, DataError
from megafp8.core.layout import layout_of
from megafp8.data.marks import ENDS_ONLY, Marks
from megafp8.data.tokenizer import Tokenizer, load_tokenizer
from megafp8.models import ModelConfig, build
from megafp8.models.decoder import Decoder
from megafp8.models.names import check_names
from megafp8.nn.precision import PrecisionConfig
from megafp8.nn.states import PREFIX, WARMUP
from megafp8.parallel.mesh import Mesh

MASTER = "optimizer.master."  # the weights are stored once, at full precision, as the optimizer's masters
BALANCE = "moe."  # biases of experts' routers, which no optimizer holds; never rounded, for they decide choices
_MAX_LISTED = 20  # tensors in one message
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}
AS_TRAINED = "as trained"
RECIPES = (AS_TRAINED, "none", "current", "blockwise", "mxfp8", "nvfp4")


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
        place_weight(model, name, tensor.to(device))
    return model.eval()


def place_weight(model: Decoder, name: str, value: torch.Tensor) -> None:
    """Put a tensor into a model as it is, for inference."""
    place, _, leaf = name.rpartition(".")
    module = model.get_submodule(place)
    is_buffer = leaf in module._buffers
    setattr(module, leaf, value if is_buffer else torch.nn.Parameter(value, requires_grad=False))


def load_model(
    path: Path | str,
    *,
    dtype: torch.dtype = torch.bfloat16,
    recipe: str = "none",
    device: str = "cpu",
    tokenizer: str | Path | None = None,
    mesh: Mesh | None = None,
) -> Loaded:
    """Load the checkpoint `path`, or the newest complete one of a run. Each rank keeps its part of each tensor.

    Args:
        dtype: to compute in.
        recipe: FP8 recipe of the layers' linears: "none"; one that makes its scales anew ("current", "blockwise",
            "mxfp8", "nvfp4"); or `AS_TRAINED`: dtype, recipe and options of the run, with the checkpoint's scales,
            which stay as they are.
        tokenizer: where its file is, if it has moved since training.
        mesh: of tp (and ep) without sequence parallelism; None: one process.

    Raises:
        CheckpointError: none there, damaged, or not one of ours.
        ConfigError: the model cannot be split or quantized so.
        DataError: the tokenizer is missing or another one.
    """
    path, mesh = find(path), mesh or Mesh.single()
    config = model_config(path)
    spec = tokenizer_path(path, tokenizer)
    meta: dict[str, Any] = read_meta(path)
    precision = _precision(path, meta, recipe)
    if recipe == AS_TRAINED:
        dtype = DTYPES[precision.dtype]
    model = build(config, mesh=mesh, precision=precision, dtype=dtype, device=device, empty=True)
    layouts = {name: layout_of(parameter) for name, parameter in model.named_parameters()}
    with TensorReader(path) as reader:
        wanted = {name: layout.shape for name, layout in layouts.items()} | _router_biases(model)
        shapes, kinds = reader.shapes, (MASTER, BALANCE)
        stored = {n.removeprefix(p): shapes[n] for p in kinds for n in shapes if n.startswith(p)}
        if not stored:
            raise CheckpointError(f"{path}: holds no weights ({MASTER}*); it was not written by a run")
        check_shapes(wanted, stored)
        for name in wanted:
            tensor = reader.read(stored_name(name), dtype if name in layouts else None)
            if name in layouts and mesh.world > 1:
                tensor = tensor[layouts[name].local_slices(mesh)].clone()
            place_weight(model, name, tensor.to(device))
        _load_scales(path, model, reader, meta, precision)
    length = meta["config"].get("data", {}).get("sequence_length", config.max_sequence_length)
    marks = Marks.of(meta.get("tokenizer") or {})
    return Loaded(path, model.eval(), config, load_tokenizer(spec), length, marks)


def _router_biases(model: Decoder) -> dict[str, tuple[int, ...]]:
    return {name: tuple(b.shape) for name, b in model.named_buffers() if name.endswith(".router.bias")}


def _precision(path: Path, meta: Mapping[str, Any], recipe: str) -> PrecisionConfig:
    """What a `recipe` of `load_model` means for this checkpoint."""
    if recipe != AS_TRAINED:
        if recipe not in RECIPES:
            raise ConfigError(f"recipe {recipe!r}: one of {', '.join(RECIPES)}{nearest(recipe, RECIPES)}")
        return PrecisionConfig(recipe=cast(Any, recipe))
    try:
        return replace(build_config(PrecisionConfig, meta["config"]["precision"]), fp8_param_gather=False)
    except (ConfigError, KeyError) as error:
        lines = "; ".join(str(error).splitlines())
        raise CheckpointError(f"{path}: its precision is not one of this version's runs: {lines}") from error


def _load_scales(
    path: Path, model: Decoder, reader: TensorReader, meta: Mapping[str, Any], precision: PrecisionConfig
) -> None:
    """Amax histories and scales of delayed scaling, and where in its warm-up the run was."""
    for module, state in model.fp8_states.items():
        for name, live in state.tensors().items():
            stored = f"{PREFIX}{module}.{name}"
            if stored not in reader.shapes:
                raise CheckpointError(f"{path}: {stored} is missing; judge it with a recipe that makes its own scales")
            live.copy_(reader.read(stored))
        state.step = meta.get("step", 0)
        state.warm_up(meta.get(WARMUP, precision.warmup_steps))
