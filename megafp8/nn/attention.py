"""The attention layer: one GEMM to q, k, v, rotation and head norms in one pass, the core, one GEMM back.

Tensor parallel over kv groups: each rank holds whole groups of r query heads with their key and value head. The core
(attention_core) is context parallel.

Shapes: S sequence, B micro-batch, g kv heads of this rank, r query heads for each, d head dim, a = g * r.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from megafp8.core.layout import Layout
from megafp8.nn.attention_core import HEADS_FIRST, AttentionCore
from megafp8.nn.context import Context
from megafp8.nn.kernels import Kernels
from megafp8.nn.linear import ColumnLinear, RowLinear
from megafp8.nn.parameter import Init, declare
from megafp8.nn.recompute import Rebuild, checkpointed
from megafp8.parallel.mesh import Mesh

Tensor = torch.Tensor


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


class Attention(nn.Module):
    """y [S, B, H] -> the attention branch [S, B, H] (shards along S under sequence parallelism).

    Parameters: qkv.weight [(a + 2g) d, H] with q..q k v for each kv group, out.weight [H, a d], and, if asked for,
    biases, q_norm.weight [d], k_norm.weight [d].
    """

    recompute: frozenset[str] = frozenset()  # "core_attention": the core runs again in backward, see nn/recompute

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
        self.kernels = kernels
        self.num_groups, self.head_dim = num_groups, head_dim
        self.core = AttentionCore(name, dropout=dropout, mesh=mesh)
        self.eps = head_norm_eps or 0.0
        self.q_norm = self.k_norm = None
        if head_norm_eps is not None:
            self.q_norm, self.k_norm = (_HeadNorm(head_dim, mesh=mesh, dtype=dtype) for _ in "qk")

    def forward(self, y: Tensor, context: Context, rebuild: Rebuild | None = None) -> Tensor:
        qkv = self.qkv(y, rebuild)
        qkv = qkv.view(*qkv.shape[:2], self.num_groups, -1, self.head_dim)
        order = self.core.q_order(qkv.dtype, qkv.device, context)
        q, k, v = _SplitRotate.apply(
            qkv,
            context.cos,
            context.sin,
            None if self.q_norm is None else self.q_norm.weight,
            None if self.k_norm is None else self.k_norm.weight,
            self.eps,
            self.head_dim**-0.5,
            order,
            self.kernels,
        )
        q = q.transpose(2, 3) if order == HEADS_FIRST else q
        core = partial(checkpointed, self.core) if "core_attention" in self.recompute else self.core
        branch: Tensor = self.out(core(q, k, v, context))
        return branch


class _HeadNorm(nn.Module):
    """The weight of an RMSNorm over head dims; ranks hold different heads, so its gradient is partial over tp."""

    def __init__(self, head_dim: int, *, mesh: Mesh, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = declare(Layout((head_dim,), grad_sum=("tp",)), Init(mean=1.0), mesh=mesh, dtype=dtype)
