"""The experts' GEMMs in FP8: rows grouped by expert times stacked matrices, each group through the backend.

One scale for all rows and one for all matrices of a layer's GEMM. Transformer Engine's GroupedLinear scales every
expert by itself; here ranks and micro-batches with few rows of an expert do not move its scale, the scale is the same
wherever an expert's rows are, and codes may travel as they are. Experts whose values are small lose nothing within the
format's range, 2^15 for E4M3.

A group's rows are the summed dim of its weight gradient; real bytes are padded by zeros to the multiple that FP8 GEMMs
take, which changes no value.

Shapes: R rows, E experts, K in and N out features; `counts` are the rows of each expert, in order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F

from megafp8.fp8.backend import Backend
from megafp8.fp8.quantized import QuantizedTensor
from megafp8.fp8.recipe import DIM_MULTIPLE

Tensor = torch.Tensor


def grouped_fprop(
    backend: Backend, x: QuantizedTensor, weight: QuantizedTensor, counts: Sequence[int], dtype: torch.dtype
) -> Tensor:
    """x [R, K] times its expert's part of weight [E * N, K], transposed -> [R, N] of `dtype`."""
    num_out = weight.shape[0] // len(counts)
    out = torch.empty((x.shape[0], num_out), dtype=dtype, device=x.data.device)
    for expert, rows in _runs(counts):
        out[rows] = backend.fprop(_part(x, rows), _matrix(weight, expert, num_out), None, dtype)
    return out


def grouped_dgrad(
    backend: Backend, grad: QuantizedTensor, weight: QuantizedTensor, counts: Sequence[int], dtype: torch.dtype
) -> Tensor:
    """grad [R, N] times its expert's part of weight [E * N, K] -> [R, K] of `dtype`."""
    num_out = grad.shape[1]
    out = torch.empty((grad.shape[0], weight.shape[1]), dtype=dtype, device=grad.data.device)
    for expert, rows in _runs(counts):
        out[rows] = backend.dgrad(_part(grad, rows), _matrix(weight, expert, num_out), dtype)
    return out


def grouped_wgrad(
    backend: Backend, grad: QuantizedTensor, x: QuantizedTensor, counts: Sequence[int], dtype: torch.dtype
) -> Tensor:
    """Each run of grad [R, N], transposed, times that of x [R, K] -> [E, N, K] of `dtype`; 0 where it is empty."""
    out = torch.zeros((len(counts), grad.shape[1], x.shape[1]), dtype=dtype, device=grad.data.device)
    for expert, rows in _runs(counts):
        out[expert] = backend.wgrad(_padded(_part(grad, rows)), _padded(_part(x, rows)), dtype)
    return out


def _runs(counts: Sequence[int]) -> Iterator[tuple[int, slice]]:
    begin = 0
    for expert, count in enumerate(counts):
        if count:
            yield expert, slice(begin, begin + count)
        begin += count


def _part(x: QuantizedTensor, rows: slice) -> QuantizedTensor:
    return QuantizedTensor(x.data[rows], x.scale_inv, x.format)


def _matrix(weight: QuantizedTensor, expert: int, num_out: int) -> QuantizedTensor:
    return _part(weight, slice(expert * num_out, (expert + 1) * num_out))


def _padded(x: QuantizedTensor) -> QuantizedTensor:
    missing = -x.shape[0] % DIM_MULTIPLE
    if not missing or x.data.dtype.itemsize > 1:
        return x
    codes = F.pad(x.data.view(torch.uint8), (0, 0, 0, missing))  # the byte 0 is the value 0 in every format
    return QuantizedTensor(codes.view(x.data.dtype), x.scale_inv, x.format)
