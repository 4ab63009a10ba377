"""Layout: the one label on every parameter.

It says what the global tensor is, which dim is split over which mesh axis, and over which axes the gradient is
only a partial sum. Optimizer, clip, checkpoint and converters read it and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Protocol

import torch


class AxisSizes(Protocol):
    """What a layout asks of a mesh."""

    def size(self, axis: str) -> int: ...

    def coord(self, axis: str) -> int: ...

    def place(self, axes: tuple[str, ...]) -> tuple[int, int]: ...


@dataclass(frozen=True)
class Layout:
    """Where a rank's piece lies in the global tensor.

    Attributes:
        shape: the global shape.
        split: {dim: axis}; dim `dim` is cut into equal contiguous parts over mesh axis `axis`.
        grad_sum: axes, besides the data-parallel ones, over which ranks hold partial gradients of the same
            element (the norm weights under sequence parallelism: "tp").
        zero_dim: this dim of the piece is cut once more over the replicas (`data_axes`), as ZeRO does with
            optimizer state; torch.chunk's rule, so the last parts may be smaller or empty. None: not cut.
        uneven: dims of `split` that need not divide are cut by torch.chunk's rule too (a vocabulary needs no
            padding then). False: they must divide.
    """

    shape: tuple[int, ...]
    split: Mapping[int, str] = field(default_factory=dict)
    grad_sum: tuple[str, ...] = ()
    zero_dim: int | None = None
    uneven: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "split", MappingProxyType(dict(self.split)))

    @property
    def is_expert(self) -> bool:
        """Whether this belongs to experts, whose replicas are others than those of the dense layers."""
        return "ep" in self.split.values()

    @property
    def data_axes(self) -> tuple[str, ...]:
        """Axes along which replicas of the piece see different data; their gradients are summed."""
        return ("edp",) if self.is_expert else ("dp", "cp")

    @property
    def copy_axes(self) -> tuple[str, ...]:
        """Axes along which ranks hold the same piece; the one at 0 along all of them counts and saves it."""
        split = self.split.values()
        model_axes: tuple[str, ...]
        if self.is_expert:
            model_axes = ("ep", "etp")
        else:
            model_axes = ("kvtp", "kvrep") if "kvtp" in split else ("tp",)
        copies = tuple(axis for axis in model_axes if axis not in split)
        if self.zero_dim is None:
            copies += self.data_axes
        return copies + tuple(axis for axis in self.grad_sum if axis == "embedding")

    def local_shape(self, mesh: AxisSizes) -> tuple[int, ...]:
        """Shape of this rank's piece."""
        return tuple(s.stop - s.start for s in self.local_slices(mesh))

    def local_slices(self, mesh: AxisSizes) -> tuple[slice, ...]:
        """This rank's piece as slices of the global tensor."""
        slices = []
        for dim, size in enumerate(self.shape):
            axis = self.split.get(dim)
            parts, index = (mesh.size(axis), mesh.coord(axis)) if axis else (1, 0)
            assert self.uneven or size % parts == 0, f"dim {dim} of {self.shape} does not divide by {axis} {parts}"
            piece = _chunk(slice(0, size), index, parts)
            slices.append(_chunk(piece, *mesh.place(self.data_axes)) if dim == self.zero_dim else piece)
        return tuple(slices)

    def replicated(self) -> Layout:
        """The same global tensor, whole on every rank."""
        return Layout(self.shape)

    def with_zero(self, dim: int | None) -> Layout:
        """The same piece, cut further along `dim` over the replicas; None: not cut."""
        return replace(self, zero_dim=dim)


def _chunk(piece: slice, index: int, parts: int) -> slice:
    """Part `index` of a piece cut as torch.chunk cuts: parts of equal size, rounded up; the last may be empty."""
    step = -(-(piece.stop - piece.start) // parts)
    return slice(min(piece.start + index * step, piece.stop), min(piece.start + (index + 1) * step, piece.stop))


def stamp(parameter: torch.Tensor, layout: Layout) -> None:
    """Put the label on a parameter (`Tensor.layout` is torch's own, strided or sparse); `layout_of` reads it."""
    parameter.shard_layout = layout  # type: ignore[attr-defined]


def layout_of(parameter: torch.Tensor) -> Layout:
    """The label of a parameter; a tensor without one is whole on every rank."""
    layout = getattr(parameter, "shard_layout", None)
    return layout if layout is not None else Layout(tuple(parameter.shape))
