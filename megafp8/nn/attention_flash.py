"""Attention of some queries against some keys through torch's CUDA kernels, with the log-sum-exp: the same pair of
functions as `attention_blocks`.

FlashAttention-2 where nothing but the causal mask hides anything (it aligns the mask at the end, as we do), the
memory-efficient kernel with a bias where documents do. Neither is called through `scaled_dot_product_attention`, which
keeps the log-sum-exp to itself; the calls are those of torch's own DTensor ring attention.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from megafp8.nn.attention_blocks import Sight

Tensor = torch.Tensor

_ATEN = torch.ops.aten
_MAX_WIDTH = 256  # of a head in FlashAttention-2
_ALIGN = 8  # elements: 16 bytes in 16-bit floats
_LSE_ALIGN = 32  # the memory-efficient kernel pads rows of its log-sum-exp to this
_HIDDEN = -30000.0  # added to a score: exp gives 0 in fp32 beside any visible key, and no NaN where there is none


def serves(q: Tensor, v: Tensor, dropping: bool) -> bool:
    """Whether these kernels can do it: 16-bit floats on a GPU, head dims in eights, no weights dropped by place."""
    widths = (q.shape[-1], v.shape[-1])
    narrow = q.dtype in (torch.bfloat16, torch.float16)
    return q.is_cuda and narrow and not dropping and all(w % _ALIGN == 0 and w <= _MAX_WIDTH for w in widths)


def forward(q: Tensor, k: Tensor, v: Tensor, sight: Sight) -> tuple[Tensor, Tensor]:
    """q [B, g, L, r, d], k [B, g, K, d], v [B, g, K, e] -> out [B, g, L, r, e] in q's dtype, lse [B, g, L, r] fp32."""
    shape = q.shape[:4]
    if sight.segments is None:
        width = max(q.shape[-1], v.shape[-1])
        flat = [_padded(x, width) for x in (_heads(q), k, v)]
        result = _ATEN._scaled_dot_product_flash_attention(*flat, 0.0, sight.causal, scale=1.0)
        out, lse = result[0][..., : v.shape[-1]], result[1]
    else:
        bias = _bias(q, k, sight)
        out, lse = _ATEN._scaled_dot_product_efficient_attention(
            _heads(q), *_repeated(k, v, shape[3]), bias, True, 0.0, False, scale=1.0
        )[:2]
    return _groups(out, shape), _groups(lse[..., : shape[2], None], shape).squeeze(-1)


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, sight: Sight
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients dq, dk, dv in q's dtype; dout and out [B, g, L, r, e] of the whole attention, lse over all keys."""
    shape, (_, _, length, r, d) = q.shape[:4], q.shape
    dout, out = (_heads(x.to(q.dtype)) for x in (dout, out))
    log_sum = _heads(lse.float().unsqueeze(-1)).squeeze(-1)
    none = torch.zeros((), dtype=torch.int64, device=q.device)  # of dropout, which is not used
    if sight.segments is None:
        width = max(d, v.shape[-1])
        grad, query, key, value, result = (_padded(x, width) for x in (dout, _heads(q), k, v, out))
        dq, dk, dv = _ATEN._scaled_dot_product_flash_attention_backward(
            grad, query, key, value, result, log_sum.contiguous(), None, None, length, k.shape[2], 0.0, sight.causal,
            none, none, scale=1.0,
        )  # fmt: skip
        return _groups(dq[..., :d], shape), dk[..., :d], dv[..., : v.shape[-1]]
    rows = -(-length // _LSE_ALIGN) * _LSE_ALIGN
    log_sum = F.pad(log_sum, (0, rows - length), value=float("inf"))
    dq, dk, dv, _ = _ATEN._scaled_dot_product_efficient_attention_backward(
        dout, _heads(q), *_repeated(k, v, r), _bias(q, k, sight), out, log_sum, none, none, 0.0,
        [True, True, True, False], False, scale=1.0,
    )  # fmt: skip
    dk, dv = (x.unflatten(1, (-1, r)).sum(2, dtype=torch.float32) for x in (dk, dv))
    return _groups(dq, shape), dk, dv


def _heads(x: Tensor) -> Tensor:
    """[B, g, L, r, d] -> [B, g * r, L, d]; a view where the memory is so ordered."""
    return x.transpose(2, 3).flatten(1, 2)


def _groups(x: Tensor, shape: torch.Size) -> Tensor:
    """[B, g * r, L, d] -> [B, g, L, r, d]."""
    return x.unflatten(1, (shape[1], shape[3])).transpose(2, 3)


def _padded(x: Tensor, width: int) -> Tensor:
    """Zeros behind the last dim: they add nothing to a score or an output."""
    return x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))


def _repeated(k: Tensor, v: Tensor, r: int) -> tuple[Tensor, Tensor]:
    return k.repeat_interleave(r, 1), v.repeat_interleave(r, 1)


def _bias(q: Tensor, k: Tensor, sight: Sight) -> Tensor:
    """[B, g * r, L, K], one matrix for all heads of a sample, rows aligned as the kernel wants them."""
    assert sight.segments is not None
    (batch, g, length, r, _), keys = q.shape, k.shape[2]
    ours, theirs = sight.segments
    hidden = ours[:, :, None] != theirs[:, None, :]
    if sight.causal:
        ahead = keys - length
        hidden |= torch.ones(length, keys, dtype=torch.bool, device=q.device).triu(ahead + 1)
    bias = q.new_zeros(batch, length, -(-keys // _ALIGN) * _ALIGN)[..., :keys]
    bias.masked_fill_(hidden, _HIDDEN)
    return bias[:, None].expand(batch, g * r, length, keys)
