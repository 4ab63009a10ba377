"""Context parallelism: which tokens of a sequence a rank of cp holds, and how ranks exchange what attention needs.

Zig-zag: the sequence is cut into 2 cp chunks, and rank i holds chunks i and 2 cp - 1 - i, in this order. Under a causal
mask every rank then has the same work (head and tail together see as many keys on every rank), and within a rank the
local order is the order of places. Source: Llama 3 report section 3.3.2; zhuzilin/ring-flash-attention issue 2.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megafp8.core.errors import ConfigError
from megafp8.core.waiting import WAITING
from megafp8.parallel.collectives import all_gather, all_to_all
from megafp8.parallel.mesh import Mesh

Tensor = torch.Tensor


def chunks_of(cp: int, rank: int) -> tuple[int, int]:
    """The two of 2 cp chunks that `rank` holds, ascending."""
    return rank, 2 * cp - 1 - rank


def chunk_order(cp: int) -> list[int]:
    """The chunks as they lie when the ranks' parts are joined in rank order: 0, 2cp-1, 1, 2cp-2, ..."""
    return [chunk for rank in range(cp) for chunk in chunks_of(cp, rank)]


def places_of(length: int, cp: int, rank: int, device: torch.device | str = "cpu") -> Tensor:
    """Global positions [S / cp] int64 of the tokens that `rank` holds, ascending; S = `length`.

    Raises:
        ConfigError: the sequence does not divide into 2 cp chunks.
    """
    if length % (2 * cp):
        below, above = length // (2 * cp) * 2 * cp, -(-length // (2 * cp)) * 2 * cp
        nearest = f"{below} or {above}" if below else str(above)
        raise ConfigError(
            f"a sequence of {length} tokens is not divisible by 2 x parallel.cp = {2 * cp}; nearest: {nearest}"
        )
    size = length // (2 * cp)
    starts = [chunk * size for chunk in chunks_of(cp, rank)]
    return torch.cat([torch.arange(start, start + size, device=device) for start in starts])


def local_places(length: int, mesh: Mesh, device: torch.device | str = "cpu") -> Tensor | None:
    """`places_of` for this rank; None at cp = 1, where a token's place is its index."""
    cp = mesh.size("cp")
    return None if cp == 1 else places_of(length, cp, mesh.coord("cp"), device)


def slice_sequence(x: Tensor, mesh: Mesh, dim: int) -> Tensor:
    """This rank's part of a tensor that every rank of cp holds whole, along its sequence dim; x itself at cp = 1."""
    places = local_places(x.shape[dim], mesh, x.device)
    return x if places is None else x.index_select(dim, places)


def join_sequence(x: Tensor, mesh: Mesh, dim: int) -> Tensor:
    """The inverse of `slice_sequence`: the ranks' parts in the order of the sequence, on every rank; no gradient."""
    cp = mesh.size("cp")
    return x if cp == 1 else in_order(all_gather(x.detach(), mesh.group("cp"), dim), cp, dim)


def in_order(joined: Tensor, cp: int, dim: int) -> Tensor:
    """Parts joined in rank order -> the order of the sequence along `dim`."""
    order = chunk_order(cp)
    back = [order.index(chunk) for chunk in range(2 * cp)]
    return _by_chunks(joined, back, dim)


def by_ranks(ordered: Tensor, cp: int, dim: int) -> Tensor:
    """The inverse of `in_order`."""
    return _by_chunks(ordered, chunk_order(cp), dim)


def _by_chunks(x: Tensor, chunks: list[int], dim: int) -> Tensor:
    dim = dim % x.dim()
    parts = x.unflatten(dim, (len(chunks), x.shape[dim] // len(chunks)))
    return parts.index_select(dim, torch.tensor(chunks, device=x.device)).flatten(dim, dim + 1)


class RingStep(NamedTuple):
    """What a rank computes in one step of the ring.

    Attributes:
        source: whose keys it has then.
        tail: only the queries of its second chunk see any of them.
        head: only the keys of the source's first chunk are seen.
        causal: its own keys, under the causal mask; else all of what is named above is seen.
    """

    source: int
    tail: bool
    head: bool
    causal: bool


def ring_step(cp: int, rank: int, step: int) -> RingStep:
    """Step 0 ... cp - 1 of `rank`: two chunk pairs of work in each, on every rank.

    Keys of an earlier rank: its first chunk lies before, its second behind both of ours. Keys of a later one: both its
    chunks lie between ours.
    """
    source = (rank - step) % cp
    return RingStep(source, source > rank, source < rank, source == rank)


class Shift:
    """A message to the next rank and one from the previous, under way; both tensors are left alone until `wait`."""

    def __init__(self, sent: Tensor, received: Tensor, group: dist.ProcessGroup, tag: int) -> None:
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        ahead, behind = (rank + 1) % size, (rank - 1) % size
        self._kept = (sent, received)
        ops = [
            dist.P2POp(dist.isend, sent, group=group, group_peer=ahead, tag=tag),
            dist.P2POp(dist.irecv, received, group=group, group_peer=behind, tag=tag),
        ]
        self._works = dist.batch_isend_irecv(ops)

    def wait(self) -> Tensor:
        """What was received; on a GPU the current stream waits, not the process."""
        for work in self._works:
            with WAITING:
                work.wait()
        return self._kept[1]


def start_shift(sent: Tensor, group: dist.ProcessGroup, tag: int) -> Shift:
    """Send `sent` (contiguous) one rank on around the ring of `group`, and receive as much from the rank before.

    `tag` tells apart messages that are under way at the same time.
    """
    return Shift(sent, torch.empty_like(sent), group, tag)


class _Exchange(torch.autograd.Function):
    """[cp, ...] with a piece for each rank -> [cp, ...] with a piece from each; its own conjugate."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: Mesh) -> Tensor:
        ctx.mesh = mesh
        return _exchanged(x, mesh)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _exchanged(grads[0], ctx.mesh), None


def _exchanged(x: Tensor, mesh: Mesh) -> Tensor:
    ones = [1] * mesh.size("cp")
    return all_to_all(x.contiguous(), mesh.group("cp"), ones, ones)


def heads_to_sequence(x: Tensor, mesh: Mesh, heads: int, dim: int) -> Tensor:
    """All heads of this rank's tokens -> this rank's share of the heads, of all tokens in order.

    Differentiable. `heads` is the dim of x with the heads, which cp divides, `dim` that with the tokens.
    """
    cp = mesh.size("cp")
    pieces = x.unflatten(heads, (cp, x.shape[heads] // cp)).movedim(heads, 0)
    received = _Exchange.apply(pieces, mesh)  # [cp, ...]: tokens of each rank
    return in_order(received.movedim(0, dim).flatten(dim, dim + 1), cp, dim)


def sequence_to_heads(x: Tensor, mesh: Mesh, heads: int, dim: int) -> Tensor:
    """The inverse of `heads_to_sequence`."""
    cp = mesh.size("cp")
    pieces = by_ranks(x, cp, dim).unflatten(dim, (cp, x.shape[dim] // cp)).movedim(dim, 0)
    received = _Exchange.apply(pieces, mesh)  # [cp, ...]: heads of each rank
    return received.movedim(0, heads).flatten(heads, heads + 1)
