"""The experts' GEMMs in FP8: rows grouped by expert times stacked matrices, each group through the backend.

Recipes with one scale for a tensor have one for all rows and one for all matrices of a layer's GEMM. Transformer
Engine's GroupedLinear scales every expert by itself; here ranks and micro-batches with few rows of an expert do not
move its scale, the scale is the same wherever an expert's rows are, and codes may travel as they are. Experts whose
values are small lose nothing within the format's range, 2^15 for E4M3. Recipes with scales of blocks have them of each
expert's own blocks: its rows begin where a block of the column-wise copy does, see `RowBlocks`.

A group's rows are the summed dim of its weight gradient; real bytes are padded by zeros to the multiple that FP8 GEMMs
take, which changes no value.

Shapes: R rows, E experts, K in and N out features; `counts` are the rows of each expert, in order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate

import torch
import torch.nn.functional as F

from megafp8.fp8.linear import LinearState
from megafp8.fp8.quantized import Operand, QuantizedTensor
from megafp8.fp8.recipe import DIM_MULTIPLE

Tensor = torch.Tensor


class RowBlocks:
    """Rows moved apart so that every expert's begin at a multiple of the blocks that its weight gradient needs.

    `counts` are the rows of each expert with the zeros that follow them. Source: Transformer Engine 2.20, Fp8Padding.
    """

    def __init__(self, counts: Sequence[int], multiple: int) -> None:
        self.counts = [-(-count // multiple) * multiple for count in counts]
        self._real = list(counts)

    def apart(self, x: Tensor) -> Tensor:
        """Rows [R, K] with zeros between the experts."""
        if self._real == self.counts:
            return x
        return x.new_zeros((sum(self.counts), x.shape[1])).index_copy_(0, self._places(x.device), x)

    def together(self, y: Tensor) -> Tensor:
        """`apart` undone."""
        return y if self._real == self.counts else y.index_select(0, self._places(y.device))

    def _places(self, device: torch.device) -> Tensor:
        # made anew each time: kept for backward they would be 8 bytes a row
        begins = accumulate(self.counts, initial=0)
        spans = [torch.arange(begin, begin + n) for begin, n in zip(begins, self._real, strict=False)]
        return torch.cat(spans).to(device)


def row_multiple(state: LinearState) -> int:
    """What an expert's rows must be a multiple of: the blocks of the two operands of its weight gradient."""
    return max(size for role in ("input", "grad_output") for size in state.roles[role].spec.block or (1,))


def grouped_fprop(
    state: LinearState, x: QuantizedTensor, weight: QuantizedTensor, counts: Sequence[int], dtype: torch.dtype
) -> Tensor:
    """x [R, K] times its expert's part of weight [E * N, K], transposed -> [R, N] of `dtype`."""
    num_out = weight.shape[0] // len(counts)
    out = torch.empty((x.shape[0], num_out), dtype=dtype, device=x.data.device)
    precise = x.rows.spec.block is not None  # as fp8/linear's fprop
    for expert, rows in _runs(counts):
        part = weight.rows.part(rows=_matrix(expert, num_out))
        out[rows] = state.backend.gemm(x.rows.part(rows=rows), part, None, dtype, precise=precise)
    return out


def grouped_dgrad(
    state: LinearState, grad: QuantizedTensor, weight: QuantizedTensor, counts: Sequence[int], dtype: torch.dtype
) -> Tensor:
    """grad [R, N] times its expert's part of weight [E * N, K] -> [R, K] of `dtype`."""
    num_out, columns = grad.shape[1], weight.columnwise
    out = torch.empty((grad.shape[0], columns.shape[0]), dtype=dtype, device=grad.data.device)
    for expert, rows in _runs(counts):
        part = columns.part(columns=_matrix(expert, num_out))
        out[rows] = state.backend.gemm(grad.rows.part(rows=rows), part, None, dtype, precise=True)
    return out


def grouped_wgrad(
    state: LinearState, grad: QuantizedTensor, x: QuantizedTensor, counts: Sequence[int], dtype: torch.dtype
) -> Tensor:
    """Each run of grad [R, N], transposed, times that of x [R, K] -> [E, N, K] of `dtype`; 0 where it is empty."""
    left, right = grad.columnwise, x.columnwise
    out = torch.zeros((len(counts), left.shape[0], right.shape[0]), dtype=dtype, device=left.data.device)
    for expert, rows in _runs(counts):
        a, b = _padded(left.part(columns=rows)), _padded(right.part(columns=rows))
        out[expert] = state.backend.gemm(a, b, None, dtype, precise=True)
    return out


def _runs(counts: Sequence[int]) -> Iterator[tuple[int, slice]]:
    begin = 0
    for expert, count in enumerate(counts):
        if count:
            yield expert, slice(begin, begin + count)
        begin += count


def _matrix(expert: int, num_out: int) -> slice:
    return slice(expert * num_out, (expert + 1) * num_out)


def _padded(x: Operand) -> Operand:
    missing = -x.shape[-1] % DIM_MULTIPLE
    if not missing or not x.holds_codes:
        return x
    codes = F.pad(x.data.view(torch.uint8), (0, missing))  # the byte 0 is the value 0 in every format
    return replace(x, data=codes.view(x.data.dtype))
