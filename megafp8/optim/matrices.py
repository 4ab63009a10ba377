"""The hidden matrices of a model, where each lies over the ranks, and which rank works on it. Arithmetic only.

A matrix is one linear map: one expert's gate, the queries of qkv. It may be a part of a parameter, and a rank may hold
a window of it, or the same window as other ranks.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

from megafp8.core.layout import AxisSizes, Layout


@dataclass(frozen=True)
class Matrix:
    """One linear map within parameter `name`.

    Attributes:
        lead: its place along all dims but the last two (experts; gate and up).
        rows: its rows of the last dim but one, ascending.
        num_columns: all of the last dim.
    """

    name: str
    lead: tuple[int, ...]
    rows: Sequence[int]
    num_columns: int

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.rows), self.num_columns

    @property
    def cost(self) -> int:
        """Multiplications of a Newton-Schulz step, up to a factor: two products with the smaller side squared."""
        small, large = sorted(self.shape)
        return small * small * (2 * large + small)


class Window(NamedTuple):
    """What a rank holds of a matrix.

    Attributes:
        rows, columns: of the matrix.
        lead: index into all dims but the last two of the rank's piece.
        local_rows: index into the piece's rows; a slice where they follow each other.
        local_columns: slice of the piece's columns.
    """

    rows: slice
    columns: slice
    lead: tuple[int, ...]
    local_rows: slice | list[int]
    local_columns: slice

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows.stop - self.rows.start, self.columns.stop - self.columns.start

    @property
    def numel(self) -> int:
        return self.shape[0] * self.shape[1]


def is_hidden_matrix(name: str, layout: Layout) -> bool:
    """Whether Muon takes this parameter: the maps inside the layers.

    Not the embeddings and the output layer, norms, biases, or a router (Jordan et al. 2024; Moonlight, 2.2).
    """
    module, _, last = name.rpartition(".")
    if not name.startswith("layers.") or len(layout.shape) < 2 or last.endswith("bias"):
        return False
    return not module.endswith(("norm", "router"))


def matrices_of(name: str, shape: tuple[int, ...], parts: Sequence[int] = ()) -> list[Matrix]:
    """The maps in a parameter: one for each place along the leading dims and each of `parts`.

    `parts` are heights of rows, repeated to the last row (the first part's map has the first rows of every repetition).
    """
    *lead, num_rows, num_columns = shape
    parts = tuple(parts) or (num_rows,)
    period = sum(parts)
    assert num_rows % period == 0, f"{name}: {num_rows} rows are not repetitions of {parts}"
    found = []
    for place in product(*(range(size) for size in lead)):
        start = 0
        for height in parts:
            rows: Sequence[int] = range(start, start + height)
            if period < num_rows:
                rows = tuple(top + i for top in range(start, num_rows, period) for i in range(height))
            found.append(Matrix(name, tuple(place), rows, num_columns))
            start += height
    return found


def window(matrix: Matrix, piece: tuple[slice, ...]) -> Window | None:
    """What a rank holds of `matrix` whose piece of the parameter is this; None: nothing."""
    *lead, rows, columns = piece
    if any(not cut.start <= at < cut.stop for at, cut in zip(matrix.lead, lead, strict=True)):
        return None
    first, last = bisect_left(matrix.rows, rows.start), bisect_left(matrix.rows, rows.stop)
    if first == last or columns.start == columns.stop:
        return None
    local = matrix.rows[first:last]
    together = local[-1] - local[0] == len(local) - 1
    return Window(
        slice(first, last),
        slice(columns.start, columns.stop),
        tuple(at - cut.start for at, cut in zip(matrix.lead, lead, strict=True)),
        slice(local[0] - rows.start, local[-1] + 1 - rows.start) if together else [row - rows.start for row in local],
        slice(0, columns.stop - columns.start),
    )


class Share(NamedTuple):
    """A matrix, the rank (number in the list of ranks) that works on it, and what each rank holds of it."""

    matrix: Matrix
    owner: int
    windows: Mapping[int, Window]

    def sources(self, places: Sequence[tuple[int, ...]]) -> list[int]:
        """One rank for each distinct window: the owner itself, or the one whose `places` are most like the owner's."""
        holders: dict[tuple[int, int], list[int]] = {}
        for rank, held in self.windows.items():
            holders.setdefault((held.rows.start, held.columns.start), []).append(rank)
        mine = places[self.owner]

        def alike(rank: int) -> tuple[bool, int, int]:
            return rank == self.owner, sum(a == b for a, b in zip(places[rank], mine, strict=True)), -rank

        return sorted(max(ranks, key=alike) for ranks in holders.values())


def share_out(matrices: Sequence[Matrix], layouts: Mapping[str, Layout], ranks: Sequence[AxisSizes]) -> list[Share]:
    """Give every matrix to one of the ranks that hold a part of it, the costly ones first, each to the least busy."""
    pieces = {name: [layout.local_slices(rank) for rank in ranks] for name, layout in layouts.items()}
    load = [0] * len(ranks)
    shares = []
    for matrix in sorted(matrices, key=lambda m: (-m.cost, m.name, m.lead, m.rows[0])):
        found = ((number, window(matrix, piece)) for number, piece in enumerate(pieces[matrix.name]))
        windows = {number: held for number, held in found if held is not None}
        owner = min(windows, key=lambda number: (load[number], number))
        load[owner] += matrix.cost
        shares.append(Share(matrix, owner, windows))
    return shares


def in_waves(shares: Sequence[Share], num_ranks: int, largest: int) -> list[list[Share]]:
    """Cut the work so that no rank has more than `largest` elements (or one matrix) at a time."""
    waves: list[list[Share]] = []
    held: list[list[int]] = []
    current = [0] * num_ranks  # the wave that each rank is filling
    for share in shares:
        size, owner = share.matrix.shape[0] * share.matrix.shape[1], share.owner
        while current[owner] < len(waves) and held[current[owner]][owner] + size > largest:
            if held[current[owner]][owner] == 0:
                break
            current[owner] += 1
        if current[owner] == len(waves):
            waves.append([])
            held.append([0] * num_ranks)
        waves[current[owner]].append(share)
        held[current[owner]][owner] += size
    return waves
