"""RMSNorm and LayerNorm, fused with the addition of a branch to the residual stream.

Hidden tensors are [S, B, H], sharded along S over tp under sequence parallelism; then each rank sees a part of the
tokens and the weights' gradients are partial sums over tp (`grad_sum`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from megafp8.core.layout import Layout
from megafp8.nn.kernels import Kernels
from megafp8.nn.parameter import Init, declare
from megafp8.parallel.mesh import Mesh

Tensor = torch.Tensor


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, branch: Tensor | None, weight: Tensor, eps: float, kernels: Kernels) -> Any:
        if branch is None:
            total, (y, rstd) = x.view_as(x), kernels.rms_norm(x, weight, eps)
        else:
            total, y, rstd = kernels.add_rms_norm(x, branch, weight, eps)
        ctx.save_for_backward(total, rstd, weight)
        ctx.kernels, ctx.has_branch = kernels, branch is not None
        ctx.mark_non_differentiable(rstd)
        ctx.set_materialize_grads(False)
        return total, y, rstd

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        total, rstd, weight = ctx.saved_tensors
        dx, dweight = ctx.kernels.rms_norm_backward(grads[1], grads[0], total, rstd, weight)
        return dx, dx if ctx.has_branch else None, dweight, None, None


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, branch: Tensor | None, weight: Tensor, bias: Tensor, eps: float, kernels: Kernels
    ) -> Any:
        if branch is None:
            total, (y, mean, rstd) = x.view_as(x), kernels.layer_norm(x, weight, bias, eps)
        else:
            total, y, mean, rstd = kernels.add_layer_norm(x, branch, weight, bias, eps)
        ctx.save_for_backward(total, mean, rstd, weight)
        ctx.kernels, ctx.has_branch = kernels, branch is not None
        ctx.set_materialize_grads(False)
        return total, y

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        total, mean, rstd, weight = ctx.saved_tensors
        dx, dweight, dbias = ctx.kernels.layer_norm_backward(grads[1], grads[0], total, mean, rstd, weight)
        return dx, dx if ctx.has_branch else None, dweight, dbias, None, None


def _shared_layout(size: int, mesh: Mesh) -> Layout:
    return Layout((size,), grad_sum=("tp",) if mesh.sequence_parallel else ())


class RMSNorm(nn.Module):
    """(x, branch or None), both [S, B, H] -> (x + branch, norm of it)."""

    def __init__(self, size: int, *, eps: float, mesh: Mesh, dtype: torch.dtype, kernels: Kernels) -> None:
        super().__init__()
        self.eps, self.kernels = eps, kernels
        self.weight = declare(_shared_layout(size, mesh), Init(mean=1.0), mesh=mesh, dtype=dtype)

    def forward(self, x: Tensor, branch: Tensor | None = None) -> tuple[Tensor, Tensor]:
        total, y, _ = _RMSNorm.apply(x, branch, self.weight, self.eps, self.kernels)
        return total, y

    def again(self, total: Tensor) -> Tensor:
        """The norm of the sum, bit for bit as `forward` gave it, for recomputation; no gradient."""
        return self.kernels.rms_norm(total, self.weight, self.eps)[0]


class LayerNorm(nn.Module):
    """(x, branch or None), both [S, B, H] -> (x + branch, norm of it)."""

    def __init__(self, size: int, *, eps: float, mesh: Mesh, dtype: torch.dtype, kernels: Kernels) -> None:
        super().__init__()
        self.eps, self.kernels = eps, kernels
        layout = _shared_layout(size, mesh)
        self.weight = declare(layout, Init(mean=1.0), mesh=mesh, dtype=dtype)
        self.bias = declare(layout, Init(), mesh=mesh, dtype=dtype)

    def forward(self, x: Tensor, branch: Tensor | None = None) -> tuple[Tensor, Tensor]:
        total, y = _LayerNorm.apply(x, branch, self.weight, self.bias, self.eps, self.kernels)
        return total, y

    def again(self, total: Tensor) -> Tensor:
        """The norm of the sum, bit for bit as `forward` gave it, for recomputation; no gradient."""
        return self.kernels.layer_norm(total, self.weight, self.bias, self.eps)[0]
