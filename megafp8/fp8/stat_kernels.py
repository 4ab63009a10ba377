"""The reading of tensors that statistics cost: one fused pass over a tensor and its quantized values.

Plain torch functions, compiled where the backend compiles its own kernels. Sums are taken over rows of a few hundred
elements in fp32 and then over the rows, so that counts are exact up to 2**24 and squares lose nothing that shows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

import torch

from megafp8.fp8.blocks import mx_scales, nvfp4_scales, quantize_blocks
from megafp8.fp8.formats import E2M1, E8M0, UE4M3
from megafp8.fp8.kernels import compiled_kernels, eager_kernels
from megafp8.fp8.quantized import Operand
from megafp8.fp8.recipe import FLOAT32_MAX, TensorSpec, scale_from_amax, scale_inverse

Tensor = torch.Tensor
_WIDTHS = (1024, 256)
# with the scale of its own amax, a tensor's maximum lies on the edge, not beyond it
_SLACK = 1.0 + 2.0**-22


def measure(x: Tensor, operand: Operand, *, compiled: bool) -> Tensor:
    """What statistics are made of, fp32 [6], of x (any shape, not empty) and the row-wise operand made from it.

    Elements that were not zero and became zero; elements beyond the range at the scale in use (0 for scales of blocks,
    which are made from their own elements); the sum of squared errors; the largest magnitude, NaN left out; the
    smallest and the largest inverse scale, blocks of zeros or with a NaN left out.
    """
    values, factor = operand.unscaled()
    x = x.detach()
    compiled = compiled and x.dtype == torch.bfloat16 and compiled_kernels() is not eager_kernels()
    width = next((w for w in _WIDTHS if x.numel() % w == 0 and x.numel() > w), 0) if compiled else 0
    spec = operand.spec
    inverse = factor.expand(2) if spec.block is None else _inverse_scales(x, spec, factor, compiled)
    edge = factor * (spec.format.max * _SLACK if spec.block is None else float("inf"))
    if not width:
        return _tally(x.reshape(1, -1), values.reshape(1, -1), factor, edge, inverse)
    return _compiled(_tally)(_rows(x, width), _rows(values, width), factor, edge, inverse)


def _tally(x: Tensor, values: Tensor, factor: Tensor, edge: Tensor, inverse: Tensor) -> Tensor:
    wide, codes = x.float(), values.float()
    magnitude = wide.abs()
    underflows = ((magnitude != 0) & (codes == 0)).float().sum(1)
    overflows = (magnitude > edge).float().sum(1)
    error = codes * factor - wide
    squares = (error * error).sum(1)
    amax = torch.where(magnitude == magnitude, magnitude, 0.0).amax(1)
    sums = [part.sum().reshape(1) for part in (underflows, overflows, squares)]
    return torch.cat([*sums, amax.amax().reshape(1), inverse])


@functools.cache
def _compiled(kernel: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return torch.compile(kernel, dynamic=True, fullgraph=True)


def _inverse_scales(x: Tensor, spec: TensorSpec, factor: Tensor, compiled: bool) -> Tensor:
    """Smallest and largest inverse scale of the blocks, fp32 [2]: those of the smallest and the largest block amax.

    An operand with values in the place of codes has no block scales any more; they rise with the amax.
    """
    assert spec.block is not None
    flat = x.reshape(-1, x.shape[-1])
    if spec.four_over_six is not None:  # each block has chosen between two scales: made again
        made = quantize_blocks(flat, replace(spec, stochastic=False)).scale_inv.float()
        return torch.stack([torch.where(made > 0, made, torch.inf).amin(), made.amax()]) * factor
    kernels = compiled_kernels() if compiled else eager_kernels()
    amax = kernels.block_extremes(flat, spec.block)
    amax = torch.where(torch.isinf(amax[:1]), amax[1:], amax)  # nothing but zeros, or one infinite block
    if spec.scale_format == UE4M3:
        _, stored = nvfp4_scales(amax, factor * (UE4M3.max * E2M1.max))
        return stored.float() * factor
    if spec.scale_format == E8M0:
        return mx_scales(amax, spec.format)[1].float()
    scale = scale_from_amax(
        amax,
        spec.format.max,
        power_2_scale=spec.power_2_scale,
        amax_epsilon=spec.amax_epsilon,
        value_for_inf=min(torch.finfo(x.dtype).max, FLOAT32_MAX),
    )
    return scale_inverse(scale)


def _rows(x: Tensor, width: int) -> Tensor:
    """The elements as rows, without a view in autograd's books, on whose base torch.compile would guard."""
    dense = x.detach().contiguous()
    shape = (dense.numel() // width, width)
    return dense.new_empty(0).set_(dense.untyped_storage(), dense.storage_offset(), shape, (width, 1))
