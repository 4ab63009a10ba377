"""Attention: the core (softmax(q k^T) v, causal) in three forms, and the layer around it.

Core forms: torch's fused SDPA; `blocked`, for 16-bit floats on a CPU, where SDPA's kernel is three times slower than
the same GEMMs through oneDNN; and `unfused`, which alone can drop attention weights by place. The layer is tensor
parallel over kv groups: each rank holds whole groups of r query heads with their key and value head.

Shapes: S sequence, B micro-batch, g kv heads of this rank, r query heads for each, d head dim, a = g * r.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from megafp8.core.layout import Layout
from megafp8.nn.context import Context
from megafp8.nn.dropout import attention_dropout
from megafp8.nn.kernels import Kernels
from megafp8.nn.linear import ColumnLinear, RowLinear
from megafp8.nn.parameter import Init, declare
from megafp8.nn.recompute import Rebuild
from megafp8.parallel.mesh import Mesh

Tensor = torch.Tensor

_BLOCK = 128  # query positions at a time: fastest of 64, 128, 256 (Zen 5, 2 threads), skips most of the masked half
_CHUNK = 1 << 21  # attention weights alive at a time: 4 MB in bf16, about the cache's size

HEADS_FIRST = (1, 2, 3, 0, 4)  # q as [B, g, r, S, d]
ROWS_FIRST = (1, 2, 0, 3, 4)  # q as [B, g, S, r, d]: the r heads of a group are rows of one GEMM with its k


class _SplitRotate(torch.autograd.Function):
    """qkv [S, B, g, r+2, d] -> q, k, v (see kernels.split_rotate)."""

    @staticmethod
    def forward(
        ctx: Any,
        qkv: Tensor,
        cos: Tensor | None,
        sin: Tensor | None,
        q_weight: Tensor | None,
        k_weight: Tensor | None,
        eps: float,
        scale: float,
        order: tuple[int, ...],
        kernels: Kernels,
    ) -> Any:
        ctx.save_for_backward(cos, sin, q_weight, k_weight, qkv if q_weight is not None else None)
        ctx.eps, ctx.scale, ctx.order, ctx.kernels = eps, scale, order, kernels
        return kernels.split_rotate(qkv, cos, sin, q_weight, k_weight, eps, scale, order)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        cos, sin, q_weight, k_weight, qkv = ctx.saved_tensors
        dqkv = ctx.kernels.split_rotate_backward(*grads, cos, sin, ctx.scale, ctx.order)
        dq_weight = dk_weight = None
        if qkv is not None:
            dqkv, dq_weight, dk_weight = ctx.kernels.head_norm_backward(dqkv, qkv, q_weight, k_weight, ctx.eps)
        return dqkv, None, None, dq_weight, dk_weight, None, None, None, None


@functools.lru_cache(maxsize=8)
def _causal(rows: int, r: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """What is added to the scores of a block on the diagonal, [rows * r, rows]: -inf where it must not look."""
    mask = torch.full((rows, rows), float("-inf"), dtype=dtype, device=device)
    return mask.triu(1).repeat_interleave(r, 0)


@dataclass(frozen=True)
class _Block:
    """A chunk of groups, query positions, their rows in q, and the key positions that they may see."""

    groups: slice
    at: slice
    rows: slice
    seen: slice


class _Blocks:
    """The blocks of one call, and memory for their [groups, rows, keys] matrices that all of them share.

    Fresh memory for each matrix would cost more in page faults than the GEMM that fills it.
    """

    def __init__(self, q: Tensor, k: Tensor, segments: Tensor | None, num_matrices: int) -> None:
        self.num_groups, self.length = k.shape[:2]
        self.r = q.shape[1] // self.length
        self.segments = segments
        self.step = max(1, min(self.num_groups, _CHUNK // (_BLOCK * self.r * self.length)))
        size = self.step * min(_BLOCK, self.length) * self.r * self.length
        self.scratch = [q.new_empty(size) for _ in range(num_matrices)]
        self.hidden = _causal(min(_BLOCK, self.length), self.r, q.dtype, q.device)

    def __iter__(self) -> Iterator[_Block]:
        for first in range(0, self.num_groups, self.step):
            groups = slice(first, min(first + self.step, self.num_groups))
            for start in range(0, self.length, _BLOCK):
                stop = min(start + _BLOCK, self.length)
                rows = slice(start * self.r, stop * self.r)
                yield _Block(groups, slice(start, stop), rows, slice(0, stop))

    def matrix(self, which: int, block: _Block) -> Tensor:
        """Memory for [groups, rows, keys] of a block."""
        shape = (block.groups.stop - block.groups.start, block.rows.stop - block.rows.start, block.seen.stop)
        return self.scratch[which][: math.prod(shape)].view(shape)

    def weights(self, q: Tensor, k: Tensor, block: _Block) -> Tensor:
        """Attention weights of one block, in matrix 0; q [n, rows, d], k [n, keys, d] of that block."""
        scores = torch.bmm(q, k.transpose(1, 2), out=self.matrix(0, block))
        rows = block.at.stop - block.at.start
        scores[:, :, block.at].add_(self.hidden[: q.shape[1], :rows])  # 4 times as fast as masked_fill_
        if self.segments is not None:
            ids = self.segments[block.groups]
            other = ids[:, block.at, None] != ids[:, None, block.seen]
            scores.masked_fill_(other.repeat_interleave(self.r, 1), float("-inf"))
        return torch.softmax(scores, -1, out=scores)


class _Blocked(torch.autograd.Function):
    """Causal attention by blocks of query positions; saves q, k, v only and makes the weights again in backward.

    Scores and weights are rounded to the inputs' dtype between GEMM and softmax (which works in fp32), as in
    Megatron's unfused attention; masked blocks above the diagonal are never computed.

    q [n, S * r, d] (scaled), k, v [n, S, d] with n = B * g; segments [n, S] or None -> [S, n, r * d].
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, segments: Tensor | None) -> Tensor:
        n, length, d = k.shape
        blocks = _Blocks(q, k, segments, 1)
        out = q.new_empty(length, n, blocks.r * d)
        for block in blocks:
            p = blocks.weights(q[block.groups, block.rows], k[block.groups, block.seen], block)
            o = torch.bmm(p, v[block.groups, block.seen])
            out[block.at, block.groups] = o.view(o.shape[0], -1, blocks.r * d).transpose(0, 1)
        ctx.save_for_backward(q, k, v, segments)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        q, k, v, segments = ctx.saved_tensors
        blocks = _Blocks(q, k, segments, 2)
        dq = torch.empty_like(q)
        dk, dv = k.new_zeros(k.shape, dtype=torch.float32), k.new_zeros(k.shape, dtype=torch.float32)
        for block in blocks:
            qb, kb = q[block.groups, block.rows], k[block.groups, block.seen]
            p = blocks.weights(qb, kb, block)
            do = grads[0][block.at, block.groups].transpose(0, 1).reshape(qb.shape)
            dv[block.groups, block.seen].add_(torch.bmm(p.transpose(1, 2), do))
            dp = torch.bmm(do, v[block.groups, block.seen].transpose(1, 2), out=blocks.matrix(1, block))
            ds = torch._softmax_backward_data(dp, p, -1, dp.dtype, grad_input=dp)
            dq[block.groups, block.rows] = torch.bmm(ds, kb)
            dk[block.groups, block.seen].add_(torch.bmm(ds.transpose(1, 2), qb))
        return dq, dk, dv, None


def _blocked(q: Tensor, k: Tensor, v: Tensor, context: Context) -> Tensor:
    """q [B, g, S, r, d], k, v [B, g, S, d] -> [S, B, a * d]."""
    b, g, s, r, d = q.shape
    segments = None if context.segment_ids is None else context.segment_ids.repeat_interleave(g, 0)
    out = _Blocked.apply(q.view(b * g, s * r, d), k.view(b * g, s, d), v.view(b * g, s, d), segments)
    return out.view(s, b, g * r * d)


def _visible(context: Context) -> Tensor | None:
    """[B, 1, S, S] bool, True where attention may look; None if the causal mask is all there is."""
    if context.segment_ids is None:
        return None
    ids = context.segment_ids
    return ((ids[:, :, None] == ids[:, None, :]).tril())[:, None]


def _fused(q: Tensor, k: Tensor, v: Tensor, context: Context) -> Tensor:
    """q [B, g, r, S, d], k, v [B, g, S, d] -> [S, B, a * d]."""
    mask = _visible(context)
    out = F.scaled_dot_product_attention(
        q.flatten(1, 2), k, v, attn_mask=mask, is_causal=mask is None, scale=1.0, enable_gqa=q.shape[2] > 1
    )
    return out.permute(2, 0, 1, 3).flatten(2)


def _unfused(q: Tensor, k: Tensor, v: Tensor, context: Context, rate: float, name: str, mesh: Mesh) -> Tensor:
    """As `_fused`, with attention weights dropped by place."""
    b, g, r, s, d = q.shape
    k, v = (x.repeat_interleave(r, 1) for x in (k, v))
    mask = _visible(context)
    if mask is None:
        mask = torch.ones(s, s, dtype=torch.bool, device=q.device).tril()
    scores = (q.flatten(1, 2) @ k.transpose(2, 3)).masked_fill(~mask, float("-inf"))
    p = torch.softmax(scores, -1)
    if context.dropout is not None:
        p = attention_dropout(p, rate, context.dropout, name, mesh=mesh)
    return (p @ v).permute(2, 0, 1, 3).flatten(2)


class Attention(nn.Module):
    """y [S, B, H] -> the attention branch [S, B, H] (shards along S under sequence parallelism).

    Parameters: qkv.weight [(a + 2g) d, H] with q..q k v for each kv group, out.weight [H, a d], and, if asked for,
    biases, q_norm.weight [d], k_norm.weight [d].
    """

    def __init__(
        self,
        qkv: ColumnLinear,
        out: RowLinear,
        *,
        name: str,
        num_groups: int,
        head_dim: int,
        head_norm_eps: float | None,
        dropout: float,
        mesh: Mesh,
        dtype: torch.dtype,
        kernels: Kernels,
    ) -> None:
        super().__init__()
        self.qkv, self.out = qkv, out
        self.name, self.mesh, self.kernels = name, mesh, kernels
        self.num_groups, self.head_dim, self.dropout = num_groups, head_dim, dropout
        self.eps = head_norm_eps or 0.0
        self.q_norm = self.k_norm = None
        if head_norm_eps is not None:
            self.q_norm, self.k_norm = (_HeadNorm(head_dim, mesh=mesh, dtype=dtype) for _ in "qk")

    def forward(self, y: Tensor, context: Context, rebuild: Rebuild | None = None) -> Tensor:
        qkv = self.qkv(y, rebuild)
        qkv = qkv.view(*qkv.shape[:2], self.num_groups, -1, self.head_dim)
        dropping = self.dropout > 0 and context.dropout is not None
        blocked = not dropping and qkv.dtype in (torch.bfloat16, torch.float16) and qkv.device.type == "cpu"
        q, k, v = _SplitRotate.apply(
            qkv,
            context.cos,
            context.sin,
            None if self.q_norm is None else self.q_norm.weight,
            None if self.k_norm is None else self.k_norm.weight,
            self.eps,
            self.head_dim**-0.5,
            ROWS_FIRST if blocked else HEADS_FIRST,
            self.kernels,
        )
        if dropping:
            core = _unfused(q, k, v, context, self.dropout, f"{self.name}.weights", self.mesh)
        else:
            core = (_blocked if blocked else _fused)(q, k, v, context)
        branch: Tensor = self.out(core)
        return branch


class _HeadNorm(nn.Module):
    """The weight of an RMSNorm over head dims; ranks hold different heads, so its gradient is partial over tp."""

    def __init__(self, head_dim: int, *, mesh: Mesh, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = declare(Layout((head_dim,), grad_sum=("tp",)), Init(mean=1.0), mesh=mesh, dtype=dtype)
