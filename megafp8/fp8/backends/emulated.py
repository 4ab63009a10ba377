"""The emulated backend: runs every recipe on any device and defines what the others must give.

mode "exact": real bytes, decoded to fp32, multiplied and summed in fp32, scaled, rounded once. mode "fast": the
codes' values in bf16 go through the bf16 GEMM, the scale follows; the sum is rounded to bf16 before the scale and
once after it (two roundings, each at most 2**-8 relative), for half the time of a step. Only bf16
tensors take the fast way; wider ones are exact in both modes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megafp8.fp8.kernels import Kernels, amax_of, compiled_kernels, eager_kernels
from megafp8.fp8.quantized import QuantizedTensor, quantize
from megafp8.fp8.recipe import Recipe, TensorSpec, dims_refusal


@dataclass(frozen=True)
class Emulated:
    """FP8 arithmetic in ordinary torch operations.

    Attributes:
        fast: bf16 GEMM on the codes instead of fp32.
        compiled: compile the elementwise kernels (CPU only).
        reason: why this backend was chosen.
    """

    fast: bool = True
    compiled: bool = True
    reason: str = "asked for by name"

    @property
    def name(self) -> str:
        return "emulated"

    def supports(self, recipe: Recipe, in_features: int, out_features: int) -> str | None:
        """Why a linear layer of these (local) dims cannot run, or None."""
        return dims_refusal(in_features, out_features)

    def quantize(
        self, x: torch.Tensor, spec: TensorSpec, scale: torch.Tensor | None
    ) -> tuple[QuantizedTensor, torch.Tensor]:
        """Quantize `x` [M, K] with `scale` fp32 [1] or, if None, its own; also gives its amax, fp32 [1]."""
        if not self._is_fast(x):
            return quantize(x, spec, scale), amax_of(x)
        values, scale_inv, amax = self._kernels(x).quantize(x, spec, scale)
        return QuantizedTensor(values, scale_inv, spec.format), amax

    def amax(self, x: torch.Tensor) -> torch.Tensor:
        """Largest magnitude of `x`, fp32 [1]."""
        return self._kernels(x).amax(x) if self._is_fast(x) else amax_of(x)

    def fprop(
        self, x: QuantizedTensor, weight: QuantizedTensor, bias: torch.Tensor | None, dtype: torch.dtype
    ) -> torch.Tensor:
        """x [M, K] times weight [N, K] transposed, plus bias [N] -> [M, N] of `dtype`."""
        return self._matmul(x.data, weight.data.t(), x.scale_inv, weight.scale_inv, bias, dtype)

    def dgrad(self, grad: QuantizedTensor, weight: QuantizedTensor, dtype: torch.dtype) -> torch.Tensor:
        """grad [M, N] times weight [N, K] -> [M, K] of `dtype`."""
        return self._matmul(grad.data, weight.data, grad.scale_inv, weight.scale_inv, None, dtype)

    def wgrad(self, grad: QuantizedTensor, x: QuantizedTensor, dtype: torch.dtype) -> torch.Tensor:
        """grad [M, N] transposed times x [M, K] -> [N, K] of `dtype`."""
        return self._matmul(grad.data.t(), x.data, grad.scale_inv, x.scale_inv, None, dtype)

    def _matmul(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        scale_inv_a: torch.Tensor,
        scale_inv_b: torch.Tensor,
        bias: torch.Tensor | None,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        fast = self._is_fast(a) and self._is_fast(b)
        acc = a @ b if fast else a.float() @ b.float()
        kernels = self._kernels(acc) if fast else eager_kernels()
        kernels.rescale_(acc, scale_inv_a, scale_inv_b, bias)
        return acc.to(dtype)

    def _is_fast(self, x: torch.Tensor) -> bool:
        return self.fast and x.dtype == torch.bfloat16

    def _kernels(self, x: torch.Tensor) -> Kernels:
        return compiled_kernels() if self.compiled and not x.is_cuda else eager_kernels()
