"""Smooth-SwiGLU: what goes into an FP8 GEMM has all channels at one magnitude, and the weight's columns undo it.

SwiGLU multiplies two linears; where their weights align, single channels grow by orders of magnitude, late in training
and suddenly. Under one scale for a tensor such a channel is clipped by a scale from earlier steps, or pushes all others
towards zero. So each channel i of the hidden tensor is divided by s_i, its largest magnitude rounded down to a power of
two, and column i of the next weight is multiplied by it. Both are exact in any binary format, so that the function and
its gradients are unchanged; only what is rounded to FP8 changes. s comes from the tensor itself, and with it the
weight differs in each micro-batch: it is quantized anew each time, with a scale of its own whatever the recipe.

Source: Fishman et al. 2024, "Scaling FP8 training to trillion-token LLMs", arXiv:2409.12517, section 4.4.

Shapes: R rows, E experts (1 of a dense MLP), F channels of this rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

Tensor = torch.Tensor


@torch.no_grad()
def channel_scales(hidden: Tensor, counts: Sequence[int]) -> Tensor:
    """A power of two for each channel of each expert's rows, [E, F] in `hidden`'s dtype; hidden [R, F].

    1 for a channel that is all zero, has no rows or is not finite.
    """
    peaks = []
    for rows in hidden.split(list(counts)):
        low, high = torch.aminmax(rows, dim=0) if len(rows) else (rows.new_zeros(rows.shape[1]),) * 2
        peaks.append(torch.maximum(high, -low))
    peak = torch.stack(peaks)
    peak = peak.to(torch.promote_types(peak.dtype, torch.float32))
    usable = torch.isfinite(peak) & (peak >= torch.finfo(hidden.dtype).tiny)
    exponent = torch.frexp(torch.where(usable, peak, 1.0)).exponent - 1
    return torch.ldexp(torch.ones_like(peak), exponent).to(hidden.dtype)


class _Smooth(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, scales: Tensor, counts: Sequence[int]) -> Tensor:
        ctx.inverse, ctx.counts = scales.reciprocal(), counts
        return _by_channel(hidden, ctx.inverse, counts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _by_channel(grads[0], ctx.inverse, ctx.counts), None, None


def _by_channel(x: Tensor, factors: Tensor, counts: Sequence[int]) -> Tensor:
    if len(counts) == 1:
        return x * factors[0]
    return torch.cat([rows * mine for rows, mine in zip(x.split(list(counts)), factors, strict=True)])


def smooth(hidden: Tensor, scales: Tensor, counts: Sequence[int]) -> Tensor:
    """hidden [..., F] divided by `scales` [E, F], each expert's rows by its own; leading dims only where E = 1."""
    y: Tensor = _Smooth.apply(hidden, scales, counts)
    return y
