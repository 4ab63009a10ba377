"""core/rng and core/layout: no value depends on the number of ranks."""

from __future__ import annotations

import math

import pytest
import torch

from megafp8.core.layout import Layout
from megafp8.core.rng import fill_normal_, hash_at, normal_at, seed_for, uniform_at


class Axis:
    """A mesh of one axis, as seen from one rank."""

    def __init__(self, size: int, coord: int) -> None:
        self._size, self._coord = size, coord

    def size(self, axis: str) -> int:
        return self._size

    def coord(self, axis: str) -> int:
        return self._coord

    def place(self, axes: tuple[str, ...]) -> tuple[int, int]:
        return self._coord, self._size


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("parts", [2, 4])
def test_pieces_equal_the_whole(dim, parts):
    layout = Layout((64, 48), {dim: "tp"})
    whole = fill_normal_(torch.empty(64, 48), seed=5, layout=layout, mesh=Axis(1, 0), std=0.02)
    pieces = []
    for mesh in (Axis(parts, coord) for coord in range(parts)):
        piece = torch.empty(layout.local_shape(mesh))
        pieces.append(fill_normal_(piece, seed=5, layout=layout, mesh=mesh, std=0.02))
    assert torch.equal(torch.cat(pieces, dim), whole)


def test_normals_have_the_right_moments():
    n = 1_000_000
    layout = Layout((n,))
    x = fill_normal_(torch.empty(n), seed=seed_for(1, "w"), layout=layout, mesh=Axis(1, 0), std=1.0).double()
    # five standard errors: mean 1/sqrt(n), variance sqrt(2/n), fourth moment sqrt(96/n)
    assert abs(x.mean()) < 5 / math.sqrt(n)
    assert abs(x.var() - 1) < 5 * math.sqrt(2 / n)
    assert abs((x**4).mean() - 3) < 5 * math.sqrt(96 / n)
    assert abs((x[1:] * x[:-1]).mean()) < 5 / math.sqrt(n)


def test_uniforms_and_hash():
    index = torch.arange(100_000)
    u = uniform_at(7, index)
    assert u.dtype == torch.float32 and u.min() >= 0 and u.max() < 1
    assert abs(u.double().mean() - 0.5) < 5 * math.sqrt(1 / 12 / u.numel())
    assert len(torch.unique(hash_at(7, index))) == index.numel()
    assert not torch.equal(uniform_at(8, index), u)


def test_seeds_differ_by_every_name():
    seeds = {seed_for(s, n, k) for s in (1, 2) for n in ("a", "b") for k in (0, 1)}
    assert len(seeds) == 8 and seed_for(1, "a", 0) == seed_for(1, "a", 0)
    assert seed_for(1, "ab", "c") != seed_for(1, "a", "bc")
    assert all(0 <= s < 1 << 63 for s in seeds)


def test_a_dim_that_does_not_divide_is_a_programmers_error():
    with pytest.raises(AssertionError, match="does not divide"):
        Layout((10,), {0: "tp"}).local_slices(Axis(4, 0))


def test_a_large_piece_is_drawn_in_parts_with_the_same_values():
    layout = Layout((700, 3000))  # many chunks of elements, not a multiple of it
    whole = fill_normal_(torch.empty(700, 3000), seed=9, layout=layout, mesh=Axis(1, 0), std=1.0)
    index = torch.arange(700 * 3000).view(700, 3000)
    assert torch.equal(whole, normal_at(9, index))


@pytest.mark.parametrize("size, parts", [(8, 4), (7, 4), (5, 4), (3, 4), (9, 2)])
def test_zero_pieces_are_cut_as_torch_chunks(size, parts):
    whole = torch.arange(size * 2).view(size, 2)
    layout = Layout((size, 2), zero_dim=0)
    pieces = [whole[layout.local_slices(Axis(parts, coord))] for coord in range(parts)]
    expected = whole.chunk(parts)
    assert all(torch.equal(piece, part) for piece, part in zip(pieces, expected))
    assert all(piece.numel() == 0 for piece in pieces[len(expected) :])


def test_who_holds_copies_follows_from_the_label():
    assert Layout((4, 4), {0: "tp"}).copy_axes == ("dp", "cp")
    assert Layout((4,), grad_sum=("tp",)).copy_axes == ("tp", "dp", "cp")
    assert Layout((4, 4), {0: "kvtp"}, grad_sum=("kvrep",)).copy_axes == ("kvrep", "dp", "cp")
    assert Layout((4, 4), {0: "tp"}, grad_sum=("embedding",)).copy_axes == ("dp", "cp", "embedding")
    assert Layout((4, 4, 4), {0: "ep", 1: "etp"}).copy_axes == ("edp",)
    assert Layout((4, 4, 4), {0: "ep"}).copy_axes == ("etp", "edp")
    assert Layout((4, 4), {0: "tp"}).with_zero(1).copy_axes == ()
