"""Whole matrices out of pieces over ranks, each on the rank that works on it, and the result back to all that hold it.

Two all-to-alls a wave over all ranks of a pipeline stage: whatever splits or copies a matrix (tp, experts, ZeRO), the
owner has it whole, as one process would.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from megafp8.core.layout import Layout
from megafp8.optim.matrices import Matrix, Share, Window, in_waves, share_out
from megafp8.parallel.collectives import all_to_all
from megafp8.parallel.mesh import Mesh
from megafp8.parallel.mesh_config import coordinates, peers

Tensor = torch.Tensor
# Elements that a rank works on at a time: one all-to-all has a few tens of MB.
WAVE_ELEMENTS = 16 << 20
STAGE_AXES = ("dp", "cp", "tp")
_PLACE_AXES = ("dp", "cp", "tp", "edp", "ep", "etp")


class RankView:
    """The mesh as another rank of it sees it (AxisSizes): what `Layout.local_slices` asks."""

    def __init__(self, mesh: Mesh, rank: int) -> None:
        self._mesh, self._rank = mesh, rank
        self._coords = coordinates(mesh.sizes, rank, mesh.order)
        self._places: dict[tuple[str, ...], tuple[int, int]] = {}

    def size(self, axis: str) -> int:
        return self._mesh.size(axis)

    def coord(self, axis: str) -> int:
        return self._coords[axis]

    def place(self, axes: tuple[str, ...]) -> tuple[int, int]:
        """As Mesh.place."""
        if axes not in self._places:
            ranks = next(r for r in peers(self._mesh.sizes, axes, self._mesh.order) if self._rank in r)
            self._places[axes] = (ranks.index(self._rank), len(ranks))
        return self._places[axes]


class _Job(NamedTuple):
    """A window that travels: of piece `name`, or of this rank's matrix number `mine`.

    Attributes:
        local: its index in the piece or the matrix.
    """

    name: str
    mine: int
    window: Window
    local: tuple[Any, slice]


class _Wave(NamedTuple):
    """Lists by peer: windows to owners and from holders, and back."""

    mine: list[Matrix]
    to_owner: list[list[_Job]]
    from_holder: list[list[_Job]]
    to_holder: list[list[_Job]]
    from_owner: list[list[_Job]]


class MatrixExchange:
    """Applies a function of whole matrices to pieces.

    Args:
        matrices: of the parameters in `layouts`, all ranks of a pipeline stage the same ones.
        layouts: of the pieces, by parameter.
        mesh: all ranks of a pipeline stage take part.
        device: where the pieces are.

    Attributes:
        windows: every matrix of which this rank holds a part, and which.
        costs: of each rank of the stage, in rank order (`Matrix.cost`).
    """

    def __init__(
        self, matrices: Sequence[Matrix], layouts: Mapping[str, Layout], mesh: Mesh, device: torch.device
    ) -> None:
        stage = next(ranks for ranks in peers(mesh.sizes, STAGE_AXES, mesh.order) if mesh.rank in ranks)
        views = [RankView(mesh, rank) for rank in stage]
        self._group, self._device = mesh.group_of(STAGE_AXES), device
        self._me, self._places = stage.index(mesh.rank), [tuple(v.coord(a) for a in _PLACE_AXES) for v in views]
        shares = share_out(matrices, layouts, views)
        self.costs = [sum(s.matrix.cost for s in shares if s.owner == number) for number in range(len(stage))]
        self.windows: list[tuple[Matrix, Window]] = []
        self._waves = [self._plan(wave) for wave in in_waves(shares, len(stage), WAVE_ELEMENTS)]

    def apply(self, pieces: Mapping[str, Tensor], function: Callable[[list[Tensor]], list[Tensor]]) -> None:
        """Overwrite `pieces` (local, contiguous, one dtype) by the windows of function(whole matrices); collective."""
        for wave in self._waves:
            self._run(wave, pieces, function)

    def _run(self, wave: _Wave, pieces: Mapping[str, Tensor], function: Callable[[list[Tensor]], list[Tensor]]) -> None:
        like = next(iter(pieces.values()))
        whole = [like.new_empty(matrix.shape) for matrix in wave.mine]

        def at_holder(job: _Job) -> tuple[Tensor, Any]:
            return pieces[job.name][job.window.lead], job.local

        def at_owner(job: _Job) -> tuple[Tensor, Any]:
            return whole[job.mine], job.local

        self._exchange(wave.to_owner, at_holder, wave.from_holder, at_owner, like)
        whole = function(whole)
        self._exchange(wave.to_holder, at_owner, wave.from_owner, at_holder, like)

    def _exchange(
        self,
        sent: list[list[_Job]],
        source: Callable[[_Job], tuple[Tensor, Any]],
        received: list[list[_Job]],
        target: Callable[[_Job], tuple[Tensor, Any]],
        like: Tensor,
    ) -> None:
        parts = []
        for jobs in sent:
            for job in jobs:
                tensor, index = source(job)
                parts.append(tensor[index].reshape(-1))
        flat = torch.cat(parts) if parts else like.new_empty(0)
        sizes = [[sum(job.window.numel for job in jobs) for jobs in lists] for lists in (sent, received)]
        arrived = all_to_all(flat, self._group, *sizes)
        start = 0
        for jobs in received:
            for job in jobs:
                tensor, index = target(job)
                tensor[index] = arrived[start : start + job.window.numel].view(job.window.shape)
                start += job.window.numel

    def _plan(self, wave: Sequence[Share]) -> _Wave:
        count = len(self._places)
        lists: list[list[list[_Job]]] = [[[] for _ in range(count)] for _ in range(4)]
        to_owner, from_holder, to_holder, from_owner = lists
        mine: list[Matrix] = []
        for share in wave:
            name, sources = share.matrix.name, share.sources(self._places)
            own = share.windows.get(self._me)
            if own is not None:
                self.windows.append((share.matrix, own))
                job = _Job(name, -1, own, self._index(own))
                from_owner[share.owner].append(job)
                if self._me in sources:
                    to_owner[share.owner].append(job)
            if share.owner != self._me:
                continue
            for rank, held in share.windows.items():
                job = _Job(name, len(mine), held, (held.rows, held.columns))
                to_holder[rank].append(job)
                if rank in sources:
                    from_holder[rank].append(job)
            mine.append(share.matrix)
        return _Wave(mine, to_owner, from_holder, to_holder, from_owner)

    def _index(self, window: Window) -> tuple[Any, slice]:
        rows = window.local_rows
        return (rows if isinstance(rows, slice) else torch.tensor(rows, device=self._device)), window.local_columns
