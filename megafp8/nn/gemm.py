"""A linear layer split over tp as one autograd function: its three GEMMs and the communication that they hide.

Column (each rank has its own outputs), under sequence parallelism:

    forward    all-gather x along S, y = x W^T; kept is this rank's shard of x
    backward   all-gather x again     | while  dx = g W  is computed
               reduce-scatter dx      | while  dW = g^T x  is computed

without it x is whole on every rank and dx is all-reduced while dW is computed. Row (each rank has its own inputs): y
is reduce-scattered (all-reduced), in backward g is gathered first, for both GEMMs want it. In FP8 what is gathered
are codes, one byte an element, wherever the ranks quantize with one scale. Weight gradients go into the current store
of nn/deferred, if there is one, and the gather of x with them.

Sources: Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", section 4.2.2;
Megatron-LM tensor_parallel/layers.py, LinearWithGradAccumulationAndAsyncCommunication.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F

from megafp8.fp8.linear import Kept, LinearState, fprop, picked
from megafp8.fp8.linear import dgrad as quantized_dgrad
from megafp8.fp8.linear import wgrad as quantized_wgrad
from megafp8.fp8.quantized import Operand, QuantizedTensor
from megafp8.nn.deferred import WeightGrads, current_store, deliver
from megafp8.nn.recompute import Rebuild
from megafp8.parallel.collectives import (
    Group,
    Pending,
    all_gather,
    all_reduce_,
    done,
    reduce_scatter,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
)
from megafp8.parallel.mesh import Mesh

Tensor = torch.Tensor
Side = Literal["column", "row"]


@dataclass(frozen=True, eq=False)
class Split:
    """How a linear lies over tp.

    Attributes:
        side: "column" splits outputs, "row" inputs.
        group: of tp; None: nothing is split, and nothing below costs anything.
        sequence_parallel: the unsplit side (a column's input, a row's output) is sharded along S.
        rows: of the weight that this rank uses, if it shares the weight with others (kv heads fewer than tp).
        pieces: ranks with the other tokens, where neither side is gathered: they quantize with one scale.
    """

    side: Side
    group: Group = None
    sequence_parallel: bool = False
    rows: tuple[slice, ...] | None = None
    pieces: Group = None

    @staticmethod
    def of(mesh: Mesh, side: Side, rows: tuple[slice, ...] | None = None) -> Split:
        """The split of a linear on `mesh`."""
        return Split(side, mesh.group("tp"), mesh.sequence_parallel, rows)

    @property
    def gathers_input(self) -> bool:
        """Whether the input is a shard along S of what the GEMM wants."""
        return self.side == "column" and self.sequence_parallel

    @property
    def gathers_grad(self) -> bool:
        """Whether the output's gradient is a shard along S of what the GEMMs want."""
        return self.side == "row" and self.sequence_parallel


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: LinearState | None = None,
    split: Split | None = None,
    rebuild: Rebuild | None = None,
    columns: Tensor | None = None,
) -> Tensor:
    """x [S, ..., K] times weight [..., K] (its leading dims flattened to N) plus bias -> [S, ..., N] in x's dtype.

    `weight` and `bias` are this rank's; a row's bias is whole and added to the sum. The first dim of x (column) or of
    the result (row) is a shard under sequence parallelism. `rebuild` makes x again in the backward pass, bit for bit,
    so that it is not kept; in FP8 the codes are kept instead. `columns` [K] multiply the weight's columns (nn/smooth).
    """
    split = split or Split("column")
    y: Tensor = _Linear.apply(x, weight, bias, state, split, rebuild, columns, torch.is_grad_enabled())
    return y


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        state: LinearState | None,
        split: Split,
        rebuild: Rebuild | None,
        columns: Tensor | None,
        record: bool,
    ) -> Tensor:
        flat, vector = _rows(x.detach()), None if bias is None else picked(bias.detach().flatten(), split.rows)
        ctx.state, ctx.split, ctx.weight, ctx.x, ctx.bias = state, split, weight, (x.shape, x.dtype), bias
        ctx.columns = columns
        inside = vector if split.side == "column" or split.group is None else None  # a row's is added to the sum
        if state is None:
            whole = all_gather(flat, split.group) if split.gathers_input else flat
            y = F.linear(whole, _used(weight.detach(), split, columns), inside)
            ctx.kept = _Input(None, split.gathers_input, rebuild)
            ctx.save_for_backward(weight, *(() if rebuild else (flat,)))
        else:
            kept, codes = _quantized_input(flat, state, split, record)
            matrix = _quantized_weight(state, weight, split, columns, record=record, columnwise=record)
            y = fprop(state, codes, matrix, inside, x.dtype)
            ctx.matrix = matrix if state.keeps_weight else None
            ctx.kept = _Input(Kept.of(kept if record else None), kept is not codes, None)
            # through save_for_backward, so that activation recompute can free and remake it
            ctx.save_for_backward(*ctx.kept.codes.pop())
        if split.side == "row" and split.group is not None:
            y = reduce_scatter(y, split.group) if split.sequence_parallel else all_reduce_(y, split.group)
            if vector is not None:
                y += vector
        return y.view(-1, *x.shape[1:-1], y.shape[-1])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        state: LinearState | None = ctx.state
        split: Split = ctx.split
        (shape, dtype), weight, saved = ctx.x, ctx.weight, ctx.saved_tensors
        grad = _rows(grad_output).contiguous()
        operand = _whole_grad(grad, state, split)
        wants_dx, wants_dw, wants_db = ctx.needs_input_grad[:3]
        weight_grad = None
        if wants_dw:
            kept = saved if state else saved[1:]
            weight_grad = _WeightGrad(operand, ctx.kept, kept, weight, state, split, ctx.columns)
        store = current_store()
        if weight_grad is not None and store is None:
            weight_grad.start()
        dx: Pending[Any] = done(None)
        if wants_dx:
            matrix = _used(saved[0], split, ctx.columns) if state is None else ctx.matrix
            if matrix is None and state is not None:
                matrix = _quantized_weight(state, weight, split, ctx.columns, record=False)
            dx = start_sum(dgrad(operand, matrix, state, dtype), split).then(lambda total: total.view(shape))
        dw = weight_grad.compute_or_defer(store) if weight_grad is not None else None
        db = _bias_grad(grad, ctx.bias, split) if wants_db else None
        return dx.wait(), dw, db, None, None, None, None, None


@dataclass(frozen=True, eq=False)
class _Input:
    """How the input comes back in the backward pass.

    Attributes:
        codes: of it that are kept; None: it is kept in the compute dtype.
        sharded: a shard along S is kept, to be gathered.
        rebuild: makes it; then nothing is kept.
    """

    codes: Kept | None
    sharded: bool
    rebuild: Rebuild | None

    def start(self, saved: Sequence[Tensor], group: Group) -> Pending[Any]:
        """Start bringing it back whole from the tensors kept."""
        operand: Any
        if self.codes is not None:
            operand = self.codes.restored(saved)
        else:
            operand = _rows(self.rebuild()) if self.rebuild else saved[0]
        return start_gather(operand, group) if self.sharded else done(operand)


@dataclass(eq=False)
class _WeightGrad:
    """A weight gradient to be computed: `start` the gather that it waits for, if any, then `compute`."""

    grad: Any
    kept: _Input
    saved: Sequence[Tensor]
    weight: Tensor
    state: LinearState | None
    split: Split
    columns: Tensor | None
    gathering: Pending[Any] | None = None

    def start(self) -> None:
        if self.kept.sharded:
            self.gathering = self.kept.start(self.saved, self.split.group)

    def compute(self) -> Tensor:
        x = (self.gathering or self.kept.start(self.saved, self.split.group)).wait()
        dw = wgrad(self.grad, x, self.state, self.weight.dtype)
        if self.columns is not None:
            dw *= self.columns
        return _put_back(dw, self.weight.shape, self.split.rows)

    def compute_or_defer(self, store: WeightGrads | None) -> Tensor | None:
        if store is None:
            return self.compute()
        store.defer(lambda: deliver(self.weight, self.compute()), prepare=self.start)
        return None


def _used(weight: Tensor, split: Split, columns: Tensor | None) -> Tensor:
    """The matrix [N, K] that is multiplied: the rows that this rank uses, its columns times `columns`."""
    matrix = picked(weight.flatten(0, -2), split.rows)
    return matrix if columns is None else matrix * columns


def _quantized_weight(
    state: LinearState,
    weight: Tensor,
    split: Split,
    columns: Tensor | None,
    *,
    record: bool,
    columnwise: bool = True,
) -> QuantizedTensor:
    if columns is not None:
        return state.quantized_once(_used(weight.detach(), split, columns), record=record, columnwise=columnwise)
    return state.quantized_weight(weight.flatten(0, -2), record=record, rows=split.rows, columnwise=columnwise)


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _quantized_input(
    flat: Tensor, state: LinearState, split: Split, record: bool
) -> tuple[QuantizedTensor, QuantizedTensor]:
    """What is kept for backward, and the whole input for the GEMM: the same one, or the one is a shard of the other."""
    if not split.gathers_input:
        codes = state.quantize("input", flat, record=record, group=split.pieces, columnwise=record)
        return codes, codes
    if state.alike("input", len(flat)):
        codes = state.quantize("input", flat, record=record, group=split.group, columnwise=record)
        return codes.for_wgrad(), start_gather(codes.for_rows(), split.group).wait()
    codes = state.quantize("input", all_gather(flat, split.group), record=record, columnwise=record)
    return codes, codes


def _whole_grad(grad: Tensor, state: LinearState | None, split: Split) -> Any:
    """The output's gradient as the GEMMs want it: whole along S, quantized if there is a state."""
    if not split.gathers_grad:
        return grad if state is None else state.quantize("grad_output", grad, record=True, group=split.pieces)
    if state is None:
        return all_gather(grad, split.group)
    if state.alike("grad_output", len(grad)):
        codes = state.quantize("grad_output", grad, record=True, group=split.group)
        return start_gather(codes, split.group).wait()
    return state.quantize("grad_output", all_gather(grad, split.group), record=True)


def start_gather(tensor: Any, group: Group) -> Pending[Any]:
    """Start gathering a tensor along its first dim, or the codes of a quantized one (one byte an element)."""
    if not isinstance(tensor, QuantizedTensor):
        return start_all_gather(tensor, group)
    rows = None if tensor.rowwise is None else _gather_operand(tensor.rowwise, group, 0)
    follows = tensor.rowwise is not None and tensor.rowwise.spec.same_both_ways
    has_own = tensor.blockwise_columns is not None and not follows  # else the transpose of what is gathered
    columns = _gather_operand(tensor.blockwise_columns, group, 1) if has_own else None  # type: ignore[arg-type]

    def finish() -> QuantizedTensor:
        return QuantizedTensor(None if rows is None else rows.wait(), None if columns is None else columns.wait())

    return Pending((), finish)


def _gather_operand(operand: Operand, group: Group, dim: int) -> Pending[Operand]:
    """The pieces of an operand joined along `dim`; their scales are those of the whole (LinearState.alike)."""
    parts = [start_all_gather(tensor, group, dim) for tensor in operand.wire()]
    return Pending((), lambda: operand.from_wire([part.wait() for part in parts]))


def start_sum(dx: Tensor, split: Split) -> Pending[Tensor]:
    """Start summing a column's input gradient over tp; a row's is whole already."""
    if split.side == "row" or split.group is None:
        return done(dx)
    return start_reduce_scatter(dx, split.group) if split.sequence_parallel else start_all_reduce(dx, split.group)


def dgrad(grad: Any, weight: Any, state: LinearState | None, dtype: torch.dtype) -> Tensor:
    """grad [M, N] times weight [N, K] -> [M, K] of `dtype`."""
    return grad @ weight if state is None else quantized_dgrad(state, grad, weight, dtype)


def wgrad(grad: Any, x: Any, state: LinearState | None, dtype: torch.dtype) -> Tensor:
    """grad [M, N] transposed times x [M, K] -> [N, K] of `dtype`."""
    return grad.t() @ x if state is None else quantized_wgrad(state, grad, x, dtype)


def _bias_grad(grad: Tensor, bias: Tensor, split: Split) -> Tensor:
    return _put_back(grad.sum(0).to(bias.dtype), bias.shape, split.rows)  # torch sums 16 bits in fp32, rounds once


def _put_back(grad: Tensor, shape: torch.Size, rows: Sequence[slice] | None) -> Tensor:
    """The gradient of `picked`, in the parameter's shape."""
    if rows is None:
        return grad.view(shape)
    full = grad.new_zeros(shape)
    flat, start = full.view(-1, *grad.shape[1:]), 0
    for part in rows:
        stop = start + part.stop - part.start
        flat[part] = grad[start:stop]
        start = stop
    return full
