"""The MLP: one GEMM to the ffn width (gate and up together), the activation in one pass, one GEMM back.

Tensor parallel over ffn columns. Shapes: [S, B, H] in and out (shards along S under sequence parallelism).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from megafp8.nn.context import Context
from megafp8.nn.kernels import Kernels
from megafp8.nn.linear import ColumnLinear, RowLinear
from megafp8.nn.recompute import Rebuild
from megafp8.nn.smooth import channel_scales, smooth

Tensor = torch.Tensor


class _Activation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str, kernels: Kernels) -> Tensor:
        ctx.save_for_backward(x)
        ctx.name, ctx.kernels = name, kernels
        y: Tensor = getattr(kernels, name)(x)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return getattr(ctx.kernels, f"{ctx.name}_backward")(grads[0], *ctx.saved_tensors), None, None


def activation(x: Tensor, name: str, kernels: Kernels) -> Tensor:
    """ "swiglu" of [..., 2, F] or "gelu" of [..., F]; keeps x for backward."""
    y: Tensor = _Activation.apply(x, name, kernels)
    return y


class SwiGLU(nn.Module):
    """Parameters: gate_up.weight [2, F, H] (gate first), down.weight [H, F], and biases if asked for.

    `smooth`: channels are brought to one magnitude between the two linears (nn/smooth).
    """

    recompute: frozenset[str] = frozenset()  # "activation": its output is made again in backward, see nn/recompute

    def __init__(self, gate_up: ColumnLinear, down: RowLinear, *, kernels: Kernels, smooth: bool = False) -> None:
        super().__init__()
        self.gate_up, self.down, self.kernels, self.smooth = gate_up, down, kernels, smooth

    def forward(self, y: Tensor, context: Context, rebuild: Rebuild | None = None) -> Tensor:
        x = self.gate_up(y, rebuild)
        x = x.view(*x.shape[:-1], 2, -1)
        hidden = activation(x, "swiglu", self.kernels)
        kept, again = x.detach(), "activation" in self.recompute
        if not self.smooth:
            return self.down(hidden, (lambda: self.kernels.swiglu(kept)) if again else None)
        flat = hidden.detach().flatten(0, -2)
        scales, counts = channel_scales(flat, [len(flat)]), [len(flat)]
        rebuild = (lambda: smooth(self.kernels.swiglu(kept), scales, counts)) if again else None
        return self.down(smooth(hidden, scales, counts), rebuild, scales[0])


class GELU(nn.Module):
    """Parameters: up.weight [F, H], down.weight [H, F], and biases if asked for."""

    recompute: frozenset[str] = frozenset()  # as of SwiGLU

    def __init__(self, up: ColumnLinear, down: RowLinear, *, kernels: Kernels) -> None:
        super().__init__()
        self.up, self.down, self.kernels = up, down, kernels

    def forward(self, y: Tensor, context: Context, rebuild: Rebuild | None = None) -> Tensor:
        x = self.up(y, rebuild)
        hidden = activation(x, "gelu", self.kernels)
        kept = x.detach()
        return self.down(hidden, (lambda: self.kernels.gelu(kept)) if "activation" in self.recompute else None)
