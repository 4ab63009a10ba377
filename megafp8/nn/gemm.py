"""The three GEMMs of a linear layer as one autograd function, in the compute dtype or in FP8.

Weight gradients go into the current store of nn/deferred, if there is one.
"""

from __future__ import annotations

from typing import Any

import torch

from megafp8.fp8.linear import LinearState
from megafp8.fp8.quantized import QuantizedTensor
from megafp8.nn.deferred import current_store, deliver
from megafp8.nn.recompute import Rebuild

Tensor = torch.Tensor
Operand = Tensor | QuantizedTensor


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: LinearState | None, rebuild: Rebuild | None = None
) -> Tensor:
    """x [..., K] times weight [..., K] (its leading dims flattened to N) plus bias -> [..., N] in x's dtype.

    `rebuild` makes x again in the backward pass, bit for bit, so that it is not kept; in FP8 the codes are kept.
    """
    y: Tensor = _Linear.apply(x, weight, bias, state, rebuild, torch.is_grad_enabled())
    return y


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        state: LinearState | None,
        rebuild: Rebuild | None,
        record: bool,
    ) -> Tensor:
        flat, matrix = x.detach().reshape(-1, x.shape[-1]), weight.detach().flatten(0, -2)
        vector = None if bias is None else bias.detach().flatten()
        ctx.state, ctx.weight, ctx.x_shape, ctx.x_dtype, ctx.rebuild = state, weight, x.shape, x.dtype, rebuild
        ctx.bias = None if bias is None else (bias.shape, bias.dtype)
        if state is None:
            y = torch.nn.functional.linear(flat, matrix, vector)
            ctx.save_for_backward(weight, *(() if rebuild else (x,)))
        else:
            codes = state.quantize("input", flat, record=record)
            ctx.matrix, ctx.x_format = state.quantized_weight(matrix, record=record), codes.format
            y = state.backend.fprop(codes, ctx.matrix, vector, x.dtype)
            # through save_for_backward, so that activation recompute can free and remake it
            ctx.save_for_backward(codes.data, codes.scale_inv)
        return y.view(*x.shape[:-1], matrix.shape[0])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        grad = grad_output.reshape(-1, grad_output.shape[-1]).contiguous()
        state: LinearState | None = ctx.state
        dx = dw = db = None
        weight, saved = ctx.weight, ctx.saved_tensors
        operand: Operand = grad if state is None else state.quantize("grad_output", grad, record=True)
        matrix = saved[0].flatten(0, -2) if state is None else ctx.matrix
        if ctx.needs_input_grad[0]:
            dx = dgrad(operand, matrix, state, ctx.x_dtype).view(ctx.x_shape)
        if ctx.needs_input_grad[1]:
            rebuild, x_format = ctx.rebuild, getattr(ctx, "x_format", None)

            def weight_grad() -> Tensor:
                if x_format is not None:
                    x: Operand = QuantizedTensor(saved[0], saved[1], x_format)
                else:
                    made = rebuild() if rebuild else saved[1]
                    x = made.reshape(-1, made.shape[-1])
                return wgrad(operand, x, state, weight.dtype).view(weight.shape)

            store = current_store()
            if store is None:
                dw = weight_grad()
            else:
                store.defer(lambda: deliver(weight, weight_grad()))
        if ctx.needs_input_grad[2]:
            shape, dtype = ctx.bias
            db = grad.sum(0, dtype=torch.promote_types(dtype, torch.float32)).to(dtype).view(shape)
        return dx, dw, db, None, None, None


def dgrad(grad: Any, weight: Any, state: LinearState | None, dtype: torch.dtype) -> Tensor:
    """grad [M, N] times weight [N, K] -> [M, K] of `dtype`."""
    return grad @ weight if state is None else state.backend.dgrad(grad, weight, dtype)


def wgrad(grad: Any, x: Any, state: LinearState | None, dtype: torch.dtype) -> Tensor:
    """grad [M, N] transposed times x [M, K] -> [N, K] of `dtype`."""
    return grad.t() @ x if state is None else state.backend.wgrad(grad, x, dtype)
