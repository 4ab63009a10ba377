"""Tokens to the rows that travel to experts, and the experts' results back to tokens: each row is touched once.

A gather straight into the order in which rows are sent, and a weighted sum straight out of it; no scatter, so that
the result does not depend on the order of threads. Sums are in fp32 (fp64 for fp64), rounded once.

Shapes: N tokens, K choices, R rows, H hidden.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from megafp8.fp8.linear import LinearState
from megafp8.fp8.quantized import QuantizedTensor
from megafp8.parallel.expert import Dispatch

Tensor = torch.Tensor


def spread(x: Tensor, dispatch: Dispatch) -> Tensor:
    """Tokens [N, H] -> the rows [R, H] that travel, by expert."""
    result: Tensor = _Spread.apply(x, dispatch.order, dispatch.places, dispatch.kept)
    return result


def send_codes(
    x: Tensor, dispatch: Dispatch, state: LinearState, group: dist.ProcessGroup | None
) -> tuple[Tensor, QuantizedTensor]:
    """Tokens [N, H] to their experts as FP8 codes: each token is quantized once, and one byte an element travels.

    Gradients come back in x's dtype.

    Returns:
        rows [R', H] of this rank's experts without values, for the gradient alone; and their codes.
    """
    codes = state.quantize("input", x.detach(), record=torch.is_grad_enabled(), group=group)
    sent = codes.rows.to_bytes().index_select(0, dispatch.order // dispatch.places.shape[1])
    there = dispatch.there(sent)
    rows: Tensor = _Stand.apply(x, len(there), dispatch, dispatch.places, dispatch.kept)
    return rows, QuantizedTensor(codes.rows.with_bytes(there))


def combine(rows: Tensor, weights: Tensor, dispatch: Dispatch) -> Tensor:
    """Results [R, H] in the order of `spread`, weights [N, K] (fp32 or fp64) -> each token's weighted sum [N, H].

    A dropped assignment counts as zero.
    """
    if dispatch.kept is not None:
        weights = weights * dispatch.kept
    result: Tensor = _Combine.apply(rows, weights, dispatch.order, dispatch.places)
    return result


def sum_rows(rows: Tensor, places: Tensor, weights: Tensor | None) -> Tensor:
    """[R, H] -> [N, H]: the sum over K of rows[places] * weights."""
    if not len(rows):
        return rows.new_zeros((len(places), rows.shape[1]))
    if places.shape[1] == 1 and weights is None:
        return rows.index_select(0, places[:, 0])
    wide = torch.promote_types(rows.dtype, torch.float32)
    total = torch.zeros((len(places), rows.shape[1]), dtype=wide, device=rows.device)
    for k in range(places.shape[1]):
        part = rows.index_select(0, places[:, k])
        total = total + part if weights is None else torch.addcmul(total, part.to(wide), weights[:, k : k + 1])
    return total.to(rows.dtype)


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, places: Tensor, kept: Tensor | None) -> Tensor:
        ctx.save_for_backward(places, kept)
        return x.index_select(0, order // places.shape[1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        places, kept = ctx.saved_tensors
        wide = torch.promote_types(grads[0].dtype, torch.float32)
        return sum_rows(grads[0], places, None if kept is None else kept.to(wide)), None, None, None


class _Stand(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: int, dispatch: Dispatch, places: Tensor, kept: Tensor | None) -> Tensor:
        ctx.save_for_backward(places, kept)
        ctx.dispatch = dispatch
        return x.new_zeros(1, 1).expand(rows, x.shape[1])  # the memory of one element

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        places, kept = ctx.saved_tensors
        grad = ctx.dispatch.back(grads[0])
        wide = torch.promote_types(grad.dtype, torch.float32)
        return sum_rows(grad, places, None if kept is None else kept.to(wide)), None, None, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, order: Tensor, places: Tensor) -> Tensor:
        # through save_for_backward all, so that activation recompute can free and remake them
        ctx.save_for_backward(rows, weights, order, places)
        return sum_rows(rows, places, weights)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        rows, weights, order, places = ctx.saved_tensors
        grad, choices = grads[0], weights.shape[1]
        share = weights.flatten().index_select(0, order).unsqueeze(1)
        drows = (grad.index_select(0, order // choices) * share).to(rows.dtype)
        if not len(rows):
            return drows, torch.zeros_like(weights), None, None
        wide = grad.to(weights.dtype)
        products = [(rows.index_select(0, places[:, k]) * wide).sum(1) for k in range(choices)]
        return drows, torch.stack(products, 1), None, None
