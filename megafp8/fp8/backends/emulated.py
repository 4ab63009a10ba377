"""The emulated backend: runs every recipe on any device and defines what the others must give.

mode "exact": real bytes, decoded to fp32, multiplied and summed in fp32, scaled, rounded once. mode "fast": the
codes' values in bf16 go through the bf16 GEMM, the scale follows; the sum is rounded to bf16 before the scale and
once after it (two roundings, each at most 2**-8 relative), for half the time of a step. Only bf16
tensors take the fast way; wider ones are exact in both modes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megafp8.fp8.kernels import Kernels, compiled_kernels, eager_kernels
from megafp8.fp8.quantized import Operand, QuantizedTensor, columns_seed, quantize, tensor_amaxes
from megafp8.fp8.recipe import Recipe, TensorSpec, amax_of, dims_refusal


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
        return dims_refusal(recipe, in_features, out_features)

    def quantize(
        self,
        x: torch.Tensor,
        spec: TensorSpec,
        scale: torch.Tensor | None,
        *,
        columnwise: bool = True,
        tensor_amax: torch.Tensor | None = None,
        seed: torch.Tensor | None = None,
    ) -> tuple[QuantizedTensor, torch.Tensor | None]:
        """Quantize `x` [M, K]; see fp8/quantized for the arguments.

        Also gives the amax, fp32 [1], where one scale serves the tensor, else None.
        """
        if spec.block is not None:
            if self._is_fast(x):
                return self._block_values(x, spec, columnwise, tensor_amax, seed), None
            return quantize(x, spec, columnwise=columnwise, tensor_amax=tensor_amax, seed=seed), None
        if not self._is_fast(x):
            return quantize(x, spec, scale), amax_of(x)
        values, scale_inv, amax = self._kernels(x).quantize(x, spec, scale)
        return QuantizedTensor(Operand(values, scale_inv, spec)), amax

    def amaxes(self, x: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
        """Largest magnitude of `x`, fp32 [1]; for NVFP4 of what both its operands are made from, fp32 [2]."""
        if not self._is_fast(x):
            return tensor_amaxes(x, spec) if spec.two_level else amax_of(x)
        return self._kernels(x).amaxes(x, spec) if spec.two_level else self._kernels(x).amax(x)

    def gemm(
        self, a: Operand, b: Operand, bias: torch.Tensor | None, dtype: torch.dtype, *, precise: bool
    ) -> torch.Tensor:
        """a [M, K] times b [N, K] transposed, plus bias [N] -> [M, N] of `dtype`; always precise."""
        (left, factor_a), (right, factor_b) = a.unscaled(), b.unscaled()
        fast = self._is_fast(left) and self._is_fast(right)
        acc = left @ right.t() if fast else left.float() @ right.float().t()
        kernels = self._kernels(acc) if fast else eager_kernels()
        if bias is not None or a.has_factor or b.has_factor:
            kernels.rescale_(acc, factor_a, factor_b, bias)
        return acc.to(dtype)

    def _block_values(
        self,
        x: torch.Tensor,
        spec: TensorSpec,
        columnwise: bool,
        tensor_amax: torch.Tensor | None,
        seed: torch.Tensor | None,
    ) -> QuantizedTensor:
        flat, kernels = x.detach().reshape(-1, x.shape[-1]), self._kernels(x)
        of_rows, of_columns = (None, None) if tensor_amax is None else tensor_amax.split(1)
        rows = kernels.quantize_blocks(flat, spec, tensor_amax=of_rows, seed=seed)
        made = QuantizedTensor(Operand(rows.values, rows.scale_inv, spec))
        if not columnwise or spec.same_both_ways:
            return made
        other = kernels.quantize_blocks(flat, spec, columnwise=True, tensor_amax=of_columns, seed=columns_seed(seed))
        return QuantizedTensor(made.rowwise, Operand(other.values, other.scale_inv, spec))

    def _is_fast(self, x: torch.Tensor) -> bool:
        return self.fast and x.dtype == torch.bfloat16

    def _kernels(self, x: torch.Tensor) -> Kernels:
        return compiled_kernels() if self.compiled and not x.is_cuda else eager_kernels()
