"""Layout: the one label on every parameter.

It says what the global tensor is, which dim is split over which mesh axis, and over which axes the gradient is
only a partial sum. Optimizer, clip, checkpoint and converters read it and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Protocol

import torch


class AxisSizes(Protocol):
    """What a layout asks of a mesh."""

    def size(self, axis: str) -> int: ...

    def coord(self, axis: str) -> int: ...


@dataclass(frozen=True)
class Layout:
    """Where a rank's piece lies in the global tensor.

    Attributes:
        shape: the global shape.
        split: {dim: axis}; dim `dim` is cut into equal contiguous parts over mesh axis `axis`.
        grad_sum: axes, besides the data-parallel ones, over which ranks hold partial gradients of the same
            element (the norm weights under sequence parallelism: "tp").
    """

    shape: tuple[int, ...]
    split: Mapping[int, str] = field(default_factory=dict)
    grad_sum: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "split", MappingProxyType(dict(self.split)))

    def local_shape(self, mesh: AxisSizes) -> tuple[int, ...]:
        """Shape of this rank's piece."""
        return tuple(s.stop - s.start for s in self.local_slices(mesh))

    def local_slices(self, mesh: AxisSizes) -> tuple[slice, ...]:
        """This rank's piece as slices of the global tensor."""
        slices = []
        for dim, size in enumerate(self.shape):
            axis = self.split.get(dim)
            parts, index = (mesh.size(axis), mesh.coord(axis)) if axis else (1, 0)
            assert size % parts == 0, f"dim {dim} of {self.shape} does not divide by {axis} {parts}"
            step = size // parts
            slices.append(slice(index * step, (index + 1) * step))
        return tuple(slices)

    def replicated(self) -> Layout:
        """The same global tensor, whole on every rank."""
        return Layout(self.shape)


def stamp(parameter: torch.Tensor, layout: Layout) -> None:
    """Put the label on a parameter (`Tensor.layout` is torch's own, strided or sparse); `layout_of` reads it."""
    parameter.shard_layout = layout  # type: ignore[attr-defined]


def layout_of(parameter: torch.Tensor) -> Layout:
    """The label of a parameter; a tensor without one is whole on every rank."""
    layout = getattr(parameter, "shard_layout", None)
    return layout if layout is not None else Layout(tuple(parameter.shape))
