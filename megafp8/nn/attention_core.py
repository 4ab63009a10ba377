"""The attention core: softmax(q k^T) v, causal, within documents, on whatever part of the sequence the rank has.

At cp = 1: torch's fused SDPA, or the blocked kernel for 16-bit floats on a CPU, or the blocks that can drop weights.
At cp > 1 `mesh.cp_exchange` says how a query gets to see the keys of other ranks: keys and values go around a ring or
are gathered (attention_context), or ranks change from a share of the tokens to a share of the heads (DeepSpeed Ulysses,
arXiv:2309.14509) and each does whole sequences. All give the result of one process.
"""

from __future__ import annotations

import math
from typing import cast

import torch
import torch.nn.functional as F

from megafp8.nn import attention_blocks, attention_flash
from megafp8.nn.attention_context import BlockKernel, Call, attend
from megafp8.nn.cache import attend_cached
from megafp8.nn.context import Context
from megafp8.nn.dropout import WeightDropout, weight_dropout
from megafp8.parallel.context import heads_to_sequence, sequence_to_heads
from megafp8.parallel.mesh import Mesh

Tensor = torch.Tensor

HEADS_FIRST = (1, 2, 3, 0, 4)  # of (S, B, g, r, d): memory in the order [B, g, r, S, d]
ROWS_FIRST = (1, 2, 0, 3, 4)  # [B, g, S, r, d]: the r heads of a group are rows of one GEMM with its k


class AttentionCore:
    """The core of one attention layer.

    Called with q [B, g, S/cp, r, d], already scaled by its 1 / sqrt(d), k [B, g, S/cp, d] and v [B, g, S/cp, e]: this
    rank's tokens and its heads (g kv heads, r query heads for each); e may differ from d. Returns [S/cp, B, g * r * e].
    q may lie in memory in any order; `q_order` says which is read without a copy.

    Args:
        name: of the layer, from which its dropout masks come.
        dropout: rate of attention weights dropped where the context has a key.
        mesh: with cp and tp; head h of a rank is head (tp's coordinate * g * r + h) of the model.
    """

    def __init__(self, name: str, *, dropout: float, mesh: Mesh) -> None:
        self.name, self.rate, self.mesh = name, dropout, mesh

    def q_order(self, dtype: torch.dtype, device: torch.device, context: Context) -> tuple[int, ...]:
        """The order of q's dims (S, B, g, r, d) in memory that suits the kernel: ROWS_FIRST or HEADS_FIRST."""
        rows = self._drops(context) or self._blocked(dtype, device)
        if self.mesh.size("cp") > 1:
            rows = rows or device.type == "cpu" or self.mesh.cp_exchange == "all_to_all"
        return ROWS_FIRST if rows else HEADS_FIRST

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, context: Context) -> Tensor:
        if context.cache is not None:
            k_all, v_all = context.cache.extend(self.name, k, v)
            if not context.cache.is_first:
                return attend_cached(q, k_all, v_all, context.cache.hidden())
        if self.mesh.size("cp") == 1:
            return self._whole(q, k, v, context, self._dropout(q, context, q.shape[2], 1, 0), self.mesh)
        if self.mesh.cp_exchange == "all_to_all":
            return self._by_heads(q, k, v, context)
        dropout = self._dropout(q, context, q.shape[2] * self.mesh.size("cp"), 1, 0)
        return self._attend(q, k, v, context, dropout, self.mesh)

    def _drops(self, context: Context) -> bool:
        return self.rate > 0 and context.dropout is not None

    @staticmethod
    def _blocked(dtype: torch.dtype, device: torch.device) -> bool:
        return device.type == "cpu" and dtype in (torch.bfloat16, torch.float16)

    def _dropout(self, q: Tensor, context: Context, length: int, shares: int, share: int) -> WeightDropout | None:
        """Dropout among `length` tokens of q's heads, which are share `share` of `shares` of this tp rank's."""
        if self.rate == 0 or context.dropout is None:
            return None
        g, r = q.shape[1], q.shape[3]
        tp, before = self.mesh.size("tp"), self.mesh.coord("tp") * shares + share
        return weight_dropout(
            context.dropout,
            self.rate,
            f"{self.name}.weights",
            groups=g,
            r=r,
            first=before * g * r,
            num_heads=g * r * tp * shares,
            places=torch.arange(length, device=q.device),
        )

    def _whole(
        self, q: Tensor, k: Tensor, v: Tensor, context: Context, dropout: WeightDropout | None, mesh: Mesh
    ) -> Tensor:
        """This rank has whole sequences."""
        blocked = self._blocked(q.dtype, q.device)
        # torch's CPU kernel takes values as wide as keys only; what it falls back to keeps matrices of S x S
        uneven = q.device.type == "cpu" and q.shape[-1] != v.shape[-1] and not blocked
        if dropout is not None or uneven:
            return self._attend(q, k, v, context, dropout, mesh)
        kernel = attention_blocks.blocked if blocked else fused
        return kernel(q, k, v, context.segment_ids)

    @staticmethod
    def _attend(q: Tensor, k: Tensor, v: Tensor, context: Context, dropout: WeightDropout | None, mesh: Mesh) -> Tensor:
        kernel = attention_flash if attention_flash.serves(q, v, dropout is not None) else attention_blocks
        return attend(q, k, v, Call(mesh, cast(BlockKernel, kernel), context.segment_ids, dropout))

    def _by_heads(self, q: Tensor, k: Tensor, v: Tensor, context: Context) -> Tensor:
        """Whole sequences of a share of the heads. kv heads that cp does not divide are repeated until it does."""
        cp, g, r = self.mesh.size("cp"), q.shape[1], q.shape[3]
        copies = cp // math.gcd(cp, g)
        assert r % copies == 0, f"{g * r} heads do not divide over cp {cp}"
        if copies > 1:
            q = q.unflatten(3, (copies, r // copies)).transpose(2, 3).flatten(1, 2)
            k, v = (x.repeat_interleave(copies, 1) for x in (k, v))
        q, k, v = (heads_to_sequence(x, self.mesh, 1, 2) for x in (q, k, v))
        dropout = self._dropout(q, context, q.shape[2], cp, self.mesh.coord("cp"))
        out = self._whole(q, k, v, context, dropout, Mesh.single())
        return sequence_to_heads(out, self.mesh, 2, 0)


def fused(q: Tensor, k: Tensor, v: Tensor, segment_ids: Tensor | None) -> Tensor:
    """Whole causal attention by torch's SDPA.

    Args:
        q: [B, g, S, r, d], scaled; k: [B, g, S, d]; v: [B, g, S, e]; segment_ids: [B, S] or None.

    Returns:
        [S, B, g * r * e].
    """
    mask = None
    if segment_ids is not None:
        mask = (segment_ids[:, :, None] == segment_ids[:, None, :]).tril()[:, None]
    heads, shared = q.transpose(2, 3).flatten(1, 2), q.shape[3] > 1
    out = F.scaled_dot_product_attention(
        heads, k, v, attn_mask=mask, is_causal=mask is None, scale=1.0, enable_gqa=shared
    )
    return out.permute(2, 0, 1, 3).flatten(2)
