"""The experts' GEMMs: rows grouped by expert times that expert's matrix, one autograd function for all of them.

In the compute dtype: on a CPU a loop over the experts, each writing into its piece of the result; on a GPU torch's
grouped GEMM, which reads the group sizes on the device, for the dtypes and dims that it takes. In FP8 (fp8/grouped) a
loop over the experts everywhere. An expert without rows costs nothing and gets a zero gradient. Weight gradients go
into the current store of nn/deferred, if there is one.

Shapes: R rows, E experts of this rank, K in and N out features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from megafp8.fp8.grouped import RowBlocks, grouped_dgrad, grouped_fprop, grouped_wgrad, row_multiple
from megafp8.fp8.linear import Kept, LinearState
from megafp8.fp8.quantized import QuantizedTensor
from megafp8.nn.deferred import current_store, deliver
from megafp8.nn.recompute import Rebuild

Tensor = torch.Tensor

# Renamed when it became public; dims must be whole 16-byte lines.
_library_grouped_mm = getattr(torch.nn.functional, "grouped_mm", getattr(torch, "_grouped_mm", None))
_LINE_BYTES = 16


def grouped_linear(
    x: Tensor,
    weight: Tensor,
    counts: Tensor,
    rebuild: Rebuild | None = None,
    *,
    state: LinearState | None = None,
    group: dist.ProcessGroup | None = None,
    codes: QuantizedTensor | None = None,
    columns: Tensor | None = None,
) -> Tensor:
    """x [R, K], `counts` [E] int64 rows of each expert in order, times weight [E, ..., K] (flattened to N) -> [R, N].

    Args:
        rebuild: makes x again in the backward pass, bit for bit, so that it is not kept; in FP8 the codes are kept.
        state: puts the GEMMs into FP8.
        group: the ranks that hold the rows of other experts of the same layer; current scaling makes one scale of all.
        codes: x, where it is quantized already; x itself then has no values.
        columns: [E, K], multiply the columns of each expert's matrix (nn/smooth).
    """
    y: Tensor
    if state is None:
        y = _GroupedLinear.apply(x, weight, counts, rebuild, columns)
    else:
        y = _QuantizedGrouped.apply(x, weight, counts, state, group, codes, columns, torch.is_grad_enabled())
    return y


def _used(weight: Tensor, columns: Tensor | None) -> Tensor:
    """The matrices [E, N, K] that are multiplied."""
    matrices = weight.detach().flatten(1, -2)
    return matrices if columns is None else matrices * columns.unsqueeze(1)


def _of_weight(grad: Tensor, columns: Tensor | None) -> Tensor:
    """The weight's gradient from that of the matrices that were multiplied, [E, N, K]."""
    return grad if columns is None else grad.mul_(columns.unsqueeze(1))


def _give(weight: Tensor, weight_grad: Callable[[], Tensor], *, wanted: bool) -> Tensor | None:
    """The weight's gradient, or None where it is not wanted or goes into the current store."""
    if not wanted:
        return None
    store = current_store()
    if store is None:
        return weight_grad()
    store.defer(lambda: deliver(weight, weight_grad()))
    return None


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, counts: Tensor, rebuild: Rebuild | None, columns: Tensor | None
    ) -> Tensor:
        groups = Groups(counts)
        ctx.groups, ctx.rebuild, ctx.weight, ctx.columns = groups, rebuild, weight, columns
        ctx.save_for_backward(weight, *(() if rebuild else (x,)))
        return groups.times(x.detach(), _used(weight, columns).transpose(1, 2))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        groups, rebuild, weight, saved = ctx.groups, ctx.rebuild, ctx.weight, ctx.saved_tensors
        grad = grad_output.contiguous()
        dx = groups.times(grad, _used(saved[0], ctx.columns)) if ctx.needs_input_grad[0] else None

        def weight_grad() -> Tensor:
            dw = groups.transposed_times(grad, rebuild() if rebuild else saved[1])
            return _of_weight(dw, ctx.columns).view(weight.shape)

        return dx, _give(weight, weight_grad, wanted=ctx.needs_input_grad[1]), None, None, None


class _QuantizedGrouped(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        counts: Tensor,
        state: LinearState,
        group: dist.ProcessGroup | None,
        codes: QuantizedTensor | None,
        columns: Tensor | None,
        record: bool,
    ) -> Tensor:
        spread = RowBlocks(counts.tolist(), row_multiple(state))
        if codes is None:
            codes = state.quantize("input", spread.apart(x.detach()), record=record, group=group, columnwise=record)
        if columns is None:
            matrices = state.quantized_weight(weight.detach().flatten(0, -2), record=record, columnwise=record)
        else:
            matrices = state.quantized_once(_used(weight, columns).flatten(0, 1), record=record, columnwise=record)
        ctx.state, ctx.group, ctx.spread, ctx.matrices, ctx.weight = state, group, spread, matrices, weight
        ctx.x_dtype, ctx.columns, ctx.kept = x.dtype, columns, Kept.of(codes if record else None)
        # through save_for_backward, so that activation recompute can free and remake it
        ctx.save_for_backward(*ctx.kept.pop())
        return spread.together(grouped_fprop(state, codes, matrices, spread.counts, x.dtype))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        state, spread, weight, kept = ctx.state, ctx.spread, ctx.weight, ctx.kept
        grad = state.quantize("grad_output", spread.apart(grad_output.contiguous()), record=True, group=ctx.group)
        dx = None
        if ctx.needs_input_grad[0]:
            dx = spread.together(grouped_dgrad(state, grad, ctx.matrices, spread.counts, ctx.x_dtype))
        x = kept.restored(ctx.saved_tensors)

        def weight_grad() -> Tensor:
            dw = grouped_wgrad(state, grad, x, spread.counts, weight.dtype)
            return _of_weight(dw, ctx.columns).view(weight.shape)

        return dx, _give(weight, weight_grad, wanted=ctx.needs_input_grad[1]), None, None, None, None, None, None


class Groups:
    """Rows in runs of `counts` [E]."""

    def __init__(self, counts: Tensor) -> None:
        self.counts = counts

    def times(self, x: Tensor, matrices: Tensor) -> Tensor:
        """x [R, K] times matrices [E, K, N], each on its run of rows -> [R, N]."""
        if _by_library(x, matrices):
            return _library_grouped_mm(x, matrices, offs=self._ends())  # type: ignore[misc]
        out = x.new_empty((len(x), matrices.shape[2]))
        for expert, rows in self._runs():
            torch.mm(x[rows], matrices[expert], out=out[rows])
        return out

    def transposed_times(self, grad: Tensor, x: Tensor) -> Tensor:
        """grad [R, N] transposed times x [R, K], run by run -> [E, N, K]; zero where a run is empty."""
        if _by_library(grad, x):
            return _library_grouped_mm(grad.t(), x, offs=self._ends())  # type: ignore[misc]
        out = x.new_empty((len(self.counts), grad.shape[1], x.shape[1]))
        for expert, rows in self._runs():
            torch.mm(grad[rows].t(), x[rows], out=out[expert])
        out[self.counts == 0] = 0
        return out

    def _ends(self) -> Tensor:
        return self.counts.cumsum(0).to(torch.int32)

    def _runs(self) -> Iterator[tuple[int, slice]]:
        begin = 0
        for expert, count in enumerate(self.counts.tolist()):
            if count:
                yield expert, slice(begin, begin + count)
            begin += count


def _by_library(*operands: Tensor) -> bool:
    return (
        _library_grouped_mm is not None
        and all(t.is_cuda and t.dtype == torch.bfloat16 for t in operands)
        and all(t.shape[-1] * t.dtype.itemsize % _LINE_BYTES == 0 for t in operands)
    )
