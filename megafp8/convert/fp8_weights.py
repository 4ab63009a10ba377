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
from megafp8.fp8.formats import E2M1, E4M3, UE4M3, table
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
    amax = max(_amax(chunk) for weight in (*weights, *beside) for chunk in _chunks(weight))
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


def _amax(chunk: Tensor) -> float:
    """As `amax_of`, in one pass where there is no NaN: 0.2 instead of 4 ns a value."""
    low, high = (float(end) for end in chunk.aminmax())
    return max(-low, high) if low == low else float(amax_of(chunk))


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
    blocks = scheme in ("nvfp4", "fp8-block")
    scratch = None if blocks else _Scratch(_chunks(weight)[0])
    for chunk in _chunks(weight):
        place = codes[at : at + len(chunk)]
        at += len(chunk)
        if scratch is None:
            scale, back = _quantize_blocks(scheme, chunk, amax, place)
        else:
            scale = scale_from_amax(amax if scheme == "fp8" else chunk.abs().amax(1, keepdim=True), E4M3_MAX)
            back = scratch.quantize(chunk, scale, place)
            scale = 1.0 / scale
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


def _quantize_blocks(scheme: Scheme, chunk: Tensor, amax: Tensor, codes: Tensor) -> tuple[Tensor, Tensor]:
    """Fill `codes`; the scales of blocks, and what they decode to (fp32)."""
    spec = _NVFP4 if scheme == "nvfp4" else _BLOCK
    made = quantize_blocks(chunk, spec, tensor_amax=amax if scheme == "nvfp4" else None)
    codes.copy_(made.codes)
    return made.scale_inv, decode_blocks(made.codes, made.scale_inv, made.tensor_amax, spec)


class _Scratch:
    """Room for the chunks of one weight: new memory for each would cost more than what is done in it."""

    def __init__(self, largest: Tensor) -> None:
        self._values = torch.empty(largest.shape)
        self._numbers = torch.empty(largest.numel(), dtype=torch.int32)

    def quantize(self, chunk: Tensor, scale: Tensor, codes: Tensor) -> Tensor:
        """Fill `codes` as `formats.cast(chunk * scale, E4M3)`; what they decode to (fp32), until the next call."""
        values, numbers = self._values[: len(chunk)], self._numbers[: chunk.numel()]
        codes.copy_(torch.mul(chunk, scale, out=values).clamp_(-E4M3_MAX, E4M3_MAX))
        # torch's own cast from FP8 takes five times as long as a look at the table
        numbers.copy_(codes.view(torch.uint8).view(-1))
        torch.index_select(table(E4M3), 0, numbers, out=values.view(-1))
        return values.mul_(1.0 / scale)


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
