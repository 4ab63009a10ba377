"""A linear's weight in FP8 or FP4 with its scales, as the readers of a format want them.

Weight scales come from the fp32 masters, as Transformer Engine computes them (448 / amax, nearest even, saturating).
Matrices that readers fuse (q, k, v; gate and up) share one scale: with scales of their own they would be requantised to
the largest, which costs a second rounding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from megafp8.fp8.blocks import decode_blocks, quantize_blocks
from megafp8.fp8.formats import E2M1, E4M3, UE4M3, cast
from megafp8.fp8.recipe import TensorSpec, amax_of, scale_from_amax

Tensor = torch.Tensor
Scheme = Literal["fp8", "fp8-block", "nvfp4", "fp8-channel"]
E4M3_MAX = 448.0
NVFP4_MAX = 6.0 * 448.0  # of a code times its block's scale
_BLOCK = TensorSpec(E4M3, block=(128, 128))
_NVFP4 = TensorSpec(E2M1, block=(1, 16), scale_format=UE4M3)


@dataclass(frozen=True)
class Part:
    """One tensor of a quantized linear: what its name ends in, dtype and shape."""

    ending: str
    dtype: torch.dtype
    shape: tuple[int, ...]


def parts(scheme: Scheme, rows: int, columns: int) -> list[Part]:
    """What is stored of a weight [rows, columns], the weight first."""
    f32, e4m3 = torch.float32, torch.float8_e4m3fn
    weight = Part("weight", e4m3, (rows, columns))
    if scheme == "fp8":
        return [weight, Part("weight_scale", f32, ()), Part("input_scale", f32, ())]
    if scheme == "fp8-channel":
        return [weight, Part("weight_scale", f32, (rows, 1))]
    if scheme == "fp8-block":
        return [weight, Part("weight_scale", f32, (math.ceil(rows / 128), 1, math.ceil(columns / 128), 1))]
    return [
        Part("weight", torch.uint8, (rows, columns // 2)),
        Part("weight_scale", e4m3, (rows, columns // 16)),
        Part("weight_scale_2", f32, ()),
        Part("input_scale", f32, ()),
    ]


def refusal(scheme: Scheme, rows: int, columns: int) -> str | None:
    """Why a weight [rows, columns] cannot be stored so."""
    if scheme == "nvfp4" and columns % 16:
        return f"its {columns} inputs are not a multiple of 16, an NVFP4 block"
    return None


def quantize_fused(scheme: Scheme, weights: Sequence[Tensor], input_amax: float | None) -> tuple[list[Tensor], Any]:
    """The stored tensors of fused weights, in the order of `parts`, one weight after the other, and a note on them.

    Args:
        weights: fp32 [rows, columns] each, which one module of a reader holds.
        input_amax: of what they are multiplied with; needed by the schemes that store it.
    """
    amax = max(float(amax_of(weight)) for weight in weights)
    stored: list[Tensor] = []
    square_error = square = 0.0
    for weight in weights:
        tensors, back = _quantize(scheme, weight, torch.tensor([amax]))
        stored += [*tensors, *_input_scale(scheme, input_amax)]
        square_error += float((back - weight).square().sum(dtype=torch.float64))
        square += float(weight.square().sum(dtype=torch.float64))
    count = sum(weight.numel() for weight in weights)
    note = {
        "weight_amax": amax,
        "weight_scale": amax / (NVFP4_MAX if scheme == "nvfp4" else E4M3_MAX),
        "mse": square_error / count,
        "relative_rms": math.sqrt(square_error / square) if square else 0.0,
        "input_amax": input_amax,
    }
    return stored, note


def _input_scale(scheme: Scheme, amax: float | None) -> list[Tensor]:
    if scheme in ("fp8-block", "fp8-channel"):
        return []
    assert amax is not None and amax > 0, "a scale is never made up"
    return [torch.tensor(amax / (NVFP4_MAX if scheme == "nvfp4" else E4M3_MAX))]


def _quantize(scheme: Scheme, weight: Tensor, amax: Tensor) -> tuple[list[Tensor], Tensor]:
    """Codes and scales of one weight under the amax of all that it is fused with, and what they decode to (fp32)."""
    if scheme == "fp8":
        scale = scale_from_amax(amax, E4M3_MAX)
        codes = cast(weight * scale, E4M3)
        inverse = 1.0 / scale
        return [codes, inverse.reshape(())], codes.float() * inverse
    if scheme == "fp8-channel":
        scale = scale_from_amax(weight.abs().amax(1, keepdim=True), E4M3_MAX)
        codes = cast(weight * scale, E4M3)
        return [codes, 1.0 / scale], codes.float() / scale
    spec = _NVFP4 if scheme == "nvfp4" else _BLOCK
    made = quantize_blocks(weight, spec, tensor_amax=amax if scheme == "nvfp4" else None)
    back = decode_blocks(made.codes, made.scale_inv, made.tensor_amax, spec)
    if scheme == "nvfp4":
        return [made.codes, made.scale_inv, (amax / NVFP4_MAX).reshape(())], back
    return [made.codes, made.scale_inv[:, None, :, None]], back
