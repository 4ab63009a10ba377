"""The native backend: real FP8 GEMMs through torch's scaled_mm (cuBLAS on CUDA, a reference loop on CPU).

Differs from `emulated` exact only in the order of summation and in where the scale enters, never in a byte.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import ScalingType, scaled_mm

from megafp8.fp8.kernels import amax_of
from megafp8.fp8.quantized import QuantizedTensor, quantize
from megafp8.fp8.recipe import Recipe, TensorSpec, dims_refusal

MIN_CAPABILITY = (8, 9)  # Ada; Hopper is 9.0


@dataclass(frozen=True)
class Native:
    """FP8 GEMMs of the device.

    Attributes:
        reason: why this backend was chosen.
    """

    reason: str = "asked for by name"

    @property
    def name(self) -> str:
        return "native"

    def supports(self, recipe: Recipe, in_features: int, out_features: int) -> str | None:
        """Why a linear layer of these (local) dims cannot run, or None."""
        return dims_refusal(in_features, out_features)

    def quantize(
        self, x: torch.Tensor, spec: TensorSpec, scale: torch.Tensor | None
    ) -> tuple[QuantizedTensor, torch.Tensor]:
        """Quantize `x` [M, K] with `scale` fp32 [1] or, if None, its own; also gives its amax, fp32 [1]."""
        return quantize(x, spec, scale), amax_of(x)

    def amax(self, x: torch.Tensor) -> torch.Tensor:
        """Largest magnitude of `x`, fp32 [1]."""
        return amax_of(x)

    def fprop(
        self, x: QuantizedTensor, weight: QuantizedTensor, bias: torch.Tensor | None, dtype: torch.dtype
    ) -> torch.Tensor:
        """x [M, K] times weight [N, K] transposed, plus bias [N] -> [M, N] of `dtype`."""
        # fast accumulation forward, the precise one backward: TE's choice for per-tensor recipes
        y = _scaled_mm(x.data, weight.data.t(), x.scale_inv, weight.scale_inv, dtype, fast_accum=True)
        return y if bias is None else (y.float() + bias.float()).to(dtype)

    def dgrad(self, grad: QuantizedTensor, weight: QuantizedTensor, dtype: torch.dtype) -> torch.Tensor:
        """grad [M, N] times weight [N, K] -> [M, K] of `dtype`."""
        b = weight.columnwise.t() if weight.data.is_cuda else weight.data
        return _scaled_mm(grad.data, b, grad.scale_inv, weight.scale_inv, dtype, fast_accum=False)

    def wgrad(self, grad: QuantizedTensor, x: QuantizedTensor, dtype: torch.dtype) -> torch.Tensor:
        """grad [M, N] transposed times x [M, K] -> [N, K] of `dtype`."""
        # cuBLAS takes FP8 operands only with the summed dim contiguous in both
        cuda = grad.data.is_cuda
        a, b = (grad.columnwise, x.columnwise.t()) if cuda else (grad.data.t(), x.data)
        return _scaled_mm(a, b, grad.scale_inv, x.scale_inv, dtype, fast_accum=False)


def _scaled_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_inv_a: torch.Tensor,
    scale_inv_b: torch.Tensor,
    dtype: torch.dtype,
    *,
    fast_accum: bool,
) -> torch.Tensor:
    # CPU and cuBLAS write bf16 and fp32; anything wider is a cast of fp32
    out = scaled_mm(
        a,
        b,
        scale_inv_a,
        ScalingType.TensorWise,
        scale_inv_b,
        ScalingType.TensorWise,
        output_dtype=dtype if dtype == torch.bfloat16 else torch.float32,
        use_fast_accum=fast_accum,
    )
    return out.to(dtype)


def missing_hardware() -> str | None:
    """Why this machine's default device has no FP8 GEMM, or None."""
    if not torch.cuda.is_available():
        return "no CUDA device"
    capability = torch.cuda.get_device_capability()
    if capability < MIN_CAPABILITY:
        has, needs = (".".join(map(str, c)) for c in (capability, MIN_CAPABILITY))
        return f"{torch.cuda.get_device_name()} is SM {has}, FP8 needs SM {needs}"
    return None
