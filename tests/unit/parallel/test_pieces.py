"""Cutting tensors over replicas: rectangles that tile the tensor, and rows that bring every element back."""

from __future__ import annotations

import pytest
import torch

from megafp8.core.layout import Layout
from megafp8.parallel.pieces import Packing, zero_dim

SHAPES = [(503, 67), (8, 6), (2, 37, 5), (7,), (3,), (1, 2, 9), (5, 4), (67,)]


class Replica:
    """A mesh of data-parallel ranks only."""

    def __init__(self, rank: int, parts: int) -> None:
        self.rank, self.parts = rank, parts

    def size(self, axis: str) -> int:
        return self.parts if axis == "dp" else 1

    def coord(self, axis: str) -> int:
        return self.rank if axis == "dp" else 0

    def place(self, axes: tuple[str, ...]) -> tuple[int, int]:
        return self.rank, self.parts


@pytest.mark.parametrize(
    ("shape", "parts", "dim"),
    [
        ((8, 6), 2, 0),  # divides
        ((2, 37, 8), 4, 2),  # the first dim that divides; [2] has no row for everyone
        ((503, 64), 4, 0),  # does not divide, but 126, 126, 126, 125 is even enough to keep rows whole
        ((5, 7), 4, 0),  # nothing divides: a row for everyone
        ((2, 3), 4, 1),  # too small: the largest
        ((3,), 4, 0),
        ((), 4, None),
        ((8, 6), 1, None),
    ],
)
def test_where_a_tensor_is_cut(shape, parts, dim):
    assert zero_dim(shape, parts) == dim


@pytest.mark.parametrize("parts", [2, 3, 4, 8])
def test_rows_bring_every_element_back(parts):
    tensors = [torch.arange(torch.Size(s).numel()).float().reshape(s) + 1000 * i for i, s in enumerate(SHAPES)]
    packing = Packing(SHAPES, parts)
    rows = packing.rows(tensors)
    packing.pack(tensors, rows)
    for rank in range(parts):
        for tensor, dim, piece in zip(tensors, packing.dims, packing.pieces(rows[rank], rank)):
            # the piece is what the label says that it is
            label = Layout(tuple(tensor.shape)).with_zero(dim)
            assert torch.equal(piece, tensor[label.local_slices(Replica(rank, parts))])
            assert piece.is_contiguous()
    back = [torch.full_like(t, -1) for t in tensors]
    packing.unpack(rows, back)
    assert all(torch.equal(a, b) for a, b in zip(tensors, back))


def test_one_even_tensor_travels_without_a_copy():
    tensor = torch.arange(24.0).reshape(4, 6)
    packing = Packing([(4, 6)], 2)
    rows = packing.rows([tensor])
    assert packing.in_place and rows.data_ptr() == tensor.data_ptr()
    assert torch.equal(packing.pieces(rows[1], 1)[0], tensor[2:])
    assert not Packing([(5, 6)], 2).in_place and not Packing([(4, 6), (2,)], 2).in_place
