"""WeightGather: ranks' updated pieces of the weights to all replicas, while the next forward pass runs (ZeRO-1).

A weight travels in its own dtype, or as bytes that whoever uses it understands (`Coded`): FP8 codes and their scales.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from math import prod
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import nn

from megafp8.parallel.collectives import Pending, all_reduce_, start_all_gather_
from megafp8.parallel.mesh import Mesh
from megafp8.parallel.pieces import Packing, own_piece

Tensor = torch.Tensor

BUCKET_BYTES = 16 << 20
AHEAD = 4  # buckets under way beyond the one that is needed: bounds the memory


class Coded(Protocol):
    """A weight whose pieces travel as bytes: `amaxes`, `encode` on every replica, the gather, `take`."""

    @property
    def shapes(self) -> Sequence[tuple[int, ...]]:
        """Of the whole weight's byte tensors; each is cut over the replicas by `pieces.zero_dim`."""
        ...

    def amaxes(self, piece: Tensor) -> Tensor:
        """What replicas must agree on before they encode: magnitudes fp32 [any number], the largest of which counts."""
        ...

    def encode(self, piece: Tensor, amaxes: Tensor, out: Sequence[Tensor]) -> None:
        """Write the bytes of `piece` (its new values) into its parts of the byte tensors; `amaxes` of all replicas."""
        ...

    @property
    def outdated(self) -> bool:
        """Whether the bytes that were made last are not what would be made now of the same values."""
        ...

    def take(self, whole: Sequence[Tensor]) -> None:
        """Here are the byte tensors of the whole weight."""
        ...


class Piece(NamedTuple):
    """A parameter that `pieces.cut` has cut, its new piece, and how it travels; None: rounded to its dtype."""

    param: Tensor
    master: Tensor
    coded: Coded | None = None


class _Content(Protocol):
    """What a bucket carries: `whole` is memory for it, `fill` writes this rank's pieces, `done` hands it on."""

    params: list[Tensor]

    def whole(self) -> list[Tensor]: ...

    def fill(self, own: list[Tensor]) -> None: ...

    def done(self, whole: list[Tensor]) -> None: ...


@dataclass(eq=False)
class _Values:
    params: list[Tensor]
    masters: list[Tensor]

    def whole(self) -> list[Tensor]:
        return self.params

    def fill(self, own: list[Tensor]) -> None:
        torch._foreach_copy_(own, self.masters)

    def done(self, whole: list[Tensor]) -> None:
        """They are in their place."""


@dataclass(eq=False)
class _Codes:
    params: list[Tensor]
    masters: list[Tensor]
    coded: list[Coded]
    amaxes: list[Tensor]

    def whole(self) -> list[Tensor]:
        device = self.masters[0].device
        return [torch.empty(shape, dtype=torch.uint8, device=device) for c in self.coded for shape in c.shapes]

    def fill(self, own: list[Tensor]) -> None:
        rest = iter(own)
        for coded, master, amaxes in zip(self.coded, self.masters, self.amaxes, strict=True):
            coded.encode(master, amaxes, [next(rest) for _ in coded.shapes])

    def done(self, whole: list[Tensor]) -> None:
        rest = iter(whole)
        for coded in self.coded:
            coded.take([next(rest) for _ in coded.shapes])


@dataclass(eq=False)
class _Bucket:
    content: _Content
    packing: Packing
    group: dist.ProcessGroup
    rank: int
    whole: list[Tensor] | None = None
    rows: Tensor | None = None
    pending: Pending[Tensor] | None = None

    def start(self) -> None:
        self.whole = self.content.whole()
        self.rows = self.packing.rows(self.whole)
        self.content.fill(self.packing.pieces(self.rows[self.rank], self.rank))
        self.pending = start_all_gather_(self.rows, self.group)

    def finish(self) -> None:
        assert self.pending is not None and self.rows is not None and self.whole is not None
        self.pending.wait()
        self.packing.unpack(self.rows, self.whole)
        self.content.done(self.whole)
        self.whole = self.rows = self.pending = None
        for param in self.content.params:
            param.is_stale = False  # type: ignore[attr-defined]


class WeightGather:
    """Parameters that replicas update piece by piece, made whole again.

    `start()` after the pieces have changed; then `wait()`, or let the forward hooks of `attach` wait for what a module
    needs. Buckets go in forward order on every rank, a few ahead of the one that is needed.

    Args:
        pieces: in forward order. A piece may be of another dtype than its parameter.

    Attributes:
        events: since `start()`: ("start", bucket) and ("done", bucket) in order.
        num_bytes: what a rank ends up with of one gather, its own part included.
    """

    def __init__(self, pieces: Sequence[Piece], mesh: Mesh, *, bucket_bytes: int = BUCKET_BYTES) -> None:
        self.events: list[tuple[str, int]] = []
        self._buckets = _make_buckets(pieces, mesh, bucket_bytes)
        self._number = {id(p): i for i, bucket in enumerate(self._buckets) for p in bucket.content.params}
        self._next = self._done = len(self._buckets)
        self.num_bytes = sum(_bytes_of(piece) for piece in pieces)

    @torch.no_grad()
    def start(self) -> None:
        """Begin to make the parameters whole; until their bucket is done they must not be used."""
        assert self._done == len(self._buckets), "wait() comes before the next start()"
        self.events.clear()
        self._next = self._done = 0
        for bucket in self._buckets:
            for param in bucket.content.params:
                param.is_stale = True  # type: ignore[attr-defined]
        self._agree()
        self._launch(AHEAD)

    @property
    def outdated(self) -> bool:
        """Whether some codes are: `start` makes them anew."""
        contents = [bucket.content for bucket in self._buckets if isinstance(bucket.content, _Codes)]
        return any(coded.outdated for content in contents for coded in content.coded)

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

    def _hook(self, module: nn.Module, params: Iterable[Tensor]) -> None:
        numbers = sorted({self._number[id(p)] for p in params if id(p) in self._number})
        if numbers:
            module.register_forward_pre_hook(lambda *_: self._finish(numbers))

    @torch.no_grad()
    def _finish(self, numbers: Iterable[int]) -> None:
        if self._done == len(self._buckets):
            return
        for number in numbers:
            self._launch(number + 1 + AHEAD)
            if self._buckets[number].pending is not None:
                self._buckets[number].finish()
                self._done += 1
                self.events.append(("done", number))

    def _launch(self, end: int) -> None:
        while self._next < min(end, len(self._buckets)):
            self.events.append(("start", self._next))
            self._buckets[self._next].start()
            self._next += 1

    def _agree(self) -> None:
        """One reduction of the amaxes of all coded weights with the same replicas."""
        groups: dict[dist.ProcessGroup, list[_Codes]] = {}
        for bucket in self._buckets:
            if isinstance(bucket.content, _Codes):
                groups.setdefault(bucket.group, []).append(bucket.content)
        for group, contents in groups.items():
            mine = [c.amaxes(m) for held in contents for c, m in zip(held.coded, held.masters, strict=True)]
            together = torch.cat(mine)
            if together.numel():
                all_reduce_(together, group, "max")
            rest = iter(together.split([len(amaxes) for amaxes in mine]))
            for held in contents:
                held.amaxes = [next(rest) for _ in held.coded]


def _called(model: nn.Module) -> Iterator[nn.Module]:
    for child in model.children():
        if type(child).forward is nn.Module.forward:  # a list: nobody calls it
            yield from _called(child)
        else:
            yield child


def _bytes_of(piece: Piece) -> int:
    if piece.coded is None:
        return piece.param.numel() * piece.param.itemsize
    return sum(prod(shape) for shape in piece.coded.shapes)


def _make_buckets(pieces: Sequence[Piece], mesh: Mesh, bucket_bytes: int) -> list[_Bucket]:
    kinds: dict[tuple[torch.dtype, tuple[str, ...]], list[list[int]]] = {}
    room: dict[tuple[torch.dtype, tuple[str, ...]], int] = {}
    for position, piece in enumerate(pieces):
        travels = torch.uint8 if piece.coded is not None else piece.param.dtype
        kind = (travels, own_piece(piece.param).layout.data_axes)
        needed, runs = _bytes_of(piece), kinds.setdefault(kind, [])
        large = needed * 8 >= bucket_bytes  # goes alone, mostly without a copy
        if large or room.get(kind, 0) < needed:
            runs.append([])
            room[kind] = bucket_bytes
        runs[-1].append(position)
        room[kind] = 0 if large else room[kind] - needed
    ordered = sorted((run[0], run, axes) for (_, axes), runs in kinds.items() for run in runs)
    return [_fill([pieces[i] for i in run], mesh, axes) for _, run, axes in ordered]


def _fill(members: list[Piece], mesh: Mesh, axes: tuple[str, ...]) -> _Bucket:
    params, masters = [m.param for m in members], [m.master for m in members]
    coded = [m.coded for m in members if m.coded is not None]
    content: _Content = _Codes(params, masters, coded, []) if coded else _Values(params, masters)
    shapes = [shape for c in coded for shape in c.shapes] if coded else [tuple(p.shape) for p in params]
    rank, parts = mesh.place(axes)
    group = mesh.group_of(axes)
    assert group is not None
    return _Bucket(content, Packing([tuple(shape) for shape in shapes], parts), group, rank)
