"""Pieces: how a tensor is cut over its replicas (ZeRO-1), and flat rows in which pieces travel.

A piece is a rectangle of the tensor, so that a checkpoint can describe it and an optimizer can use it as a matrix.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from megafp8.core.layout import Layout, layout_of
from megafp8.parallel.mesh import Mesh

_EVEN_ENOUGH = 16  # parts of so many rows differ by less than 7 % where they do not divide


def zero_dim(shape: Sequence[int], parts: int) -> int | None:
    """The dim along which a tensor of `shape` is cut into `parts` by torch.chunk's rule; None: it stays whole.

    The first dim that divides or gives every part many rows; else the first with a row a part; else the largest.
    """
    if parts == 1 or not shape:
        return None
    for dim, size in enumerate(shape):
        if size and (size % parts == 0 or size >= parts * _EVEN_ENOUGH):
            return dim
    return next((d for d, size in enumerate(shape) if size >= parts), max(range(len(shape)), key=shape.__getitem__))


@dataclass(frozen=True)
class OwnPiece:
    """What a rank updates of a parameter.

    Attributes:
        grad: the piece's gradient, contiguous, once `GradBuckets.finish()` is through.
        layout: of the piece, `zero_dim` set where it is cut.
        dim, start, length: the piece within the rank's part of the parameter; dim None: all of it.
    """

    grad: torch.Tensor
    layout: Layout
    dim: int | None = None
    start: int = 0
    length: int = 0

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The piece of `tensor`, which has the parameter's shape; a view."""
        return tensor if self.dim is None else tensor.narrow(self.dim, self.start, self.length)


def own_piece(param: torch.Tensor) -> OwnPiece:
    """What this rank updates of `param`; all of it where gradient buckets have not cut it."""
    found: OwnPiece | None = getattr(param, "own_piece", None)
    return found or OwnPiece(param.main_grad, layout_of(param))  # type: ignore[attr-defined]


def cut(param: torch.Tensor, grad: torch.Tensor, mesh: Mesh) -> None:
    """Say that this rank updates only its piece of `param`, and that the piece's gradient is `grad`."""
    layout = layout_of(param)
    rank, parts = mesh.place(layout.data_axes)
    dim = zero_dim(param.shape, parts)
    assert dim is not None
    start, stop = piece_span(param.shape[dim], rank, parts)
    param.own_piece = OwnPiece(grad, layout.with_zero(dim), dim, start, stop - start)  # type: ignore[attr-defined]


def piece_span(size: int, index: int, parts: int) -> tuple[int, int]:
    """Where part `index` of `parts` of a dim of `size` begins and ends, by torch.chunk's rule."""
    step = -(-size // parts)
    return min(size, index * step), min(size, (index + 1) * step)


class Packing:
    """Tensors of these shapes, cut for `parts` ranks: `parts` rows of `width` elements, row r with rank r's pieces.

    A tensor begins at the same element of every row, so that one that divides is copied in one go. Where a tensor
    does not divide, later rows have unused elements.
    """

    def __init__(self, shapes: Sequence[tuple[int, ...]], parts: int) -> None:
        self.parts, self.shapes = parts, [tuple(shape) for shape in shapes]
        self.dims: list[int] = []
        self._starts: list[int] = []
        self.width = 0
        for shape in self.shapes:
            dim = zero_dim(shape, parts)
            assert dim is not None, f"{shape} is not cut over {parts}"
            self.dims.append(dim)
            self._starts.append(self.width)
            self.width += torch.Size(self._piece_shape(len(self.dims) - 1, 0)).numel()

    @property
    def in_place(self) -> bool:
        """Whether the rows are the memory of the one tensor itself."""
        return len(self.shapes) == 1 and self.dims[0] == 0 and self.shapes[0][0] % self.parts == 0

    def rows(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """[parts, width] for these tensors, theirs if `in_place`, else new and not filled."""
        if self.in_place:
            return tensors[0].view(self.parts, self.width)
        return tensors[0].new_empty(self.parts, self.width)

    def pack(self, tensors: Sequence[torch.Tensor], rows: torch.Tensor) -> None:
        """Copy all pieces of all tensors into `rows`."""
        if not self.in_place:
            for piece, place in self._pairs(tensors, rows):
                place.copy_(piece)

    def unpack(self, rows: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
        """Copy `rows` back into the tensors."""
        if not self.in_place:
            for piece, place in self._pairs(tensors, rows):
                piece.copy_(place)

    def pieces(self, row: torch.Tensor, rank: int) -> list[torch.Tensor]:
        """The pieces of `rank` as views of its row [width]."""
        shapes = [self._piece_shape(number, rank) for number in range(len(self.shapes))]
        return [_view(row, start, shape) for start, shape in zip(self._starts, shapes, strict=True)]

    def _piece_shape(self, number: int, rank: int) -> tuple[int, ...]:
        shape, dim = self.shapes[number], self.dims[number]
        start, stop = piece_span(shape[dim], rank, self.parts)
        return (*shape[:dim], stop - start, *shape[dim + 1 :])

    def _pairs(
        self, tensors: Sequence[torch.Tensor], rows: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """(view of a tensor, view of its place in `rows`), all pieces of an even tensor as one pair."""
        for number, (tensor, dim, start) in enumerate(zip(tensors, self.dims, self._starts, strict=True)):
            if tensor.shape[dim] % self.parts == 0:
                pieces = tensor.unflatten(dim, (self.parts, tensor.shape[dim] // self.parts)).movedim(dim, 0)
                yield pieces, rows[:, start : start + pieces[0].numel()].view(pieces.shape)
                continue
            for rank in range(self.parts):
                first, last = piece_span(tensor.shape[dim], rank, self.parts)
                piece = tensor.narrow(dim, first, last - first)
                yield piece, _view(rows[rank], start, self._piece_shape(number, rank))


def _view(row: torch.Tensor, start: int, shape: tuple[int, ...]) -> torch.Tensor:
    return row[start : start + torch.Size(shape).numel()].view(shape)
