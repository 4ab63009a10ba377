"""Zig-zag arithmetic: each token on one rank, in order within a rank, and back again."""

from __future__ import annotations

import pytest
import torch

from megafp8.core.errors import ConfigError
from megafp8.nn.dropout import DropoutKey, hidden_dropout
from megafp8.parallel.context import by_ranks, chunk_order, in_order, local_places, places_of, slice_sequence
from megafp8.parallel.mesh import Mesh
from megafp8.parallel.mesh_config import ParallelConfig, axis_sizes


def mesh_at(cp: int, rank: int, tp: int = 1, sequence_parallel: bool = False) -> Mesh:
    """A mesh without processes: places only."""
    return Mesh(axis_sizes(ParallelConfig(cp=cp, tp=tp), cp * tp), rank, cp * tp, sequence_parallel=sequence_parallel)


@pytest.mark.parametrize("cp", [1, 2, 3, 4])
def test_each_token_is_on_one_rank(cp: int) -> None:
    places = [places_of(24, cp, rank) for rank in range(cp)]
    assert all(torch.equal(own, own.sort().values) and len(own) == 24 // cp for own in places)
    assert torch.equal(torch.cat(places).sort().values, torch.arange(24))
    # causal work: the keys that the rank's queries see, equal on all ranks up to the chunk's own triangle
    assert len({int((own + 1).sum()) for own in places}) == 1


def test_two_ranks_by_hand() -> None:
    assert places_of(8, 2, 0).tolist() == [0, 1, 6, 7]
    assert places_of(8, 2, 1).tolist() == [2, 3, 4, 5]
    assert chunk_order(3) == [0, 5, 1, 4, 2, 3]


@pytest.mark.parametrize("cp", [2, 3])
def test_orders_are_inverse(cp: int) -> None:
    x = torch.arange(2 * 12).view(2, 12)
    parts = [slice_sequence(x, mesh_at(cp, rank), 1) for rank in range(cp)]
    assert torch.equal(torch.cat(parts, 1), by_ranks(x, cp, 1))
    assert torch.equal(in_order(torch.cat(parts, -1), cp, -1), x)


def test_alone_it_is_the_identity() -> None:
    x = torch.ones(2, 7)
    assert slice_sequence(x, Mesh.single(), 1) is x
    assert local_places(7, Mesh.single()) is None


@pytest.mark.parametrize(("length", "nearest"), [(10, "8 or 16"), (5, "8")])
def test_a_length_that_does_not_divide_is_refused(length: int, nearest: str) -> None:
    with pytest.raises(ConfigError, match=f"{length} tokens is not divisible by .* = 8; nearest: {nearest}"):
        places_of(length, 4, 0)


@pytest.mark.parametrize("tp", [1, 2])
def test_hidden_masks_do_not_know_the_ranks(tp: int) -> None:
    cp, key = 2, DropoutKey(3, torch.tensor([4, 9]))
    whole = hidden_dropout(torch.ones(16, 2, 4), 0.5, key, "here", mesh=Mesh.single())
    for rank in range(cp * tp):
        mesh = mesh_at(cp, rank, tp, sequence_parallel=tp > 1)
        places = places_of(16, cp, mesh.coord("cp"))
        rows = places.chunk(tp)[mesh.coord("tp")]
        got = hidden_dropout(torch.ones(16 // (cp * tp), 2, 4), 0.5, key, "here", mesh=mesh, places=places)
        assert torch.equal(got, whole[rows])
    assert 0 < float((whole == 0).float().mean()) < 1
