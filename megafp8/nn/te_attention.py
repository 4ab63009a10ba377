"""The attention core by Transformer Engine's DotProductAttention: cuDNN's or FlashAttention's kernels.

Our own core stays where Transformer Engine has none of the same meaning: dropout by place, documents over context
parallel ranks, kv heads that all_to_all would have to repeat, latent attention over context parallel ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from megafp8.nn.attention_core import HEADS_FIRST, AttentionCore
from megafp8.nn.context import Context
from megafp8.nn.te_maker import Maker
from megafp8.parallel.mesh import Mesh

Tensor = torch.Tensor


@dataclass(frozen=True, eq=False)
class PackedContext(Context):
    """A Context with the documents as Transformer Engine wants them.

    Attributes:
        ends: [documents + 1] int32, where documents begin and end when the B sequences lie one after the other.
        longest: of the documents.
    """

    ends: Tensor | None = None
    longest: int = 0


def packed(context: Context) -> Context:
    """With documents, the context as a PackedContext; waits for the device once a micro-batch."""
    ids = context.segment_ids
    if ids is None:
        return context
    starts = torch.ones_like(ids, dtype=torch.bool)
    starts[:, 1:] = ids[:, 1:] != ids[:, :-1]
    ends = torch.cat((starts.flatten().nonzero().flatten(), torch.tensor([ids.numel()], device=ids.device)))
    longest = int((ends[1:] - ends[:-1]).max())
    return PackedContext(**vars(context), ends=ends.to(torch.int32), longest=longest)


def own_core_reason(mesh: Mesh, *, groups: int, dims: tuple[int, int], dropout: float) -> str | None:
    """Why the own core is taken for every call; None: Transformer Engine's is."""
    cp = mesh.size("cp")
    if dropout:
        return "attention_dropout drops by place"
    if cp > 1 and mesh.cp_exchange == "all_to_all" and groups % cp:
        return f"all_to_all repeats {groups} kv heads over cp {cp}"
    if cp > 1 and dims[0] != dims[1]:
        return "latent attention over cp"
    return None


class EngineCore(AttentionCore):
    """As AttentionCore; heads of `dims` (of q and k, of v), `heads` query and `groups` kv heads of this rank."""

    def __init__(
        self, maker: Maker, name: str, *, dropout: float, heads: int, groups: int, dims: tuple[int, int]
    ) -> None:
        super().__init__(name, dropout=dropout, mesh=maker.mesh)
        self.reason = own_core_reason(maker.mesh, groups=groups, dims=dims, dropout=dropout)
        layer = int(name.split(".")[1])
        self.inner = None if self.reason else maker.attention(name, heads, groups, dims, layer)

    def q_order(self, dtype: torch.dtype, device: torch.device, context: Context) -> tuple[int, ...]:
        """As of AttentionCore."""
        return super().q_order(dtype, device, context) if self._is_own(context) else HEADS_FIRST

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, context: Context) -> Tensor:
        """q [B, g, S, r, d], k and v [B, g, S, d] -> [S, B, g * r * e]."""
        if self._is_own(context):
            return super().__call__(q, k, v, context)
        inner: Any = self.inner
        if not isinstance(context, PackedContext):
            q = q.permute(2, 0, 1, 3, 4).flatten(2, 3)
            k, v = (x.permute(2, 0, 1, 3).contiguous() for x in (k, v))
            result: Tensor = inner(q.contiguous(), k, v)
            return result
        batch, length = k.shape[0], k.shape[2]
        q = q.transpose(1, 2).flatten(2, 3).flatten(0, 1)
        k, v = (x.transpose(1, 2).flatten(0, 1) for x in (k, v))
        out: Tensor = inner(
            q.contiguous(),
            k.contiguous(),
            v.contiguous(),
            qkv_format="thd",
            attn_mask_type="padding_causal",
            cu_seqlens_q=context.ends,
            cu_seqlens_kv=context.ends,
            max_seqlen_q=context.longest,
            max_seqlen_kv=context.longest,
        )
        return out.view(batch, length, -1).transpose(0, 1)

    def _is_own(self, context: Context) -> bool:
        return self.inner is None or (context.segment_ids is not None and self.mesh.size("cp") > 1)
