"""The native backend: real FP8 and FP4 GEMMs through torch's scaled_mm (cuBLAS on CUDA, a reference loop on CPU).

Differs from `emulated` exact only in the order of summation and in where the scale enters, never in a code or scale.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch.nn.functional import ScalingType, SwizzleType, scaled_mm

from megafp8.fp8.backends.fused import fused_quantize
from megafp8.fp8.backends.hardware import Hardware, hardware_of, refusal, scaling_kind
from megafp8.fp8.backends.layouts import outer_major, spread_rows, swizzle_32_4_4, tiles_128
from megafp8.fp8.blocks import tensor_factor
from megafp8.fp8.quantized import Operand, QuantizedTensor, quantize, tensor_amaxes
from megafp8.fp8.recipe import Recipe, TensorSpec, amax_of, dims_refusal

_FP4_MULTIPLE = 32  # elements in 16 bytes, to which cuBLAS wants rows aligned; blocks are of 16


@dataclass(frozen=True)
class Native:
    """FP8 GEMMs of the device.

    Attributes:
        reason: why this backend was chosen.
        hardware: of the device that the tensors will be on.
        compiled: on CUDA, quantize by kernels that torch.compile fuses.
    """

    reason: str = "asked for by name"
    hardware: Hardware = field(default_factory=lambda: hardware_of(None))
    compiled: bool = True

    @property
    def name(self) -> str:
        return "native"

    def supports(self, recipe: Recipe, in_features: int, out_features: int) -> str | None:
        """Why a linear layer of these (local) dims cannot run, or None."""
        return refusal(recipe, self.hardware) or dims_refusal(recipe, in_features, out_features)

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
        if x.is_cuda and self.compiled:
            return fused_quantize(x, spec, scale, columnwise=columnwise, tensor_amax=tensor_amax, seed=seed)
        made = quantize(x, spec, scale, columnwise=columnwise, tensor_amax=tensor_amax, seed=seed)
        return made, amax_of(x) if spec.block is None else None

    def amaxes(self, x: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
        """As emulated's."""
        return tensor_amaxes(x, spec) if spec.two_level else amax_of(x)

    def gemm(
        self, a: Operand, b: Operand, bias: torch.Tensor | None, dtype: torch.dtype, *, precise: bool
    ) -> torch.Tensor:
        """a [M, K] times b [N, K] transposed, plus bias [N] -> [M, N] of `dtype`; fast accumulation if not `precise`.

        Blocks are always summed precisely: their GEMMs have no other way.
        """
        left, right = _matrix(a), _matrix(b)
        (scales_a, recipe_a, swizzle_a), (scales_b, recipe_b, swizzle_b) = _scaling(a, b)
        # cuBLAS adds a bf16 bias to the sum before its one rounding; else the sum comes in fp32 and is rounded after
        inside = bias is not None and _takes_bias(a, bias, dtype)
        wide = dtype != torch.bfloat16 or (bias is not None and not inside)
        y = scaled_mm(
            left,
            right.t(),
            scales_a,
            recipe_a,
            scales_b,
            recipe_b,
            swizzle_a=swizzle_a,
            swizzle_b=swizzle_b,
            bias=bias if inside else None,
            output_dtype=torch.float32 if wide else dtype,
            use_fast_accum=not precise and a.spec.block is None,
        )
        return (y if bias is None or inside else y + bias.float()).to(dtype)


def _takes_bias(a: Operand, bias: torch.Tensor, dtype: torch.dtype) -> bool:
    return a.data.is_cuda and a.spec.block is None and bias.dtype == dtype == torch.bfloat16


def _matrix(operand: Operand) -> torch.Tensor:
    """The codes as scaled_mm takes them: the summed dim contiguous (a CPU takes any), FP4 by its own dtype."""
    data = operand.data if operand.data.device.type == "cpu" else operand.contiguous
    if scaling_kind(operand.spec) != "16":
        return data
    missing = -operand.shape[1] % _FP4_MULTIPLE
    return F.pad(data, (0, missing // 2)).view(torch.float4_e2m1fn_x2)


_Scaling = tuple[list[torch.Tensor], list[ScalingType], list[SwizzleType]]


def _scaling(a: Operand, b: Operand) -> tuple[_Scaling, _Scaling]:
    """Scales, their kinds and their layouts of both operands."""
    kind = scaling_kind(a.spec)
    if kind == "tensor":
        return _plain(a.scale_inv, ScalingType.TensorWise), _plain(b.scale_inv, ScalingType.TensorWise)
    if kind == "16":
        return _nvfp4(a), _nvfp4(b)
    if kind == "32":
        return _mx(a), _mx(b)
    if kind == "rows" or (a.data.device.type == "cpu" and a.scale_inv.shape[1] == b.scale_inv.shape[1] == 1):
        return _plain(_per_row(a), ScalingType.RowWise), _plain(_per_row(b).t(), ScalingType.RowWise)
    # no GEMM takes square blocks on both sides
    return _blocks_128(a, square=True), _blocks_128(b, square=_rows_of(a) == 1)


def _plain(scale_inv: torch.Tensor, kind: ScalingType) -> _Scaling:
    return [scale_inv], [kind], [SwizzleType.NO_SWIZZLE]


def _rows_of(operand: Operand) -> int:
    assert operand.spec.block is not None
    return operand.spec.block[0]


def _per_row(operand: Operand) -> torch.Tensor:
    """[R, 1]; the operand's blocks must span the summed dim."""
    assert operand.scale_inv.shape[1] == 1, f"scales {tuple(operand.scale_inv.shape)} are not one a row"
    return spread_rows(operand.scale_inv, _rows_of(operand), operand.shape[0])


def _blocks_128(operand: Operand, *, square: bool) -> _Scaling:
    """As they are, or, where square blocks are not taken, spread over their rows."""
    if square and _rows_of(operand) > 1:
        return _plain(tiles_128(operand.scale_inv), ScalingType.BlockWise128x128)
    spread = spread_rows(operand.scale_inv, _rows_of(operand), operand.shape[0])
    return _plain(outer_major(spread), ScalingType.BlockWise1x128)


def _mx(operand: Operand) -> _Scaling:
    spread = spread_rows(operand.scale_inv, _rows_of(operand), operand.shape[0])
    return [swizzle_32_4_4(spread)], [ScalingType.BlockWise1x32], [SwizzleType.SWIZZLE_32_4_4]


def _nvfp4(operand: Operand) -> _Scaling:
    spread = spread_rows(operand.scale_inv, _rows_of(operand), operand.shape[0])
    factor = tensor_factor(operand.tensor_amax, operand.spec, operand.data.device)
    kinds = [ScalingType.BlockWise1x16, ScalingType.TensorWise]
    return [swizzle_32_4_4(spread), factor], kinds, [SwizzleType.SWIZZLE_32_4_4, SwizzleType.NO_SWIZZLE]
