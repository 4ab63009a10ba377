"""Attention over a sequence that ranks of cp share: by a ring of keys and values, or by gathering them.

Both are built from a kernel's `forward` and `backward` (attention_blocks, attention_flash): some queries against some
keys with the log-sum-exp. Only key and value heads travel, never those of the queries. Kept for backward are this
rank's own q, k, v, the output and its log-sum-exp; keys of others travel again.

Shapes: B micro-batch, g kv heads, r query heads for each, L = S / cp own tokens, d head dim of q and k, e of v.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from megafp8.nn.attention_blocks import Sight
from megafp8.nn.dropout import WeightDropout
from megafp8.nn.kernels import wide
from megafp8.parallel.collectives import all_gather, reduce_scatter
from megafp8.parallel.context import by_ranks, chunks_of, in_order, places_of, ring_step, start_shift
from megafp8.parallel.mesh import Mesh

Tensor = torch.Tensor
_KEYS, _GRADIENTS = 1, 2  # tags of messages


class BlockKernel(Protocol):
    """Some queries against some keys: see attention_blocks."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, sight: Sight) -> tuple[Tensor, Tensor]: ...

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, sight: Sight
    ) -> tuple[Tensor, Tensor, Tensor]: ...


@dataclass(frozen=True, eq=False)
class Call:
    """What one call of attention needs besides q, k, v.

    Attributes:
        kernel: the module with `forward` and `backward`.
        segment_ids: [B, S] of the whole sequence, or None.
        dropout: of the weights between all tokens, or None.
    """

    mesh: Mesh
    kernel: BlockKernel
    segment_ids: Tensor | None
    dropout: WeightDropout | None

    def sight(self, queries: Tensor, keys: Tensor, causal: bool) -> Sight:
        """What queries see of keys, both given by their places."""
        ids = self.segment_ids
        segments = None if ids is None else (ids[:, queries], ids[:, keys])
        return Sight(causal, segments, None if self.dropout is None else self.dropout.among(queries, keys))


def merge_(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Take the attention over some more keys into that over others, in place and in the dtype of `out` (fp32 or wider).

    out, part [..., e]; lse, part_lse [...]: log-sum-exp of the scores, finite in `lse`.
    Source: Rabe and Staats, arXiv:2112.05682; Liu et al., Ring Attention, arXiv:2310.01889.
    """
    total = torch.logaddexp(lse, part_lse)
    out.mul_((lse - total).exp_().unsqueeze(-1)).add_(part * (part_lse - total).exp_().unsqueeze(-1))
    lse.copy_(total)


class _Ring(torch.autograd.Function):
    """q [B, g, L, r, d] (scaled), k [B, g, L, d], v [B, g, L, e] -> out [L, B, g * r * e] in q's dtype.

    cp steps; while one is computed, the keys and values of the next are under way. In backward the gradients of keys
    and values follow them around, a step behind, in fp32, and are home after the last.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        ring = _Steps(call, k, v)
        message, out, lse = _packed(k, v), q.new_empty(0), q.new_empty(0)
        for step in range(ring.cp):
            shift = start_shift(message, ring.group, _KEYS) if step < ring.cp - 1 else None
            mine, theirs, sight = ring.parts(step)
            part, part_lse = call.kernel.forward(q[:, :, mine], *ring.cut(message, theirs), sight)
            if step == 0:  # our own tokens, of which every query sees at least itself
                out, lse = wide(part).contiguous(), part_lse.contiguous()
            else:
                merge_(out[:, :, mine], lse[:, :, mine], part, part_lse)
            if shift is not None:
                message = shift.wait()
        result = _rows(out, q.dtype)
        ctx.call = call
        ctx.save_for_backward(q, k, v, result, lse)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        q, k, v, rows, lse = ctx.saved_tensors
        out, dout = _grouped(rows, q), _grouped(grads[0], q)
        ring = _Steps(ctx.call, k, v)
        message = _packed(k, v)
        dq = torch.zeros_like(q, dtype=wide(q[:0]).dtype)
        home = None
        for step in range(ring.cp):
            shift = start_shift(message, ring.group, _KEYS) if step < ring.cp - 1 else None
            mine, theirs, sight = ring.parts(step)
            given = dout[:, :, mine], q[:, :, mine], *ring.cut(message, theirs), out[:, :, mine], lse[:, :, mine]
            part, dk, dv = ctx.call.kernel.backward(*given, sight)
            dq[:, :, mine] += part
            summed = home.wait() if home is not None else torch.zeros_like(message, dtype=dq.dtype)
            for whole, piece in zip(ring.cut(summed, theirs), (dk, dv), strict=True):
                whole += piece
            home = start_shift(summed, ring.group, _GRADIENTS)
            if shift is not None:
                message = shift.wait()
        assert home is not None
        dk, dv = ring.cut(home.wait(), slice(None))
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None


class _Steps:
    """The steps of this rank around the ring, and how keys and values lie in one message."""

    def __init__(self, call: Call, k: Tensor, v: Tensor) -> None:
        self.call, self.shapes, self.length = call, (k.shape, v.shape), k.shape[2]
        self.cp, self.rank, group = call.mesh.size("cp"), call.mesh.coord("cp"), call.mesh.group("cp")
        assert group is not None, "a ring of one"
        self.group = group
        self.places = [places_of(self.length * self.cp, self.cp, rank, k.device) for rank in range(self.cp)]

    def parts(self, step: int) -> tuple[slice, slice, Sight]:
        """Our queries and the others' keys of one step, and what is seen."""
        now, half = ring_step(self.cp, self.rank, step), self.length // 2
        mine, theirs = slice(half if now.tail else 0, None), slice(0, half if now.head else None)
        places = self.places[self.rank][mine], self.places[now.source][theirs]
        return mine, theirs, self.call.sight(*places, now.causal)

    def cut(self, message: Tensor, part: slice) -> tuple[Tensor, Tensor]:
        """The k and v in a message, views [B, g, part, d] and [B, g, part, e]."""
        k, v = message.split([shape.numel() for shape in self.shapes])
        return k.view(self.shapes[0])[:, :, part], v.view(self.shapes[1])[:, :, part]


def _packed(k: Tensor, v: Tensor) -> Tensor:
    return torch.cat((k.reshape(-1), v.reshape(-1)))


def _rows(out: Tensor, dtype: torch.dtype) -> Tensor:
    """[B, g, L, r, e] -> [L, B, g * r * e], as the output linear takes it: both keep this one tensor for backward."""
    return out.permute(2, 0, 1, 3, 4).to(dtype).flatten(2)


def _grouped(rows: Tensor, q: Tensor) -> Tensor:
    """The inverse of `_rows`, a view; q [B, g, L, r, d]."""
    b, g, length, r, _ = q.shape
    return rows.reshape(length, b, g, r, -1).permute(1, 2, 0, 3, 4)


class _Gathered(torch.autograd.Function):
    """As `_Ring`, with the keys and values of all ranks gathered first; at cp = 1 nothing travels.

    In backward they are gathered again, and their gradients are summed and scattered in fp32.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        whole_k, whole_v = _gathered(k, v, call.mesh)
        outs, sums = [], []
        for mine, stop, sight in _chunks(call, q, whole_k):
            out, lse = call.kernel.forward(q[:, :, mine], whole_k[:, :, :stop], whole_v[:, :, :stop], sight)
            outs.append(out.to(q.dtype))
            sums.append(lse)
        result = _rows(torch.cat(outs, 2), q.dtype)
        ctx.call = call
        ctx.save_for_backward(q, k, v, result, torch.cat(sums, 2))
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        q, k, v, rows, lse = ctx.saved_tensors
        out, dout = _grouped(rows, q), _grouped(grads[0], q)
        mesh, work = ctx.call.mesh, wide(q[:0]).dtype
        whole_k, whole_v = _gathered(k, v, mesh)
        dq, dk, dv = [], torch.zeros_like(whole_k, dtype=work), torch.zeros_like(whole_v, dtype=work)
        for mine, stop, sight in _chunks(ctx.call, q, whole_k):
            keys = whole_k[:, :, :stop], whole_v[:, :, :stop]
            given = dout[:, :, mine], q[:, :, mine], *keys, out[:, :, mine], lse[:, :, mine]
            part, *pieces = ctx.call.kernel.backward(*given, sight)
            dq.append(part.to(q.dtype))
            for whole, piece in zip((dk, dv), pieces, strict=True):
                whole[:, :, :stop] += piece
        if mesh.size("cp") > 1:
            both = by_ranks(torch.cat((dk, dv), -1), mesh.size("cp"), 2)
            dk, dv = reduce_scatter(both, mesh.group("cp"), 2).split((k.shape[-1], v.shape[-1]), -1)
        return torch.cat(dq, 2), dk.to(k.dtype), dv.to(v.dtype), None


def _gathered(k: Tensor, v: Tensor, mesh: Mesh) -> tuple[Tensor, Tensor]:
    """k and v of the whole sequence in order, gathered in one message."""
    cp = mesh.size("cp")
    if cp == 1:
        return k, v
    both = all_gather(torch.cat((k, v), -1), mesh.group("cp"), 2)
    whole_k, whole_v = (in_order(x, cp, 2) for x in both.split((k.shape[-1], v.shape[-1]), -1))
    return whole_k, whole_v


def _chunks(call: Call, q: Tensor, k: Tensor) -> Iterator[tuple[slice, int, Sight]]:
    """Our queries in runs of the sequence: which, how many keys come up to their end, and what they see of those."""
    cp, length = call.mesh.size("cp"), q.shape[2]
    if cp == 1:
        everything = torch.arange(length, device=q.device)
        yield slice(None), length, call.sight(everything, everything, True)
        return
    half = length // 2
    for index, chunk in enumerate(chunks_of(cp, call.mesh.coord("cp"))):
        start, stop = chunk * half, (chunk + 1) * half
        keys = torch.arange(stop, device=k.device)
        yield slice(index * half, (index + 1) * half), stop, call.sight(keys[start:], keys, True)


def attend(q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
    """Causal attention of this rank's queries over the whole sequence, differentiable.

    Args:
        q: [B, g, S/cp, r, d], scaled; k: [B, g, S/cp, d]; v: [B, g, S/cp, e].

    Returns:
        [S/cp, B, g * r * e] in q's dtype.
    """
    ring = call.mesh.size("cp") > 1 and call.mesh.cp_exchange == "ring"
    out: Tensor = (_Ring if ring else _Gathered).apply(q, k, v, call)
    return out
