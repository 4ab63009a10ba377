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
from megafp8.fp8.formats import E2M1, E4M3, UE4M3, cast, table
from megafp8.fp8.recipe import TensorSpec, amax_of, scale_from_amax

Tensor = torch.Tensor
Scheme = Literal["fp8", "fp8-block", "nvfp4", "fp8-channel"]
E4M3_MAX = 448.0
NVFP4_MAX = 6.0 * 448.0  # of a code times its block's scale
_BLOCK = TensorSpec(E4M3, block=(128, 128))
_NVFP4 = TensorSpec(E2M1, block=(1, 16), scale_format=UE4M3)
_CHUNK = 1 << 18  # elements
_ROWS = 128


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


def quantize_fused(
    scheme: Scheme, weights: Sequence[Tensor], input_amax: float | None, *, beside: Sequence[Tensor] = ()
) -> tuple[list[Tensor], Any]:
    """The stored tensors of fused weights, in the order of `parts`, one weight after the other, and a note on them.

    Args:
        weights: fp32 [rows, columns] each, which one module of a reader holds.
        input_amax: of what they are multiplied with; needed by the schemes that store it.
        beside: other weights that readers fuse with these, which share their scale and are stored elsewhere.
    """
    amax = max(float(amax_of(chunk)) for weight in (*weights, *beside) for chunk in _chunks(weight))
    stored: list[Tensor] = []
    square_error = square = 0.0
    for weight in weights:
        tensors, errors = _quantize(scheme, weight, torch.tensor([amax]))
        stored += [*tensors, *_input_scale(scheme, input_amax)]
        square_error += errors[0]
        square += errors[1]
    count = sum(weight.numel() for weight in weights)
    note = {
        "weight_amax": amax,
        "weight_scale": amax / (NVFP4_MAX if scheme == "nvfp4" else E4M3_MAX),
        "mse": square_error / count,
        "relative_rms": math.sqrt(square_error / square) if square else 0.0,
        "input_amax": input_amax,
    }
    return stored, note


def _chunks(weight: Tensor) -> Sequence[Tensor]:
    """Whole rows, as many as a core's cache has room for, in multiples of what may share a scale."""
    return weight.split(max(_ROWS, _CHUNK // weight.shape[1] // _ROWS * _ROWS))


def _input_scale(scheme: Scheme, amax: float | None) -> list[Tensor]:
    if scheme in ("fp8-block", "fp8-channel"):
        return []
    assert amax is not None and amax > 0, "a scale is never made up"
    return [torch.tensor(amax / (NVFP4_MAX if scheme == "nvfp4" else E4M3_MAX))]


def _quantize(scheme: Scheme, weight: Tensor, amax: Tensor) -> tuple[list[Tensor], tuple[float, float]]:
    """Codes and scales of one weight under the amax of all that it is fused with; squares of its error and of itself.

    Chunk by chunk: whole temporaries would cost more in page faults than the arithmetic does.
    """
    first = parts(scheme, *weight.shape)[0]
    codes, at = torch.empty(first.shape, dtype=first.dtype), 0
    scales: list[Tensor] = []
    square_error = square = 0.0
    for chunk in _chunks(weight):
        made, scale, back = _quantize_chunk(scheme, chunk, amax)
        codes[at : at + len(made)] = made
        at += len(made)
        scales.append(scale)
        square_error += _square(back.sub_(chunk))
        square += _square(chunk)
    if scheme == "fp8":
        return [codes, scales[0].reshape(())], (square_error, square)
    scale = torch.cat(scales)
    found = [codes, scale[:, None, :, None] if scheme == "fp8-block" else scale]
    if scheme == "nvfp4":
        found.append((amax / NVFP4_MAX).reshape(()))
    return found, (square_error, square)


def _quantize_chunk(scheme: Scheme, weight: Tensor, amax: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales of their own, and what they decode to (fp32)."""
    if scheme in ("fp8", "fp8-channel"):
        scale = scale_from_amax(amax if scheme == "fp8" else weight.abs().amax(1, keepdim=True), E4M3_MAX)
        codes, inverse = cast(weight * scale, E4M3), 1.0 / scale
        # torch's own cast from FP8 takes five times as long as a look at the table
        values = table(E4M3).index_select(0, codes.view(torch.uint8).reshape(-1).int()).view(codes.shape)
        return codes, inverse, values.mul_(inverse)
    spec = _NVFP4 if scheme == "nvfp4" else _BLOCK
    made = quantize_blocks(weight, spec, tensor_amax=amax if scheme == "nvfp4" else None)
    return made.codes, made.scale_inv, decode_blocks(made.codes, made.scale_inv, made.tensor_amax, spec)


def _square(x: Tensor) -> float:
    flat = x.reshape(-1)
    return float(flat.dot(flat))


def lines_of(linears: dict[str, Any], kept: dict[str, str]) -> list[str]:
    """A line for each linear: its scales and errors, or why it is not quantized."""
    lines = [f"{'linear':44} {'weight scale':>12} {'rel. RMS':>9} {'MSE':>10} {'input amax':>11}"]
    for name, note in linears.items():
        amax = "dynamic" if note["input_amax"] is None else f"{note['input_amax']:.4g}"
        scales = f"{note['weight_scale']:12.4g} {note['relative_rms']:9.4f} {note['mse']:10.3g} {amax:>11}"
        lines.append(f"{name:44} {scales}")
    return lines + [f"{name:44} not quantized: {why}" for name, why in kept.items()]
