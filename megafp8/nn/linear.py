"""Linear layers split over tp, by output (column) or by input (row), in the compute dtype or in FP8.

Column: the input is whole (or gathered along S under sequence parallelism), each rank makes its own outputs. Row:
each rank holds its own inputs, the outputs are summed over tp (and scattered along S). The conjugates are in
parallel/collectives; at tp = 1 nothing of this costs anything. What happens inside, and what overlaps: nn/gemm.
"""

from __future__ import annotations

import torch
from torch import nn

from megafp8.core.layout import Layout
from megafp8.fp8.linear import LinearState
from megafp8.nn.gemm import Split, linear
from megafp8.nn.parameter import Init, declare
from megafp8.nn.recompute import Rebuild
from megafp8.parallel.collectives import copy_to, gather_from, reduce_from, scatter_to
from megafp8.parallel.mesh import Mesh

Tensor = torch.Tensor


class ColumnLinear(nn.Module):
    """[S or S/tp, B, K] -> [S, B, N/tp]; weight [*parts, K], its last output dim split over tp.

    `parts` is (N,) or, for matrices stacked into one GEMM, (2, F) with N = 2 F: then each rank has its piece of both.
    `rows`: the weight is split over kvtp only, and of its piece this rank uses these rows (kv heads fewer than tp);
    the other rows get zero gradients, and the gradients are summed over kvrep.
    """

    def __init__(
        self,
        in_features: int,
        parts: tuple[int, ...],
        *,
        bias: bool,
        std: float,
        state: LinearState | None,
        mesh: Mesh,
        dtype: torch.dtype,
        rows: tuple[slice, ...] | None = None,
    ) -> None:
        super().__init__()
        self.mesh, self.state, self.split = mesh, state, Split.of(mesh, "column", rows)
        split = {len(parts) - 1: "tp" if rows is None else "kvtp"}
        partial = () if rows is None else ("kvrep",)
        self.weight = declare(Layout((*parts, in_features), split, partial), Init(std), mesh=mesh, dtype=dtype)
        self.bias = declare(Layout(parts, split, partial), Init(), mesh=mesh, dtype=dtype) if bias else None

    def forward(self, x: Tensor, rebuild: Rebuild | None = None) -> Tensor:
        """`rebuild`, if given, makes x again in the backward pass, so that x is not kept."""
        return linear(x, self.weight, self.bias, self.state, self.split, rebuild)


def enter(x: Tensor, mesh: Mesh) -> Tensor:
    """x whole on every tp rank, before different work: gathered along S, or as it is. Gradients are summed."""
    return gather_from(x, mesh, "tp", 0) if mesh.sequence_parallel else copy_to(x, mesh, "tp")


def leave(x: Tensor, mesh: Mesh) -> Tensor:
    """The sum of the ranks' parts, scattered along S under sequence parallelism."""
    return scatter_to(x, mesh, "tp", 0) if mesh.sequence_parallel else reduce_from(x, mesh, "tp")


class RowLinear(nn.Module):
    """[S, B, K/tp] -> [S or S/tp, B, N]; weight [N, K], split over tp along K; bias [N], whole, added to the sum."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        std: float,
        state: LinearState | None,
        mesh: Mesh,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.mesh, self.state, self.split = mesh, state, Split.of(mesh, "row")
        self.weight = declare(Layout((out_features, in_features), {1: "tp"}), Init(std), mesh=mesh, dtype=dtype)
        partial = ("tp",) if mesh.sequence_parallel else ()
        layout = Layout((out_features,), grad_sum=partial)
        self.bias = declare(layout, Init(), mesh=mesh, dtype=dtype) if bias else None

    def forward(self, x: Tensor, rebuild: Rebuild | None = None, columns: Tensor | None = None) -> Tensor:
        """`rebuild`, if given, makes x again in the backward pass, so that x is not kept; `columns`: see nn/smooth."""
        return linear(x, self.weight, self.bias, self.state, self.split, rebuild, columns)
