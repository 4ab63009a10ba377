"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1; DeepSeek-V3, arXiv:2412.19437, section 2.1).

Queries come from a latent of q_lora_rank (or from the hidden state), keys and values from one of kv_lora_rank; a part
of every query head and one key that all heads share carry the positions. Tensor parallel over heads: the
down-projections and the norms of the latents are whole on every rank, the up-projections are split. Under sequence
parallelism the down-projections work on sequence shards, and what is gathered are the latents: narrower than the
hidden state that ordinary attention gathers.

Shapes: S sequence, B micro-batch, a heads of this rank, n and p the parts of a query or key head without and with
positions, d = n + p, v the width of a value head.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from megafp8.core.layout import Layout
from megafp8.fp8.linear import LinearState
from megafp8.nn.attention_core import AttentionCore
from megafp8.nn.context import Context
from megafp8.nn.gemm import Split, linear
from megafp8.nn.kernels import Kernels, wide
from megafp8.nn.linear import ColumnLinear, RowLinear, enter
from megafp8.nn.norm import RMSNorm
from megafp8.nn.parameter import Init, declare
from megafp8.nn.recompute import Rebuild, checkpointed
from megafp8.parallel.mesh import Mesh

Tensor = torch.Tensor

LATENT_EPS = 1e-6  # of the latents' norms in DeepSeek's own code, whatever rms_norm_eps is


def _pairs(x: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    first, second = x.unflatten(-1, (-1, 2)).unbind(-1) if interleaved else x.chunk(2, -1)
    return first, second


def _joined(first: Tensor, second: Tensor, interleaved: bool) -> Tensor:
    return torch.stack((first, second), -1).flatten(-2) if interleaved else torch.cat((first, second), -1)


def latent_split(
    q: Tensor, kv: Tensor, shared: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Projections to q, k, v as attention wants them, in one pass.

    Args:
        q: [S, B, a, n + p]; kv: [S, B, a, n + v]; shared: [S, B, p], the key of all heads.
        cos, sin: [S, 1 or B, p / 2] in fp32.
        interleaved: pairs (2j, 2j + 1) are rotated, else (j, j + p / 2); rotated parts always come as two halves.
        scale: of q, applied before it is rounded.

    Returns:
        q, k [B, a, S, d] and v [B, a, S, v], contiguous.
    """
    heads, p = q.shape[2], shared.shape[-1]
    n = q.shape[-1] - p
    parts = []
    for x in (q[..., n:], shared.unsqueeze(2)):
        first, second = _pairs(wide(x), interleaved)
        c, s = cos.unsqueeze(2), sin.unsqueeze(2)
        parts.append(torch.cat((first * c - second * s, second * c + first * s), -1))
    rotated_q, rotated_k = parts
    out_q = torch.cat(((wide(q[..., :n]) * scale).to(q.dtype), (rotated_q * scale).to(q.dtype)), -1)
    out_k = torch.cat((kv[..., :n], rotated_k.to(q.dtype).expand(-1, -1, heads, -1)), -1)
    out_q, out_k, out_v = (x.permute(1, 2, 0, 3).contiguous() for x in (out_q, out_k, kv[..., n:]))
    return out_q, out_k, out_v


def latent_split_backward(
    dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, kv and the shared key (summed over heads in fp32); dk, dv may be wider than dq."""
    p = 2 * cos.shape[-1]
    n = dq.shape[-1] - p
    gq, gk, gv = (x.permute(2, 0, 1, 3) for x in (dq, dk, dv))
    parts = []
    for g in (wide(gq[..., n:]) * scale, wide(gk[..., n:]).sum(2, keepdim=True)):
        first, second = g.chunk(2, -1)
        c, s = cos.unsqueeze(2), sin.unsqueeze(2)
        parts.append(_joined(first * c + second * s, second * c - first * s, interleaved).to(dq.dtype))
    out_q = torch.cat(((wide(gq[..., :n]) * scale).to(dq.dtype), parts[0]), -1)
    out_kv = torch.cat((gk[..., :n].to(dq.dtype), gv.to(dq.dtype)), -1)
    return out_q, out_kv, parts[1].squeeze(2).contiguous()


KERNELS = (latent_split, latent_split_backward)


class _LatentSplit(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        kv: Tensor,
        shared: Tensor,
        cos: Tensor,
        sin: Tensor,
        interleaved: bool,
        scale: float,
        kernels: Kernels,
    ) -> Any:
        ctx.save_for_backward(cos, sin)  # linear in everything else
        ctx.interleaved, ctx.scale, ctx.kernels = interleaved, scale, kernels
        return kernels.latent_split(q, kv, shared, cos, sin, interleaved, scale)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        cos, sin = ctx.saved_tensors
        made = ctx.kernels.latent_split_backward(*grads, cos, sin, ctx.interleaved, ctx.scale)
        return *made, None, None, None, None, None


class ReplicatedLinear(nn.Module):
    """[S or S/tp, B, K] -> [S or S/tp, B, N]; weight [N, K], whole on every tp rank.

    Under sequence parallelism each rank sees its tokens only, and the weight's gradient is a partial sum over tp.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        std: float,
        state: LinearState | None,
        mesh: Mesh,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.state = state
        self.split = Split("column", pieces=mesh.group("tp") if mesh.sequence_parallel else None)
        layout = Layout((out_features, in_features), grad_sum=("tp",) if mesh.sequence_parallel else ())
        self.weight = declare(layout, Init(std), mesh=mesh, dtype=dtype)

    def forward(self, x: Tensor, rebuild: Rebuild | None = None) -> Tensor:
        """`rebuild`, if given, makes x again in the backward pass, so that x is not kept."""
        return linear(x, self.weight, None, self.state, self.split, rebuild)


class LatentAttention(nn.Module):
    """y [S, B, H] -> the attention branch [S, B, H] (shards along S under sequence parallelism).

    Parameters: q_down.weight [q_lora_rank, H], q_norm.weight, q_up.weight [heads d, q_lora_rank], or q.weight
    [heads d, H] without a latent of queries; kv_down.weight [kv_lora_rank + p, H] (the shared key last),
    kv_norm.weight, kv_up.weight [heads (n + v), kv_lora_rank]; out.weight [H, heads v].
    """

    recompute: frozenset[str] = frozenset()  # "core_attention": the core runs again in backward, see nn/recompute

    def __init__(
        self,
        *,
        q_down: ReplicatedLinear | None,
        q_norm: RMSNorm | None,
        q_up: ColumnLinear,
        kv_down: ReplicatedLinear,
        kv_norm: RMSNorm,
        kv_up: ColumnLinear,
        out: RowLinear,
        name: str,
        num_heads: int,
        rope_dim: int,
        scale: float,
        interleaved: bool,
        dropout: float,
        mesh: Mesh,
        kernels: Kernels,
    ) -> None:
        super().__init__()
        self.q: Any = None
        self.q_down: Any = None
        self.q_norm: Any = None
        self.mesh, self.kernels = mesh, kernels
        self.core = AttentionCore(name, dropout=dropout, mesh=mesh)
        self.num_heads, self.rope_dim, self.scale = num_heads, rope_dim, scale
        self.interleaved = interleaved
        if q_down is None:
            self.q = q_up
        else:
            self.q_down, self.q_norm, self.q_up = q_down, q_norm, q_up
        self.kv_down, self.kv_norm, self.kv_up, self.out = kv_down, kv_norm, kv_up, out

    def forward(self, y: Tensor, context: Context, rebuild: Rebuild | None = None) -> Tensor:
        again = rebuild is not None
        if self.q_down is None:
            q = self.q(y, rebuild)
        else:
            q = _expand(self.q_down(y, rebuild), self.q_norm, self.q_up, again)
        latent, shared = self.kv_down(y, rebuild).split((self.kv_norm.weight.shape[0], self.rope_dim), -1)
        kv = _expand(latent, self.kv_norm, self.kv_up, again)
        q, kv = (x.view(*x.shape[:2], self.num_heads, -1) for x in (q, kv))
        cos, sin = context.cos, context.sin
        q, k, v = _LatentSplit.apply(
            q, kv, enter(shared, self.mesh), cos, sin, self.interleaved, self.scale, self.kernels
        )
        core = partial(checkpointed, self.core) if "core_attention" in self.recompute else self.core
        branch: Tensor = self.out(core(q.unsqueeze(3), k, v, context))  # every head is a kv group of its own
        return branch


def _expand(latent: Tensor, norm: RMSNorm, up: ColumnLinear, again: bool) -> Tensor:
    """The latent's norm through its up-projection; `again`: the norm is made anew in backward, not kept."""
    _, y = norm(latent)
    result: Tensor = up(y, partial(norm.again, latent.detach()) if again else None)
    return result
