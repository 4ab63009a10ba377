"""What two checkpoints have in common and what not: names, dtypes, shapes, values, meta."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megafp8.checkpoint.folders import check
from megafp8.checkpoint.manifest import TensorEntry
from megafp8.checkpoint.storage_reader import PieceReader


@dataclass(frozen=True)
class TensorDifference:
    """A tensor that two checkpoints both have, with other values.

    Attributes:
        differing, elements: how many of how many elements differ in their bits; -1: not compared, the shapes differ.
        largest: the largest absolute difference of two finite values.
        relative: Euclidean norm of the difference over that of the first; inf where only one is finite.
        what: dtypes or shapes where they differ, in words.
    """

    name: str
    differing: int = -1
    elements: int = 0
    largest: float = math.nan
    relative: float = math.nan
    what: str = ""


@dataclass(frozen=True)
class Difference:
    """What `compare` found. `equal` is the number of tensors whose values are the same bit for bit."""

    equal: int
    tensors: tuple[TensorDifference, ...]
    first_only: tuple[str, ...]
    second_only: tuple[str, ...]
    meta: dict[str, tuple[Any, Any]]

    @property
    def same(self) -> bool:
        """Whether both hold the same tensors with the same values; `meta` does not count."""
        return not (self.tensors or self.first_only or self.second_only)


def compare(first: Path, second: Path) -> Difference:
    """Compare two checkpoint folders, a tensor at a time in memory, each read only where checksums do not tell.

    Tensors that are cut alike are equal if their pieces' checksums are; others are put together and compared, and every
    byte read has passed its checksum.

    Raises:
        CheckpointError: one is missing or damaged.
    """
    one, other = check(first), check(second)
    both = sorted(one.tensors.keys() & other.tensors.keys())
    with PieceReader(first, one) as a, PieceReader(second, other) as b:
        found = [_tensor(name, a, b) for name in both]
    differing = tuple(difference for difference in found if difference is not None)
    return Difference(
        len(both) - len(differing),
        differing,
        tuple(sorted(one.tensors.keys() - other.tensors.keys())),
        tuple(sorted(other.tensors.keys() - one.tensors.keys())),
        dict(_meta({"step": one.step, **one.meta}, {"step": other.step, **other.meta})),
    )


def _tensor(name: str, first: PieceReader, second: PieceReader) -> TensorDifference | None:
    a, b = first.manifest.tensors[name], second.manifest.tensors[name]
    if a.shape != b.shape:
        return TensorDifference(name, what=f"{_kind(a)} and {_kind(b)}")
    if a.dtype == b.dtype and _checksums(a) == _checksums(b):
        return None
    return difference(name, first.read_tensor(name), second.read_tensor(name))


def _kind(entry: TensorEntry) -> str:
    return f"{entry.dtype} {' x '.join(map(str, entry.shape)) or 'scalar'}"


def _checksums(entry: TensorEntry) -> list[tuple[Any, ...]]:
    return sorted((piece.offsets, piece.sizes, piece.checksum) for piece in entry.pieces)


def difference(name: str, a: torch.Tensor, b: torch.Tensor) -> TensorDifference | None:
    """How `b` differs from `a`, of one shape; None if not in any bit (dtypes alike) or value (else)."""
    what = "" if a.dtype == b.dtype else f"{a.dtype} and {b.dtype}".replace("torch.", "")
    wide = torch.float64 if a.is_floating_point() or b.is_floating_point() else torch.int64
    x, y = a.to(wide), b.to(wide)
    unlike = (x != y) & ~(x.isnan() & y.isnan())
    if not what:  # -0 and 0, or NaNs of other payloads, are other bits
        unlike |= (_bits(a) != _bits(b)).any(-1).reshape(a.shape)
    count = int(unlike.sum())
    if not count and not what:
        return None
    finite = x.isfinite() & y.isfinite()
    apart = torch.where(finite, x - y, torch.zeros_like(x)).double()
    norm = float(torch.where(finite, x, torch.zeros_like(x)).double().norm())
    relative = math.inf if bool((unlike & ~finite).any()) else float(apart.norm()) / norm if norm else float(count > 0)
    return TensorDifference(name, count, a.numel(), float(apart.abs().max()) if a.numel() else 0.0, relative, what)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1, 1).view(torch.uint8)


def _meta(a: Mapping[str, Any], b: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, tuple[Any, Any]]]:
    for key in sorted({*a, *b}):
        x, y = a.get(key), b.get(key)
        if isinstance(x, Mapping) and isinstance(y, Mapping):
            yield from _meta(x, y, f"{prefix}{key}.")
        elif x != y:
            yield f"{prefix}{key}", (x, y)
