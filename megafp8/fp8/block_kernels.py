"""Quantization by blocks to VALUES, code times block scale, as the emulated backend's bf16 GEMM takes them.

`blocks` is the definition, `block_values` puts it together. A kernel here does the same arithmetic, every bit of it (a
test compares), on a layout that compilers vectorise: the copy whose blocks run along the rows of `x` is quantized in
place. Scales are results of a kernel, so that they are computed once for a block and not once for an element.

Shapes: `x` [R, C]; B is the side of a block.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from megafp8.fp8.blocks import (
    HADAMARD_DIM,
    HADAMARD_SIGNS,
    decode_blocks,
    hadamard,
    mx_scales,
    nvfp4_tensor_scale,
    quantize_blocks,
    tensor_factor,
)
from megafp8.fp8.formats import E2M1, E8M0, UE4M3, noise_keys, noise_of, rounder, stochastic_rounder
from megafp8.fp8.recipe import FLOAT32_MAX, TensorSpec, magnitude, scale_from_amax, scale_inverse

Tensor = torch.Tensor
Kernel = Callable[..., tuple[Tensor, ...]]


class BlockValues(NamedTuple):
    """One orientation of a tensor quantized by blocks.

    Attributes:
        values: [R, C], or [C, R] of the column-wise copy; bf16 for a bf16 `x`, which holds them exactly (down to its
            own subnormals), else fp32, as where a block's scale is any number.
        scale_inv: fp32 [1], the factor of the whole tensor: 1, or NVFP4's amax / (6 * 448).
    """

    values: Tensor
    scale_inv: Tensor


def block_values(
    x: Tensor,
    spec: TensorSpec,
    *,
    columnwise: bool = False,
    tensor_amax: Tensor | None = None,
    seed: Tensor | None = None,
) -> BlockValues:
    """The definition: `quantize_blocks` of `x` [R, C], or of its transpose through the spec's transform, decoded.

    Raises:
        ConfigError: the transform's groups do not fit the rows.
    """
    assert spec.block is not None
    side = x.t().contiguous() if columnwise else x
    side = hadamard(side) if columnwise and spec.hadamard else side
    made = quantize_blocks(side, spec, tensor_amax=tensor_amax, seed=seed)
    # without NVFP4's factor, which follows the GEMM
    values = decode_blocks(made.codes, made.scale_inv, None, spec, columns=side.shape[1])
    return BlockValues(values.to(values_dtype(x.dtype, spec)), tensor_factor(made.tensor_amax, spec, x.device))


def values_dtype(dtype: torch.dtype, spec: TensorSpec) -> torch.dtype:
    """Of the values of a tensor of `dtype`."""
    return torch.bfloat16 if spec.exact_in_bf16 and dtype == torch.bfloat16 else torch.float32


def rowwise_kernel(spec: TensorSpec, dtype: torch.dtype) -> Kernel:
    """(x [n], *extra) -> values, and more that is not to be used; n a multiple of B.

    The values lie in memory as `x` does, in whatever shape: torch.compile does not see that n // B * B is n, and would
    copy them into another.

    `extra`: tensor_amax fp32 [1] for NVFP4; for stochastic rounding then seed int64 [1], and pitch int32 [1] (not
    here), the number of elements in a row of what is quantized: that of `x` without its padding.
    """
    width = _width(spec)
    quantized = block_arithmetic(spec, dtype)

    def rowwise(x: Tensor, *extra: Tensor) -> tuple[Tensor, ...]:
        return quantized(x.view(-1, width), 1, _count(len(x)).view(-1, width), *extra)

    return rowwise


def columnwise_kernel(spec: TensorSpec, dtype: torch.dtype) -> Kernel:
    """As `rowwise_kernel`, of the transpose of x [R, C], the values not transposed; R a multiple of B."""
    width = _width(spec)
    quantized = block_arithmetic(spec, dtype)

    def columnwise(x: Tensor, *extra: Tensor) -> tuple[Tensor, ...]:
        rows, columns = x.shape
        place = _count(columns) * extra[-1] + _count(rows).view(-1, width, 1) if spec.stochastic else None
        return quantized(x.view(rows // width, width, columns), 1, place, *extra)

    return columnwise


def square_kernel(spec: TensorSpec, dtype: torch.dtype) -> Kernel:
    """As `rowwise_kernel`, of x [R, C] in blocks of B x B; R and C multiples of B."""
    width = _width(spec)
    quantized = block_arithmetic(spec, dtype)

    def square(x: Tensor, *extra: Tensor) -> tuple[Tensor, ...]:
        rows, columns = x.shape
        place = _count(rows).view(-1, 1) * extra[-1] + _count(columns) if spec.stochastic else None
        grid = (rows // width, width, columns // width, width)
        return quantized(x.view(grid), (1, 3), place if place is None else place.view(grid), *extra)

    return square


def block_arithmetic(spec: TensorSpec, dtype: torch.dtype) -> Kernel:
    """(blocks, dims that a block lies along, index of each element, *extra) -> what a kernel gives."""
    round_values, round_by_chance = rounder(spec.format), stochastic_rounder(spec.format)
    scales_of, out = block_scaler(spec, dtype), values_dtype(dtype, spec)
    two_level, stochastic, nan_is_max = spec.two_level, spec.stochastic, spec.format == E2M1
    largest = spec.format.max

    def quantized(
        blocks: Tensor, dims: int | tuple[int, ...], place: Tensor | None, *extra: Tensor
    ) -> tuple[Tensor, ...]:
        amax = magnitude(blocks).amax(dims, keepdim=True)
        scale, factor, *shared = scales_of(amax, *extra[:1]) if two_level else scales_of(amax)
        scaled = blocks.float() * scale
        if stochastic:
            assert place is not None
            first, second = noise_keys(extra[1 if two_level else 0])
            shared += [first, second]
            scaled = round_by_chance(scaled, noise_of(place, first, second))
        else:
            scaled = round_values(scaled)
        if nan_is_max:
            scaled = torch.where(scaled == scaled, scaled, largest)
        return (scaled * factor).to(out), amax, scale, factor, *shared

    return quantized


def block_scaler(spec: TensorSpec, dtype: torch.dtype) -> Kernel:
    """(amax, or amax and tensor_amax [1]) -> scale to multiply by, what a code then stands for, both fp32; and more."""
    fmt, power_2_scale, amax_epsilon = spec.format, spec.power_2_scale, spec.amax_epsilon
    value_for_inf = min(torch.finfo(dtype).max, FLOAT32_MAX)
    round_scale, scale_max = rounder(UE4M3), spec.block_scale_max

    def of_any(amax: Tensor) -> tuple[Tensor, ...]:
        scale = scale_from_amax(
            amax, fmt.max, power_2_scale=power_2_scale, amax_epsilon=amax_epsilon, value_for_inf=value_for_inf
        )
        return scale, scale_inverse(scale)

    def of_powers(amax: Tensor) -> tuple[Tensor, ...]:
        scale = mx_scales(amax, fmt)[0]
        return scale, scale_inverse(scale)  # both powers of two: exact

    def of_two_levels(amax: Tensor, tensor_amax: Tensor) -> tuple[Tensor, ...]:
        # `blocks.nvfp4_scales`, with what belongs to the tensor computed once
        of_tensor = nvfp4_tensor_scale(tensor_amax, scale_max)
        sixth, inverse = of_tensor * (1.0 / E2M1.max), scale_inverse(of_tensor)
        stored = round_scale(amax * sixth)
        return scale_inverse(stored * inverse).clamp(max=FLOAT32_MAX), stored, sixth, inverse

    if spec.two_level:
        return of_two_levels
    return of_powers if spec.scale_format == E8M0 else of_any


def hadamard_kernel(x: Tensor) -> tuple[Tensor, Tensor]:
    """`hadamard` of the transpose of `x` [R, C], lying as `x` does, and its amax fp32 [1]; R a multiple of 16.

    Four rows at a time are outputs of one pass over their group's 16: all at once would compile for a quarter of a
    minute, one at a time would add everything up anew. The order of additions is the definition's.
    """
    rows, columns = x.shape
    signs = torch.tensor(HADAMARD_SIGNS, dtype=torch.float32).view(4, 4, 1)
    groups = x.view(rows // HADAMARD_DIM, 4, 4, columns)
    inner = [groups[:, :, k].float() * signs[:, k] for k in range(4)]
    for bit in (1, 2):
        inner = [inner[k] + inner[k | bit] if not k & bit else inner[k ^ bit] - inner[k] for k in range(4)]
    which = torch.arange(4).view(1, 4, 1)
    made = []
    for sums in inner:
        parts = [sums[:, k : k + 1] for k in range(4)]
        for bit in (1, 2):
            sign = torch.where((which & bit) == 0, 1.0, -1.0)
            parts = [low + high * sign for low, high in zip(parts[::2], parts[1::2], strict=True)]
        made.append((parts[0] * 0.25).to(x.dtype))
    result = torch.stack(made, 2)
    return result, magnitude(result).amax().reshape(1)


def extremes_kernel(block: tuple[int, int]) -> Callable[[Tensor], Tensor]:
    """(x [n], or [R, C] for blocks of more than one row) -> smallest and largest amax of its blocks, fp32 [2].

    Blocks of zeros or with a NaN are left out: infinity and 0 if all are.
    """
    height, width = block

    def extremes(x: Tensor) -> Tensor:
        if height == 1:
            amax = x.view(-1, width).abs().amax(1)
        else:
            amax = x.view(x.shape[0] // height, height, x.shape[1] // width, width).abs().amax((1, 3))
        found = amax.float()
        return torch.stack([torch.where(found > 0, found, torch.inf).amin(), torch.where(found > 0, found, 0.0).amax()])

    return extremes


def _count(size: int) -> Tensor:
    return torch.arange(size, dtype=torch.int32)


def _width(spec: TensorSpec) -> int:
    assert spec.block is not None
    return spec.block[1]
