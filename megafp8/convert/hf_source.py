"""A Hugging Face folder as a source of whole tensors by our names, for a run that begins from it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch

from megafp8.convert.hf_files import read_config, read_weights
from megafp8.infer.weights import check_weights
from megafp8.models import ModelConfig
from megafp8.models.names import config_from_hf, from_hf_tensors


class HuggingFaceSource:
    """The tensors of a folder, read together."""

    def __init__(self, path: Path) -> None:
        self.config: ModelConfig = config_from_hf(read_config(path))
        self._tensors = from_hf_tensors(self.config, read_weights(path))
        check_weights(self.config, self._tensors)
        self.shapes: Mapping[str, tuple[int, ...]] = {n: tuple(t.shape) for n, t in self._tensors.items()}

    def read(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A whole tensor by our name, in `dtype` (None: as stored)."""
        return self._tensors[name].to(dtype)


@contextmanager
def open_source(path: Path) -> Iterator[HuggingFaceSource]:
    """Open a folder.

    Raises:
        CheckpointError, ConfigError: as `from_hf`.
    """
    yield HuggingFaceSource(path)
