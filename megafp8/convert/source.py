"""What is converted: whole tensors by our names, one at a time, from our checkpoint or a Hugging Face folder."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

from megafp8.checkpoint import TensorReader, find
from megafp8.checkpoint.manifest import MANIFEST_NAME
from megafp8.convert.hf_files import list_weights, read_config
from megafp8.convert.tensor_files import OpenFiles
from megafp8.core.errors import CheckpointError
from megafp8.core.jsonio import sha256_file
from megafp8.infer.weights import BALANCE, MASTER, check_shapes, model_config, tokenizer_path, weight_shapes
from megafp8.models import ModelConfig
from megafp8.models.families.rules import Rule
from megafp8.models.names import (
    VIEWS,
    check_names,
    config_from_hf,
    foreign_names,
    is_ignored,
    join,
    resolved_rules,
    split,
)


class Source(ABC):
    """A model whose tensors are read one at a time; any thread may read.

    Attributes:
        path: where it is.
        config: its model section, without what only training uses (a capacity that drops tokens).
        fingerprint: changes whenever its content does.
        shapes: {our name: whole shape}; exactly what the config asks for.
        dtypes: {our name: stored dtype}.
        fp32: tensors that stay fp32 among 16-bit ones, since the folder that the model came from has them so.
        add_bos: whether documents began with the begin id in training; None: not known, its tokenizer's rule holds.
    """

    path: Path
    config: ModelConfig
    fingerprint: str
    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, torch.dtype]
    fp32: frozenset[str] = frozenset()
    add_bos: bool | None = None

    def __enter__(self) -> Source:
        return self

    @abstractmethod
    def __exit__(self, *_: object) -> None: ...

    @abstractmethod
    def read(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A whole tensor on the CPU, in `dtype` (None: as stored; routers' biases always are)."""

    def written_dtype(self, name: str, dtype: torch.dtype) -> torch.dtype:
        """In which dtype a tensor is written where the model is written in `dtype`."""
        return torch.float32 if unrounded(name) or name in self.fp32 else dtype

    def memory(self, name: str, dtype: torch.dtype | None = None) -> int:
        """Bytes that are held while a tensor is read in `dtype`."""
        return torch.Size(self.shapes[name]).numel() * (dtype or self.dtypes[name]).itemsize

    @abstractmethod
    def tokenizer(self, given: str | Path | None = None) -> str:
        """Where its tokenizer is; `given`, if it has moved."""


def open_source(path: Path | str) -> Source:
    """Open a checkpoint, the newest one of a run, or a Hugging Face folder of unquantized weights.

    Raises:
        CheckpointError: none of these, damaged, or its tensors are not those of its configuration (all listed).
        ConfigError: a model that no family of ours serves.
    """
    path = Path(path)
    if (path / "config.json").is_file() and not (path / MANIFEST_NAME).exists():
        return HuggingFaceFolder(path)
    return Checkpoint(find(path))


def unrounded(name: str) -> bool:
    """Whether one of our tensors keeps its dtype whatever the others are rounded to: it decides choices."""
    return name.endswith(".router.bias")


class Checkpoint(Source):
    """One of our checkpoints: its fp32 masters; every byte that is read has passed its checksum."""

    def __init__(self, path: Path) -> None:
        self.path = path
        config = model_config(path)
        self.config = replace(config, moe=replace(config.moe, capacity_factor=0.0))
        self.fingerprint = sha256_file(path / MANIFEST_NAME)
        self._tensors = TensorReader(path)
        self.fp32 = frozenset(self._tensors.meta.get("fp32_weights", ()))
        self.add_bos = (self._tensors.meta.get("tokenizer") or {}).get("add_bos")
        self._stored = {
            name.removeprefix(prefix): name
            for prefix in (MASTER, BALANCE)
            for name in self._tensors.shapes
            if name.startswith(prefix)
        }
        if not self._stored:
            raise CheckpointError(f"{path}: holds no weights ({MASTER}*); it was not written by a run")
        self.shapes = {name: self._tensors.shapes[stored] for name, stored in self._stored.items()}
        self.dtypes = {name: self._tensors.dtypes[stored] for name, stored in self._stored.items()}
        check_shapes(weight_shapes(self.config), self.shapes)

    def __exit__(self, *_: object) -> None:
        self._tensors.__exit__()

    def read(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A whole tensor on the CPU, in `dtype` (None: as stored), rounded once, to nearest even.

        Raises:
            CheckpointError: its bytes are damaged; names the file.
        """
        return self._tensors.read(self._stored[name], None if unrounded(name) else dtype)

    def tokenizer(self, given: str | Path | None = None) -> str:
        """Where its tokenizer is.

        Raises:
            DataError: it is missing, or another one than the model was trained with.
        """
        return tokenizer_path(self.path, given)


class HuggingFaceFolder(Source):
    """A Hugging Face folder of safetensors in bf16, fp16 or fp32; its tensors are joined under our names when read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = config_from_hf(read_config(path))
        listed = list_weights(path)
        self._stored = {name: place for name, place in listed.items() if not is_ignored(self.config, name)}
        check_names(f"{path}: its tensors", foreign_names(self.config), self._stored)
        self._rules = {rule.ours: rule for rule in resolved_rules(self.config)}
        self.shapes = {name: self._shape(rule) for name, rule in self._rules.items()}
        self.dtypes = {name: self._dtype(rule) for name, rule in self._rules.items()}
        if self.dtypes["embedding.weight"] != torch.float32:
            self.fp32 = frozenset(name for name, dtype in self.dtypes.items() if dtype == torch.float32)
        check_shapes(weight_shapes(self.config), self.shapes)
        self.fingerprint = self._fingerprint()
        self._files = OpenFiles(path)

    def _fingerprint(self) -> str:
        """Of names, sizes and times of its files: to hash the weights would cost as much as to convert them."""
        names = {file for file, _ in self._stored.values()} | {"config.json"}
        stats = {name: (self.path / name).stat() for name in sorted(names)}
        return repr([(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats.items()])

    def __exit__(self, *_: object) -> None:
        self._files.close()

    def read(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A whole tensor on the CPU by our name, in `dtype` (None: as stored).

        Raises:
            CheckpointError: its file is cut short or cannot be read.
        """
        rule = self._rules[name]
        dtype = (dtype if not unrounded(name) else torch.float32) or self.dtypes[name]
        if rule.kind in VIEWS:
            whole = torch.empty(self.shapes[name], dtype=dtype)
            for theirs, part in zip(rule.theirs, split(self.config, rule, whole), strict=True):
                self._read(theirs, part)
            return whole
        empty = [torch.empty(self._stored[theirs][1].shape, dtype=dtype) for theirs in rule.theirs]
        return join(self.config, rule, list(map(self._read, rule.theirs, empty)))

    def memory(self, name: str, dtype: torch.dtype | None = None) -> int:
        """Bytes held while a tensor is read: twice its own where its parts do not lie in it as they are."""
        return super().memory(name, dtype) * (1 if self._rules[name].kind in VIEWS else 2)

    def tokenizer(self, given: str | Path | None = None) -> str:
        """The folder itself holds it."""
        return str(given or self.path)

    def _read(self, name: str, out: torch.Tensor) -> torch.Tensor:
        file, stored = self._stored[name]
        return self._files.read(file, stored, out)

    def _shape(self, rule: Rule) -> tuple[int, ...]:
        shapes = [self._stored[name][1].shape for name in rule.theirs]
        alike = rule.kind not in ("stack", "stack_pairs") or len(set(shapes)) == 1  # else one would be spread over all
        try:
            if alike:
                return tuple(join(self.config, rule, [torch.empty(shape, device="meta") for shape in shapes]).shape)
        except (RuntimeError, IndexError):
            pass
        found = ", ".join(f"{name} {shape}" for name, shape in zip(rule.theirs, shapes, strict=True))
        raise CheckpointError(f"{self.path}: these make no {rule.ours} of this configuration: {found}")

    def _dtype(self, rule: Rule) -> torch.dtype:
        dtypes = {self._stored[name][1].dtype for name in rule.theirs}
        return dtypes.pop() if len(dtypes) == 1 else torch.float32
