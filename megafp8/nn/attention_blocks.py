"""Attention cores by blocks of GEMMs, on any device and in any dtype.

`blocked` is whole causal attention for 16-bit floats on a CPU, where SDPA's kernel is three times slower than the same
GEMMs through oneDNN. `forward` and `backward` are the pair that context parallelism is built from: some queries
against some keys, with the log-sum-exp by which parts are merged. They can also drop attention weights by place.

Shapes: B micro-batch, g kv heads, n = B * g; r query heads for each kv head; L queries, K keys; d head dim of q and k,
e of v. Flat q is [n, L * r, d]: the r heads of a group are rows of one GEMM with its k.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from megafp8.nn.dropout import WeightDropout
from megafp8.nn.kernels import wide

Tensor = torch.Tensor

_BLOCK = 128  # query positions at a time: fastest of 64, 128, 256 (Zen 5, 2 threads), skips most of the masked half
_CHUNK = 1 << 21  # attention weights alive at a time: 4 MB in bf16, about the cache's size


@dataclass(frozen=True, eq=False)
class Sight:
    """Which keys the queries of one call see.

    Attributes:
        causal: query i of L sees keys 0 ... K - L + i (aligned at the end, as FlashAttention aligns); else all K.
        segments: ids of the queries [B, L] and of the keys [B, K], which must be equal too; None: no documents.
        dropout: which of the weights are dropped; None: none of them.
    """

    causal: bool
    segments: tuple[Tensor, Tensor] | None = None
    dropout: WeightDropout | None = None


@functools.lru_cache(maxsize=8)
def _hidden(rows: int, r: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """What is added to the scores of a block on the diagonal, [rows * r, rows]: -inf where it must not look."""
    mask = torch.full((rows, rows), float("-inf"), dtype=dtype, device=device)
    return mask.triu(1).repeat_interleave(r, 0)


@dataclass(frozen=True)
class _Block:
    """A chunk of groups, query positions, their rows in q, the keys that they may see, and those on the diagonal."""

    groups: slice
    at: slice
    rows: slice
    seen: slice
    diagonal: slice | None


class _Blocks:
    """The blocks of one call, and memory for their [groups, rows, keys] matrices that all of them share.

    Fresh memory for each matrix would cost more in page faults than the GEMM that fills it.
    """

    def __init__(self, q: Tensor, k: Tensor, r: int, sight: Sight, dtypes: tuple[torch.dtype, ...]) -> None:
        self.num_groups, self.keys = k.shape[:2]
        self.r, self.queries, self.sight = r, q.shape[1] // r, sight
        self.ids: tuple[Tensor, Tensor] | None = None
        if sight.segments is not None:
            ours, theirs = (ids.repeat_interleave(self.num_groups // len(ids), 0) for ids in sight.segments)
            self.ids = ours, theirs
        block = min(_BLOCK, self.queries)
        self.step = max(1, min(self.num_groups, _CHUNK // (_BLOCK * r * self.keys)))
        self.scratch = [q.new_empty(self.step * block * r * self.keys, dtype=dtype) for dtype in dtypes]
        self.hidden = _hidden(block, r, q.dtype, q.device) if sight.causal else None

    def __iter__(self) -> Iterator[_Block]:
        ahead = self.keys - self.queries
        for first in range(0, self.num_groups, self.step):
            groups = slice(first, min(first + self.step, self.num_groups))
            for start in range(0, self.queries, _BLOCK):
                stop = min(start + _BLOCK, self.queries)
                at, rows = slice(start, stop), slice(start * self.r, stop * self.r)
                if self.sight.causal:
                    yield _Block(groups, at, rows, slice(0, ahead + stop), slice(ahead + start, ahead + stop))
                else:
                    yield _Block(groups, at, rows, slice(0, self.keys), None)

    def matrix(self, which: int, block: _Block) -> Tensor:
        """Memory for [groups, rows, keys] of a block."""
        shape = (block.groups.stop - block.groups.start, block.rows.stop - block.rows.start, block.seen.stop)
        return self.scratch[which][: math.prod(shape)].view(shape)

    def scores(self, q: Tensor, k: Tensor, block: _Block) -> Tensor:
        """q k^T of one block in matrix 0, -inf where it must not look; q, k are those of the whole call."""
        q, k = q[block.groups, block.rows], k[block.groups, block.seen]
        scores = torch.bmm(q, k.transpose(1, 2), out=self.matrix(0, block))
        if block.diagonal is not None and self.hidden is not None:
            rows = block.at.stop - block.at.start
            scores[:, :, block.diagonal].add_(self.hidden[: q.shape[1], :rows])  # 4 times as fast as masked_fill_
        if self.ids is not None:
            ours, theirs = self.ids
            other = ours[block.groups, block.at, None] != theirs[block.groups, None, block.seen]
            scores.masked_fill_(other.repeat_interleave(self.r, 1), float("-inf"))
        return scores

    def factors(self, block: _Block, dtype: torch.dtype) -> Tensor | None:
        """What dropout multiplies the weights of one block by, or None."""
        dropout = self.sight.dropout
        return None if dropout is None else dropout.factors(block.groups, block.at, block.seen, dtype)


class _Blocked(torch.autograd.Function):
    """Causal attention by blocks of query positions; saves q, k, v only and makes the weights again in backward.

    Scores and weights are rounded to the inputs' dtype between GEMM and softmax (which works in fp32), as in
    Megatron's unfused attention; masked blocks above the diagonal are never computed.

    q [n, S * r, d] (scaled), k [n, S, d], v [n, S, e]; segments [B, S] or None -> [S, n, r * e].
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, segments: Tensor | None) -> Tensor:
        (n, length, width), r = v.shape, q.shape[1] // k.shape[1]
        blocks = _Blocks(q, k, r, _whole(segments), (q.dtype,))
        out = q.new_empty(length, n, r * width)
        for block in blocks:
            scores = blocks.scores(q, k, block)
            p = torch.softmax(scores, -1, out=scores)
            o = torch.bmm(p, v[block.groups, block.seen])
            out[block.at, block.groups] = o.view(o.shape[0], -1, r * width).transpose(0, 1)
        ctx.save_for_backward(q, k, v, segments)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        q, k, v, segments = ctx.saved_tensors
        blocks = _Blocks(q, k, q.shape[1] // k.shape[1], _whole(segments), (q.dtype, q.dtype))
        dq = torch.empty_like(q)
        dk, dv = (torch.zeros_like(x, dtype=torch.float32) for x in (k, v))
        for block in blocks:
            scores = blocks.scores(q, k, block)
            p = torch.softmax(scores, -1, out=scores)
            do = grads[0][block.at, block.groups].transpose(0, 1).reshape(*p.shape[:2], v.shape[2])
            dv[block.groups, block.seen].add_(torch.bmm(p.transpose(1, 2), do))
            dp = torch.bmm(do, v[block.groups, block.seen].transpose(1, 2), out=blocks.matrix(1, block))
            ds = torch._softmax_backward_data(dp, p, -1, dp.dtype, grad_input=dp)
            dq[block.groups, block.rows] = torch.bmm(ds, k[block.groups, block.seen])
            dk[block.groups, block.seen].add_(torch.bmm(ds.transpose(1, 2), q[block.groups, block.rows]))
        return dq, dk, dv, None


def _whole(segments: Tensor | None) -> Sight:
    return Sight(True, None if segments is None else (segments, segments))


def blocked(q: Tensor, k: Tensor, v: Tensor, segment_ids: Tensor | None) -> Tensor:
    """Whole causal attention: q [B, g, S, r, d] (scaled), k [B, g, S, d], v [B, g, S, e] -> [S, B, g * r * e]."""
    out = _Blocked.apply(*_flat(q, k, v), segment_ids)
    return out.view(q.shape[2], q.shape[0], -1)


def forward(q: Tensor, k: Tensor, v: Tensor, sight: Sight) -> tuple[Tensor, Tensor]:
    """Queries against keys.

    Args:
        q: [B, g, L, r, d], scaled; k: [B, g, K, d]; v: [B, g, K, e].

    Returns:
        out [B, g, L, r, e], and the log-sum-exp of the scores [B, g, L, r], -inf (and out 0) for a query that sees no
        key; both in fp32 (fp64 for fp64).
    """
    fq, fk, fv = _flat(q, k, v)
    work = wide(fq[:0]).dtype
    blocks = _Blocks(fq, fk, q.shape[3], sight, (q.dtype, work))
    out = torch.empty(*fq.shape[:2], v.shape[3], dtype=work, device=q.device)
    lse = torch.empty(*fq.shape[:2], dtype=work, device=q.device)
    for block in blocks:
        scores = blocks.scores(fq, fk, block)
        # finite for a query without keys, whose sum is then 0
        peak = scores.amax(-1, keepdim=True).to(work).clamp_(min=torch.finfo(work).min)
        p = torch.sub(scores, peak, out=blocks.matrix(1, block)).exp_()
        total = p.sum(-1, keepdim=True)
        lse[block.groups, block.rows] = (peak + total.log()).squeeze(-1)
        weights = scores.copy_(p)
        factors = blocks.factors(block, q.dtype)
        if factors is not None:
            weights.mul_(factors)
        o = torch.bmm(weights, fv[block.groups, block.seen])
        out[block.groups, block.rows] = o / total.clamp_(min=torch.finfo(work).tiny)
    return out.view(*q.shape[:4], -1), lse.view(q.shape[:4])


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, sight: Sight
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `forward`'s part of attention over more keys.

    Args:
        dout, out: [B, g, L, r, e], of the whole attention; lse: [B, g, L, r], over all keys that a query sees.

    Returns:
        dq, dk, dv of these queries and keys, in fp32 (fp64 for fp64).
    """
    fq, fk, fv = _flat(q, k, v)
    work = wide(fq[:0]).dtype
    do = dout.reshape(*fq.shape[:2], v.shape[3]).to(q.dtype)
    delta = (wide(dout) * wide(out)).sum(-1).reshape(*fq.shape[:2], 1)
    log_sum = lse.reshape(*fq.shape[:2], 1)
    blocks = _Blocks(fq, fk, q.shape[3], sight, (q.dtype, work, q.dtype, work))
    dq = torch.empty_like(fq, dtype=work)
    dk, dv = (torch.zeros_like(x, dtype=work) for x in (fk, fv))
    for block in blocks:
        scores = blocks.scores(fq, fk, block)
        p = torch.sub(scores, log_sum[block.groups, block.rows], out=blocks.matrix(1, block)).exp_()
        dob, weights, factors = do[block.groups, block.rows], scores.copy_(p), blocks.factors(block, q.dtype)
        dp = torch.bmm(dob, fv[block.groups, block.seen].transpose(1, 2), out=blocks.matrix(2, block))
        if factors is not None:
            weights.mul_(factors)
            dp.mul_(factors)
        dv[block.groups, block.seen].add_(torch.bmm(weights.transpose(1, 2), dob))
        ds = torch.sub(dp, delta[block.groups, block.rows], out=blocks.matrix(3, block)).mul_(p)
        ds = scores.copy_(ds)
        dq[block.groups, block.rows] = torch.bmm(ds, fk[block.groups, block.seen]).to(work)
        dk[block.groups, block.seen].add_(torch.bmm(ds.transpose(1, 2), fq[block.groups, block.rows]))
    return dq.view(q.shape), dk.view(k.shape), dv.view(v.shape)


def _flat(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q [n, L * r, d], k [n, K, d], v [n, K, e]: views where q's memory is in the order of its dims."""
    return q.flatten(2, 3).flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)
