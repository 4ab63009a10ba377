"""from_megatron: a torch_dist checkpoint of megatron-core's GPT model as one of ours, of weights only.

Its metadata is pickled, so a confined process reads it (megatron_pickles) and says where each chunk lies; the tensors
are then read here as plain bytes.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import torch

from megafp8 import __version__
from megafp8.checkpoint.folders import candidates
from megafp8.convert.checkpoint_out import write_checkpoint
from megafp8.convert.megatron_config import config_from_arguments
from megafp8.convert.source import Source
from megafp8.convert.tensor_files import OpenFiles, Stored, read_header, read_tensor
from megafp8.core.config import build, load_toml, to_dict
from megafp8.core.errors import CheckpointError, ConfigError, DataError, ResourceError
from megafp8.data.tokenizer import identity, load_tokenizer
from megafp8.infer.weights import stored_name, weight_shapes
from megafp8.models import ModelConfig
from megafp8.models.names import check_names

LATEST = "latest_checkpointed_iteration.txt"
_PICKLES = Path(__file__).with_name("megatron_pickles.py")
_SECONDS = 1000  # above the limit that the process has
_EMBEDDING = "embedding.word_embeddings.weight"
# our module -> its names there: as Transformer Engine's fused layers have it, and as plain ones do
_OUTSIDE = {
    "embedding": ("embedding.word_embeddings",), "position_embedding": ("embedding.position_embeddings",),
    "final_norm": ("decoder.final_layernorm",), "output": ("output_layer",),
}  # fmt: skip
_LAYER = {
    "attention_norm": ("self_attention.linear_qkv.layer_norm_", "input_layernorm."),
    "mlp_norm": ("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm."),
    "attention.qkv": ("self_attention.linear_qkv.",), "attention.out": ("self_attention.linear_proj.",),
    "attention.q_norm": ("self_attention.q_layernorm.",), "attention.k_norm": ("self_attention.k_layernorm.",),
    "mlp.gate_up": ("mlp.linear_fc1.",), "mlp.up": ("mlp.linear_fc1.",), "mlp.down": ("mlp.linear_fc2.",),
    "mlp.router": ("mlp.router.",),
}  # fmt: skip
_EXPERTS = {"gate_up": "mlp.experts.experts.linear_fc1.weight", "down": "mlp.experts.experts.linear_fc2.weight"}


@dataclass(frozen=True)
class Place:
    """One of our tensors there: whole, or one slice of what all layers have in one (`layer`, None: whole)."""

    names: tuple[str, ...]
    layer: int | None = None


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor in a file, at `offsets` of the whole; `first` and `strides` in elements."""

    file: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    start: int
    first: int


def find_iteration(path: Path) -> Path:
    """The folder of the newest iteration of a run, or `path` itself where it is one.

    Raises:
        CheckpointError: neither, or of another format than torch_dist.
    """
    folder = path
    if (path / LATEST).is_file():
        latest = (path / LATEST).read_text(encoding="utf-8", errors="replace").strip()
        if latest != "release" and not (latest.isascii() and latest.isdigit()):
            raise CheckpointError(f"{path / LATEST}: says {latest[:40]!r}, not an iteration's number or `release`")
        folder = path / (latest if latest == "release" else f"iter_{int(latest):07d}")
    try:
        kind = json.loads((folder / "metadata.json").read_text(encoding="utf-8"))["sharded_backend"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder}: no torch_dist checkpoint of Megatron: metadata.json: {error}") from error
    if kind != "torch_dist":
        raise CheckpointError(f"{folder}: is of the format {kind!r}; save it with --ckpt-format torch_dist")
    return folder


def read_metadata(folder: Path, *, arguments: bool) -> dict[str, Any]:
    """What the folder's pickles say, read by a confined process.

    Raises:
        CheckpointError: damaged, or a pickle asks for what no checkpoint needs; nothing of it was run.
    """
    command = [sys.executable, "-I", "-S", str(_PICKLES), str(folder), *([] if arguments else ["--no-args"])]
    try:
        run = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, env={}, cwd="/", timeout=_SECONDS, check=False
        )
        found = json.loads(run.stdout) if run.returncode == 0 else {}
    except (subprocess.TimeoutExpired, ValueError, OSError) as error:
        raise CheckpointError(f"{folder}: its pickled metadata could not be read: {error}") from error
    if run.returncode:
        last = (run.stderr.decode(errors="replace").strip().splitlines() or ["no word"])[-1]
        raise CheckpointError(f"{folder}: its pickled metadata ended the process that read it: {last[:200]}")
    if "error" in found:
        raise CheckpointError(f"{folder}: {found['error']}")
    return dict(found)


class MegatronFolder(Source):
    """A torch_dist checkpoint of megatron-core's GPT model; the padding of its vocabulary is cut off."""

    def __init__(self, path: Path, *, model_config: Path | None = None, vocab_size: int | None = None) -> None:
        self.path = find_iteration(path.absolute())
        found = read_metadata(self.path, arguments=model_config is None)
        self.skipped = int(found["skipped"])
        self._stored: dict[str, tuple[torch.dtype, tuple[int, ...], list[Chunk]]] = {
            name: (_dtype(entry["dtype"]), tuple(entry["shape"]), [_chunk(chunk) for chunk in entry["chunks"]])
            for name, entry in found["tensors"].items()
        }
        if _EMBEDDING not in self._stored:
            raise CheckpointError(f"{self.path}: holds no {_EMBEDDING}: no GPT model of megatron-core")
        self.config = _model(self.path, found["arguments"], self._stored[_EMBEDDING][1][0], model_config, vocab_size)
        self.config = replace(self.config, moe=replace(self.config.moe, capacity_factor=0.0))
        self.shapes = weight_shapes(self.config)
        self._places = {name: self._place(name) for name in self.shapes}
        self._check_names()
        self.dtypes = {name: self._stored[place.names[0]][0] for name, place in self._places.items()}
        if self.dtypes["embedding.weight"] != torch.float32:
            self.fp32 = frozenset(name for name, dtype in self.dtypes.items() if dtype == torch.float32)
        for name in self.shapes:
            self._check_shape(name)
        files = sorted(path for path in self.path.iterdir() if path.is_file())
        self.fingerprint = repr([(p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in files])
        self._files = OpenFiles(self.path)

    def __exit__(self, *_: object) -> None:
        self._files.close()

    def read(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A whole tensor on the CPU by our name, in `dtype` (None: as stored).

        Raises:
            CheckpointError: its file is cut short or cannot be read.
        """
        place, shape = self._places[name], self.shapes[name]
        stored, whole, chunks = self._stored[place.names[0]]
        sizes = whole if place.layer is None else whole[1:]
        kept = _cut(name, sizes, shape)
        out = torch.empty(kept, dtype=dtype or stored)
        for chunk, low, high in _boxes(chunks, place.layer, kept):
            where = tuple(slice(begin, end) for begin, end in zip(low, high, strict=True))
            out[where] = self._read(chunk, stored, low, high, layer=place.layer)
        return out.view(shape)

    def tokenizer(self, given: str | Path | None = None) -> str:
        """What is given: such a checkpoint holds none.

        Raises:
            DataError: none is given.
        """
        if not given:
            raise DataError(f"{self.path}: holds no tokenizer; name it with --tokenizer")
        return str(given)

    def _read(
        self, chunk: Chunk, dtype: torch.dtype, low: Sequence[int], high: Sequence[int], *, layer: int | None
    ) -> torch.Tensor:
        """The box [low, high) of a tensor (of its layer) that lies in one chunk; only the rows that are needed."""
        skip = 0 if layer is None else 1
        offsets, strides = chunk.offsets[skip:], chunk.strides[skip:]
        first = chunk.first + (0 if layer is None else (layer - chunk.offsets[0]) * chunk.strides[0])
        sizes = [end - begin for begin, end in zip(low, high, strict=True)]
        first += sum((b - o) * stride for b, o, stride in zip(low, offsets, strides, strict=True))
        span = sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True)) + 1
        stored = Stored(dtype, (span,), chunk.start + first * dtype.itemsize, span * dtype.itemsize)
        flat = self._files.read(chunk.file, stored, torch.empty(span, dtype=dtype))
        return flat.as_strided(sizes, strides)

    def _place(self, name: str) -> Place:
        module, _, part = name.rpartition(".")
        if not name.startswith("layers."):
            return Place(tuple(f"{theirs}.{part}" for theirs in _OUTSIDE.get(module, ())))
        _, number, rest = name.split(".", 2)
        module, _, part = rest.rpartition(".")
        if module == "mlp.experts":
            names: tuple[str, ...] = (_EXPERTS[part],)
        else:
            names = tuple(f"{theirs}{part}" for theirs in _LAYER.get(module, ()))
        stacked = tuple(found for theirs in names if (found := f"decoder.layers.{theirs}") in self._stored)
        if stacked:
            return Place(stacked, int(number))
        each = tuple(f"decoder.layers.{number}.{theirs}" for theirs in names)  # layers that are not all alike
        return Place(tuple(theirs for theirs in each if theirs in self._stored) or each)

    def _check_names(self) -> None:
        wanted = {name: place.names for name, place in self._places.items()}
        if none := [name for name, names in wanted.items() if not names]:
            raise ConfigError(f"the model has tensors that Megatron's GPT has not: {', '.join(none[:10])}")
        first = {names[0] for names in wanted.values()}
        others = {name for names in wanted.values() for name in names[1:]}
        if self.config.tied_embeddings:
            others.add("output_layer.weight")
        check_names(f"{self.path}: its tensors", first, {name for name in self._stored if name not in others})

    def _check_shape(self, name: str) -> None:
        """A tensor has the elements that the configuration asks for, each in one chunk.

        Raises:
            CheckpointError: it has not.
        """
        place, shape = self._places[name], self.shapes[name]
        theirs = place.names[0]
        _, whole, chunks = self._stored[theirs]
        sizes = whole if place.layer is None else whole[1:]
        if place.layer is not None and whole[0] != self.config.num_layers:
            raise CheckpointError(f"{self.path}: {theirs} has {whole[0]} layers, not {self.config.num_layers}")
        kept = _cut(name, sizes, shape)
        fits = len(kept) == len(sizes) and all(k <= s for k, s in zip(kept, sizes, strict=True))
        if not fits or torch.Size(kept).numel() != torch.Size(shape).numel():
            raise CheckpointError(f"{self.path}: {theirs} has shape {whole}, which makes no {name} of shape {shape}")
        boxes = [(low, high) for _, low, high in _boxes(chunks, place.layer, kept)]
        inside = sum(torch.Size([b - a for a, b in zip(low, high, strict=True)]).numel() for low, high in boxes)
        if inside != torch.Size(kept).numel() or any(_overlap(a, b) for a, b in combinations(boxes, 2)):
            raise CheckpointError(f"{self.path}: the chunks of {theirs} do not make it whole")


def _cut(name: str, sizes: Sequence[int], shape: Sequence[int]) -> tuple[int, ...]:
    """The sizes that are kept: the vocabulary's rows without its padding, else all."""
    return tuple(shape) if name in ("embedding.weight", "output.weight") else tuple(sizes)


def _boxes(
    chunks: Sequence[Chunk], layer: int | None, kept: Sequence[int]
) -> Iterator[tuple[Chunk, tuple[int, ...], tuple[int, ...]]]:
    """Chunks that hold a part of what is kept (of one layer), and which: [low, high)."""
    for chunk in chunks:
        offsets, sizes = chunk.offsets, chunk.sizes
        if layer is not None:
            if not offsets[0] <= layer < offsets[0] + sizes[0]:
                continue
            offsets, sizes = offsets[1:], sizes[1:]
        high = tuple(min(o + s, k) for o, s, k in zip(offsets, sizes, kept, strict=True))
        if all(begin < end for begin, end in zip(offsets, high, strict=True)):
            yield chunk, offsets, high


def _overlap(a: tuple[Sequence[int], Sequence[int]], b: tuple[Sequence[int], Sequence[int]]) -> bool:
    return all(max(p, q) < min(r, s) for p, q, r, s in zip(a[0], b[0], a[1], b[1], strict=True))


def _chunk(entry: Mapping[str, Any]) -> Chunk:
    offsets, sizes, strides = (tuple(entry[key]) for key in ("offsets", "sizes", "strides"))
    return Chunk(entry["file"], offsets, sizes, strides, entry["start"], entry["first"])


def _dtype(name: str) -> torch.dtype:
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name not in known:
        raise CheckpointError(f"weights of the dtype {name} are not imported; known: {', '.join(known)}")
    return known[name]


def _model(
    path: Path, args: Mapping[str, Any] | None, rows: int, given: Path | None, vocab_size: int | None
) -> ModelConfig:
    if given is not None:
        section = load_toml(given).get("model")
        if not isinstance(section, dict):
            raise ConfigError(f"{given}: has no [model] section")
        return build(ModelConfig, section | ({"vocab_size": vocab_size} if vocab_size else {}))
    if args is None:
        raise ConfigError(f"{path}: holds no training arguments; describe the model with --model-config run.toml")
    return config_from_arguments(args, rows, vocab_size)


def from_megatron(
    source: Path | str,
    out: Path | str,
    *,
    model_config: Path | str | None = None,
    vocab_size: int | None = None,
    tokenizer: str | None = None,
    verify: bool = True,
    workers: int = 0,
    say: Callable[[str], Any] = lambda _: None,
) -> Path:
    """Write a Megatron torch_dist checkpoint as a megafp8 checkpoint of weights only, `<out>/step_00000000`.

    The weights become fp32 masters, which hold bf16 and fp16 values exactly. The optimizer's state is not imported.

    Args:
        source: a run's folder, or that of one iteration.
        model_config: a TOML with a [model] section, in the place of the checkpoint's own arguments.
        vocab_size: tokens without padding, where the arguments do not say.
        tokenizer: recorded with the weights; None: whoever trains or exports names it.
        verify: read everything back and compare.
        workers, say: as of `hf.to_hf`.

    Raises:
        CheckpointError: no such checkpoint, damaged, tensors missing, unknown or of wrong shapes.
        ConfigError: a model that we have not, or its arguments do not say enough.
        DataError: the tokenizer cannot be read, or has more tokens than the model.
        ResourceError: `out` holds checkpoints already, no space, no permission.
    """
    out = Path(out)
    if candidates(out):
        raise ResourceError(f"{out}: holds checkpoints already; choose another folder")
    config = Path(model_config) if model_config else None
    model = MegatronFolder(Path(source), model_config=config, vocab_size=vocab_size)
    with model:
        data: dict[str, Any] = {"sequence_length": model.config.max_sequence_length}
        meta: dict[str, Any] = {
            "step": 0, "consumed_samples": 0, "config": {"model": to_dict(model.config), "data": data},
            "source": str(model.path), "fp32_weights": sorted(model.fp32), "tokenizer": None,
            "code_version": __version__,
        }  # fmt: skip
        if tokenizer:
            meta["tokenizer"] = identity(load_tokenizer(tokenizer))
            data["tokenizer"] = str(tokenizer if tokenizer == "bytes" else Path(tokenizer).absolute())
        if model.skipped:
            say(f"{model.path}: {model.skipped} tensors of the optimizer and of training are not imported")
        check = partial(compare, model) if verify else None
        return write_checkpoint(model, out, meta, check=check, workers=workers, say=say)


def compare(source: Source, folder: Path) -> None:
    """Hold what was written against what is read again.

    Raises:
        CheckpointError: a tensor differs.
    """
    names = {stored_name(name): name for name in source.shapes}
    found = set()
    for path in sorted(folder.glob("*.safetensors")):
        with open(path, "rb") as file:
            for name, stored in read_header(path).items():
                written = read_tensor(file.fileno(), stored, torch.empty(stored.shape, dtype=stored.dtype), path)
                ours = names.get(name, "")
                if not ours or not torch.equal(written, source.read(ours, torch.float32)):
                    raise CheckpointError(f"{name} was not written as it was read; please report it")
                found.add(ours)
    check_names("what was written", set(source.shapes), found)
