"""The native backend: real FP8 GEMMs through torch's scaled_mm (cuBLAS on CUDA, a reference loop on CPU).

Differs from `emulated` exact only in the order of summation and in where the scale enters, never in a byte.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import ScalingType, scaled_mm

from megafp8.fp8.kernels import amax_of
from megafp8.fp8.quantized import Operand, QuantizedTensor, quantize, tensor_amaxes
from megafp8.fp8.recipe import ROLES, Recipe, TensorSpec, dims_refusal

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
        if any(recipe.spec(role).block for role in ROLES):
            return f"recipe {recipe.name} has scales for blocks, which native does not multiply; use emulated"
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
        """As emulated's, with real codes."""
        made = quantize(x, spec, scale, columnwise=columnwise, tensor_amax=tensor_amax, seed=seed)
        return made, amax_of(x) if spec.block is None else None

    def amaxes(self, x: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
        """As emulated's."""
        return tensor_amaxes(x, spec) if spec.two_level else amax_of(x)

    def gemm(
        self, a: Operand, b: Operand, bias: torch.Tensor | None, dtype: torch.dtype, *, precise: bool
    ) -> torch.Tensor:
        """a [M, K] times b [N, K] transposed, plus bias [N] -> [M, N] of `dtype`."""
        # cuBLAS takes FP8 operands only with the summed dim contiguous in both
        left, right = (a.contiguous, b.contiguous) if a.data.is_cuda else (a.data, b.data)
        y = _scaled_mm(left, right.t(), a.scale_inv, b.scale_inv, dtype, fast_accum=not precise)
        return y if bias is None else (y.float() + bias.float()).to(dtype)


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
