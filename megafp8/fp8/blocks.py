"""Quantization with a scale for each block (1x128, 128x128, 1x32, 32x32, 1x16, 16x16), and NVFP4's Hadamard transform.

This is the definition, in plain torch and bit for bit what Transformer Engine's kernels compute; `block_kernels` has
the same fused and compiled. Everything works on one orientation [R, C] whose blocks run along C, the dim that a GEMM
sums over: the other orientation is the same on the transpose. Scales are logical: not padded, not swizzled.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from megafp8.core.errors import ConfigError
from megafp8.fp8.formats import (
    E2M1,
    E8M0,
    UE4M3,
    Format,
    cast,
    encode_e2m1,
    encode_e8m0,
    pack_e2m1,
    round_stochastic,
    table,
    uniform_noise,
    unpack_e2m1,
)
from megafp8.fp8.recipe import FLOAT32_MAX, TensorSpec, amax_of, magnitude, scale_from_amax, scale_inverse

HADAMARD_DIM = 16
# Transformer Engine's fixed signs of the random Hadamard transform (common/hadamard_transform)
HADAMARD_SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)


class BlockCodes(NamedTuple):
    """A quantized tensor, one orientation.

    Attributes:
        codes: `format.dtype` [R, C]; for E2M1 uint8 [R, ceil(C / 2)], the even column in the low nibble.
        scale_inv: [ceil(R / rows), ceil(C / columns)], fp32, float8_e8m0fnu (MXFP8) or float8_e4m3fn (NVFP4).
        tensor_amax: fp32 [1] for NVFP4, whose scales are relative to it; else None.
    """

    codes: torch.Tensor
    scale_inv: torch.Tensor
    tensor_amax: torch.Tensor | None


def quantize_blocks(
    x: torch.Tensor,
    spec: TensorSpec,
    *,
    tensor_amax: torch.Tensor | None = None,
    seed: torch.Tensor | None = None,
) -> BlockCodes:
    """Quantize with one scale for each block; blocks at ragged edges are smaller. `spec.hadamard` is the caller's.

    Args:
        x: [R, C], any floating dtype; the scale of an fp32-scaled block depends on it where it would overflow.
        tensor_amax: fp32 [1], NVFP4's amax of the whole tensor, where `x` is a part of it or it is known; None: of `x`.
        seed: int64 [1], needed where `spec.stochastic`.

    Source: Transformer Engine 2.20 common/transpose/quantize_transpose_{vector,square}_blockwise.cu,
    common/cast/mxfp8/quantize_mxfp8.cuh, common/cast/nvfp4/core_nvfp4.cuh.
    """
    assert spec.block is not None and x.dim() == 2, "quantize_blocks takes [R, C] and a spec with blocks"
    amax = block_amax(x, spec.block)
    if spec.scale_format == UE4M3:
        tensor_amax = amax_of(x) if tensor_amax is None else tensor_amax
        if spec.four_over_six is None:
            scale, scale_inv = nvfp4_scales(amax, tensor_amax)
        else:
            scale, scale_inv = four_over_six_scales(x, amax, tensor_amax, spec)
    elif spec.scale_format == E8M0:
        tensor_amax = None
        scale, scale_inv = mx_scales(amax, spec.format)
    else:
        tensor_amax = None
        scale = scale_from_amax(
            amax,
            spec.format.max,
            power_2_scale=spec.power_2_scale,
            amax_epsilon=spec.amax_epsilon,
            value_for_inf=min(torch.finfo(x.dtype).max, FLOAT32_MAX),
        )
        scale_inv = scale_inverse(scale)
    # the product in fp32, always by the scale: a division by scale_inv differs in the last bit
    scaled = x.float() * expanded(scale, spec.block, x.shape)
    if spec.stochastic:
        assert seed is not None, "stochastic rounding needs a seed"
        scaled = round_stochastic(scaled, spec.format, uniform_noise(seed.to(x.device), scaled.shape))
    codes = pack_e2m1(encode_e2m1(scaled)) if spec.format == E2M1 else cast(scaled, spec.format)
    return BlockCodes(codes, scale_inv, tensor_amax)


def decode_blocks(
    codes: torch.Tensor,
    scale_inv: torch.Tensor,
    tensor_amax: torch.Tensor | None,
    spec: TensorSpec,
    *,
    columns: int | None = None,
) -> torch.Tensor:
    """The tensor that the codes stand for, computed in fp32.

    Args:
        codes, scale_inv, tensor_amax: as in `BlockCodes`; without NVFP4's tensor_amax, code times block scale.
        columns: C; needed only for E2M1 with an odd C, whose last byte is half empty.

    Returns:
        fp32 [R, C].

    Source of NVFP4's order of products: Transformer Engine common/cast/nvfp4/dequantize_nvfp4.cuh.
    """
    assert spec.block is not None
    if spec.format == E2M1:
        values = table(E2M1).to(codes.device)[unpack_e2m1(codes).int()][:, :columns]
    else:
        values = codes.float()
    factor = scale_inv.float()
    if tensor_amax is not None:
        factor = factor * tensor_amax * (1.0 / (spec.block_scale_max * E2M1.max))
    return values * expanded(factor, spec.block, values.shape)


def hadamard(x: torch.Tensor) -> torch.Tensor:
    """NVFP4's random Hadamard transform along C in groups of 16: `group @ diag(signs) @ H16 / 4`, orthogonal.

    Args:
        x: [R, C], C a multiple of 16; bf16 is what Transformer Engine's kernel takes.

    Returns:
        [R, C] in `x`'s dtype; summed in fp32, rounded once.

    Raises:
        ConfigError: C is not a multiple of 16.
    """
    rows, columns = x.shape
    if columns % HADAMARD_DIM:
        raise ConfigError(
            f"NVFP4's Hadamard transform works on groups of {HADAMARD_DIM}, and {columns} rows are not a multiple of "
            f"it; let micro-batch times sequence be one, or set precision.options.disable_rht = true"
        )
    signs = torch.tensor(HADAMARD_SIGNS, dtype=torch.float32, device=x.device)
    sums = x.float().view(rows, -1, HADAMARD_DIM) * signs
    # four stages of sums and differences, each between elements whose index differs in one bit: fixes the order of
    # the additions, which a matrix product leaves to the library
    for bit in (1, 2, 4, 8):
        pairs = sums.view(rows, -1, HADAMARD_DIM // (2 * bit), 2, bit)
        low, high = pairs[:, :, :, 0], pairs[:, :, :, 1]
        sums = torch.stack([low + high, low - high], dim=3)
    return (sums.view(rows, columns) * 0.25).to(x.dtype)


def tensor_factor(tensor_amax: torch.Tensor | None, spec: TensorSpec, device: torch.device) -> torch.Tensor:
    """What NVFP4's block scales count in, fp32 [1]; 1 for other formats.

    Source: Transformer Engine 2.20 common/recipe/nvfp4.cu, the GEMM's alpha: amax / (6 * 448) a side.
    """
    if tensor_amax is None:
        return torch.ones(1, dtype=torch.float32, device=device)
    return tensor_amax / (E2M1.max * spec.block_scale_max)


def block_amax(x: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """Largest magnitude of each block, NaN ignored: fp32 [ceil(R / rows), ceil(C / columns)]."""
    (rows, columns), (height, width) = x.shape, block
    grid = (-(-rows // height), -(-columns // width))
    if x.numel() == 0:
        return torch.zeros(grid, dtype=torch.float32, device=x.device)
    # zeros at the edges leave the largest magnitude of the real elements as it is
    edge = (0, grid[1] * width - columns, 0, grid[0] * height - rows)
    padded = torch.nn.functional.pad(magnitude(x), edge)
    return padded.view(grid[0], height, grid[1], width).amax(dim=(1, 3))


def expanded(scale: torch.Tensor, block: tuple[int, int], shape: torch.Size) -> torch.Tensor:
    """The scale of every element, [R, C], from that of every block."""
    rows, columns = shape
    scale = scale.repeat_interleave(block[0], dim=0) if block[0] > 1 else scale
    return scale.repeat_interleave(block[1], dim=1)[:rows, :columns]


def mx_scales(amax: torch.Tensor, fmt: Format) -> tuple[torch.Tensor, torch.Tensor]:
    """MXFP8's scale to multiply by (fp32) and the stored inverse (float8_e8m0fnu), of each block's amax.

    The stored power of two is amax / fp8_max rounded UP; the OCP rule rounds down, saturates and diverges in training.
    """
    # torch takes a Python number to fp32 before it multiplies, as a kernel's constant is
    code = encode_e8m0(amax * (1.0 / fmt.max))
    # 2**(127 - code), by its bits: the exponent field is 254 - code, and 2**-127 is a subnormal
    exponent = 254 - code.int()
    bits = torch.where(exponent > 0, exponent << 23, 1 << 22)
    return bits.view(torch.float32), code.view(torch.float8_e8m0fnu)


def nvfp4_scales(amax: torch.Tensor, tensor_amax: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """NVFP4's scale to multiply by (fp32) and the stored inverse (float8_e4m3fn), of the blocks' and the tensor's amax.

    A block whose stored scale is 0 (all zero, or tiny beside the tensor) gets the largest scale; it decodes to 0.
    """
    of_tensor = nvfp4_tensor_scale(tensor_amax, UE4M3.max)
    stored = cast(amax * (of_tensor * (1.0 / E2M1.max)), UE4M3)
    return _nvfp4_scale(stored, of_tensor), stored


def nvfp4_tensor_scale(tensor_amax: torch.Tensor, block_scale_max: float) -> torch.Tensor:
    """The tensor's part of NVFP4's scales, fp32 of the same shape; 1 for amax 0 and infinity."""
    scale = torch.div(torch.full_like(tensor_amax, block_scale_max * E2M1.max), tensor_amax).clamp(max=FLOAT32_MAX)
    # amax 0 (infinite scale) and amax infinity (scale 0)
    return torch.where((tensor_amax == 0) | (scale == 0), torch.ones_like(scale), scale)


def _nvfp4_scale(stored: torch.Tensor, of_tensor: torch.Tensor) -> torch.Tensor:
    return scale_inverse(stored.float() * scale_inverse(of_tensor)).clamp(max=FLOAT32_MAX)


def four_over_six_scales(
    x: torch.Tensor, amax: torch.Tensor, tensor_amax: torch.Tensor, spec: TensorSpec
) -> tuple[torch.Tensor, torch.Tensor]:
    """`nvfp4_scales` where each block takes the scale that maps its amax to 4 or to 6, whichever errs less.

    Between 4 and 6 E2M1 has no value, so a block whose values crowd below its maximum may do better at 4. A tie
    keeps 6. The errors are summed in the kernel's order: along a row, then rows pairwise from far apart to near.

    Source: Transformer Engine 2.20 custom_recipes/reference_nvfp4.py, `_quantize_blockwise_4over6_reference`.
    """
    assert spec.block is not None
    of_tensor = nvfp4_tensor_scale(tensor_amax, spec.block_scale_max)
    base = torch.div(amax, torch.full_like(amax, E2M1.max)) * of_tensor
    maps = []
    for stretch in (1.5, 1.0):
        stored = cast(base * stretch, UE4M3)
        scale = _nvfp4_scale(stored, of_tensor)
        maps.append((scale, stored, _nvfp4_errors(x, scale, stored, tensor_amax, spec)))
    (scale4, stored4, error4), (scale6, stored6, error6) = maps
    four = error4 < error6
    # where has no kernel for float8
    stored = torch.where(four, stored4.view(torch.uint8), stored6.view(torch.uint8)).view(stored6.dtype)
    return torch.where(four, scale4, scale6), stored


def _nvfp4_errors(
    x: torch.Tensor, scale: torch.Tensor, stored: torch.Tensor, tensor_amax: torch.Tensor, spec: TensorSpec
) -> torch.Tensor:
    """The error of each block at these scales, fp32, of `scale`'s shape."""
    assert spec.block is not None
    (height, width), (down, along) = spec.block, scale.shape
    wide = torch.nn.functional.pad(x.float(), (0, along * width - x.shape[1], 0, down * height - x.shape[0]))
    codes = encode_e2m1(wide * expanded(scale, spec.block, wide.shape))
    values = table(E2M1).to(x.device)[codes.int()] * expanded(stored.float(), spec.block, wide.shape)
    bound = torch.full_like(tensor_amax, E2M1.max * spec.block_scale_max)
    off = torch.div(values * tensor_amax, bound) - wide
    off = (off * off if spec.four_over_six == "MSE" else off.abs()).view(down * height, along, width)
    sums = torch.zeros_like(off[:, :, 0])
    for column in range(width):
        sums = sums + off[:, :, column]
    rows = sums.view(down, height, along)
    while rows.shape[1] > 1:
        half = rows.shape[1] // 2
        rows = rows[:, :half] + rows[:, half:]
    return rows[:, 0]
