"""The reading of tensors that statistics cost: one fused pass over a tensor and its quantized values.

Plain torch functions, compiled where the backend compiles its own kernels. Sums are taken over rows of a few hundred
elements in fp32 and then over the rows, so that counts are exact up to 2**24 and squares lose nothing that shows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
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
    which are made from their own elements); the sum of squared errors; the largest magnitude, NaN (and a block
    that has one) left out; the smallest and the largest inverse scale, blocks of zeros or with a NaN left out.
    """
    values, factor = operand.unscaled()
    x = x.detach()
    compiled = compiled and x.dtype == torch.bfloat16 and compiled_kernels() is not eager_kernels()
    if operand.spec.block is None:
        edge = factor * (operand.spec.format.max * _SLACK)
        return torch.cat([_in_rows(_tally, x, values, (factor, edge), compiled), factor, factor])
    amax = _block_amaxes(x, operand.spec, compiled)
    underflows, squares = _in_rows(_errors, x, values, (factor,), compiled).split(1)
    inverse = _inverse_scales(x, operand.spec, amax, factor)
    return torch.cat([underflows, torch.zeros_like(squares), squares, amax[1:], inverse])


def _in_rows(
    kernel: Callable[..., Tensor], x: Tensor, values: Tensor, more: Sequence[Tensor], compiled: bool
) -> Tensor:
    width = next((w for w in _WIDTHS if x.numel() % w == 0 and x.numel() > w), 0) if compiled else 0
    if not width:
        return kernel(x.reshape(1, -1), values.reshape(1, -1), *more)
    return _compiled(kernel)(_rows(x, width), _rows(values, width), *more)


def _tally(x: Tensor, values: Tensor, factor: Tensor, edge: Tensor) -> Tensor:
    """Underflows, overflows, squared errors and the largest magnitude, fp32 [4]."""
    wide = x.float()
    magnitude = wide.abs()
    underflows, squares = _row_errors(wide, values, factor)
    overflows = (magnitude > edge).float().sum(1)
    amax = torch.where(magnitude == magnitude, magnitude, 0.0).amax(1)
    return torch.stack([underflows.sum(), overflows.sum(), squares.sum(), amax.amax()])


def _errors(x: Tensor, values: Tensor, factor: Tensor) -> Tensor:
    """Underflows and squared errors, fp32 [2]."""
    underflows, squares = _row_errors(x.float(), values, factor)
    return torch.stack([underflows.sum(), squares.sum()])


def _row_errors(wide: Tensor, values: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
    codes = values.float()
    error = codes * factor - wide
    return ((wide != 0) & (codes == 0)).float().sum(1), (error * error).sum(1)


@functools.cache
def _compiled(kernel: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return torch.compile(kernel, dynamic=True, fullgraph=True)


def _block_amaxes(x: Tensor, spec: TensorSpec, compiled: bool) -> Tensor:
    """The smallest and the largest amax of the blocks, fp32 [2], blocks of zeros or with a NaN left out."""
    assert spec.block is not None
    kernels = compiled_kernels() if compiled else eager_kernels()
    amax = kernels.block_extremes(x.reshape(-1, x.shape[-1]), spec.block)
    return torch.where(torch.isinf(amax[:1]), amax[1:], amax)  # nothing but zeros, or one infinite block


def _inverse_scales(x: Tensor, spec: TensorSpec, amax: Tensor, factor: Tensor) -> Tensor:
    """Smallest and largest inverse scale of the blocks, fp32 [2]: those of the smallest and the largest block amax.

    An operand with values in the place of codes has no block scales any more; they rise with the amax.
    """
    if spec.four_over_six is not None:  # each block has chosen between two scales: made again
        made = quantize_blocks(x.reshape(-1, x.shape[-1]), replace(spec, stochastic=False)).scale_inv.float()
        return torch.stack([torch.where(made > 0, made, torch.inf).amin(), made.amax()]) * factor
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
