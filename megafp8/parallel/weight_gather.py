"""WeightGather: ranks' updated pieces of the weights to all replicas, while the next forward pass runs (ZeRO-1)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
import torch.distributed as dist
from torch import nn

from megafp8.parallel.collectives import Pending, start_all_gather_
from megafp8.parallel.mesh import Mesh
from megafp8.parallel.pieces import Packing, own_piece

BUCKET_BYTES = 16 << 20
AHEAD = 4  # buckets under way beyond the one that is needed: bounds the memory


@dataclass(eq=False)
class _Bucket:
    params: list[torch.Tensor]
    masters: list[torch.Tensor]
    packing: Packing
    group: dist.ProcessGroup
    rank: int
    rows: torch.Tensor | None = None
    pending: Pending[torch.Tensor] | None = None


class WeightGather:
    """Parameters that replicas update piece by piece, made whole again.

    `start()` after the pieces have changed; then `wait()`, or let the forward hooks of `attach` wait for what a module
    needs. Buckets go in forward order on every rank, a few ahead of the one that is needed.

    Args:
        pieces: (parameter, its new piece) in forward order; the parameter is one that `pieces.cut` has cut. A piece
            may be of another dtype: it is rounded to the parameter's.

    Attributes:
        events: since `start()`: ("start", bucket) and ("done", bucket) in order.
    """

    def __init__(
        self,
        pieces: Sequence[tuple[torch.Tensor, torch.Tensor]],
        mesh: Mesh,
        *,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self.events: list[tuple[str, int]] = []
        self._buckets = _make_buckets(pieces, mesh, bucket_bytes)
        self._number = {id(p): i for i, bucket in enumerate(self._buckets) for p in bucket.params}
        self._next = self._done = len(self._buckets)

    @torch.no_grad()
    def start(self) -> None:
        """Begin to make the parameters whole; until their bucket is done they must not be used."""
        assert self._done == len(self._buckets), "wait() comes before the next start()"
        self.events.clear()
        self._next = self._done = 0
        for bucket in self._buckets:
            for param in bucket.params:
                param.is_stale = True  # type: ignore[attr-defined]
        self._launch(AHEAD)

    def wait(self) -> None:
        """Finish all."""
        self._finish(range(len(self._buckets)))

    def attach(self, model: nn.Module) -> None:
        """Wait in `model`'s forward pass, before each of its children, for the weights beneath that child.

        A child that is only a list of others stands for them. Weights that a module takes from elsewhere are those of
        the modules in its attribute `borrowed`.
        """
        self._hook(model, model.parameters(recurse=False))
        for child in _called(model):
            borrowed = chain.from_iterable(m.parameters() for m in getattr(child, "borrowed", ()))
            self._hook(child, chain(child.parameters(), borrowed))

    def _hook(self, module: nn.Module, params: Iterable[torch.Tensor]) -> None:
        numbers = sorted({self._number[id(p)] for p in params if id(p) in self._number})
        if numbers:
            module.register_forward_pre_hook(lambda *_: self._finish(numbers))

    @torch.no_grad()
    def _finish(self, numbers: Iterable[int]) -> None:
        if self._done == len(self._buckets):
            return
        for number in numbers:
            self._launch(number + 1 + AHEAD)
            bucket = self._buckets[number]
            if bucket.pending is None:
                continue
            assert bucket.rows is not None
            bucket.pending.wait()
            bucket.packing.unpack(bucket.rows, bucket.params)
            bucket.rows = bucket.pending = None
            for param in bucket.params:
                param.is_stale = False  # type: ignore[attr-defined]
            self._done += 1
            self.events.append(("done", number))

    def _launch(self, end: int) -> None:
        while self._next < min(end, len(self._buckets)):
            bucket = self._buckets[self._next]
            bucket.rows = bucket.packing.rows(bucket.params)
            own = bucket.packing.pieces(bucket.rows[bucket.rank], bucket.rank)
            torch._foreach_copy_(own, bucket.masters)
            self.events.append(("start", self._next))
            bucket.pending = start_all_gather_(bucket.rows, bucket.group)
            self._next += 1


def _called(model: nn.Module) -> Iterator[nn.Module]:
    for child in model.children():
        if type(child).forward is nn.Module.forward:  # a list: nobody calls it
            yield from _called(child)
        else:
            yield child


def _make_buckets(
    pieces: Sequence[tuple[torch.Tensor, torch.Tensor]], mesh: Mesh, bucket_bytes: int
) -> list[_Bucket]:
    kinds: dict[tuple[torch.dtype, tuple[str, ...]], list[list[int]]] = {}
    room: dict[tuple[torch.dtype, tuple[str, ...]], int] = {}
    for position, (param, _) in enumerate(pieces):
        kind = (param.dtype, own_piece(param).layout.data_axes)
        needed, runs = param.numel() * param.itemsize, kinds.setdefault(kind, [])
        large = needed * 8 >= bucket_bytes  # goes alone, mostly without a copy
        if large or room.get(kind, 0) < needed:
            runs.append([])
            room[kind] = bucket_bytes
        runs[-1].append(position)
        room[kind] = 0 if large else room[kind] - needed
    ordered = sorted((run[0], run, axes) for (_, axes), runs in kinds.items() for run in runs)
    return [_fill([pieces[i] for i in run], mesh, axes) for _, run, axes in ordered]


def _fill(members: list[tuple[torch.Tensor, torch.Tensor]], mesh: Mesh, axes: tuple[str, ...]) -> _Bucket:
    params, masters = [p for p, _ in members], [m for _, m in members]
    rank, parts = mesh.place(axes)
    group = mesh.group_of(axes)
    assert group is not None
    return _Bucket(params, masters, Packing([tuple(p.shape) for p in params], parts), group, rank)
