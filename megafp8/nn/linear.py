"""Linear layers split over tp, by output (column) or by input (row), in the compute dtype or in FP8.

Column: the input is whole (or gathered along S under sequence parallelism), each rank makes its own outputs. Row:
each rank holds its own inputs, the outputs are summed over tp (and scattered along S). The conjugates are in
parallel/collectives; at tp = 1 nothing of this costs anything.
"""

from __future__ import annotations

import torch
from torch import nn

from megafp8.core.layout import Layout
from megafp8.fp8.linear import LinearState
from megafp8.nn.gemm import linear
from megafp8.nn.parameter import Init, declare
from megafp8.nn.recompute import Rebuild
from megafp8.parallel.collectives import all_gather, copy_to, gather_from, reduce_from, scatter_to
from megafp8.parallel.mesh import Mesh

Tensor = torch.Tensor


class ColumnLinear(nn.Module):
    """[S or S/tp, B, K] -> [S, B, N/tp]; weight [*parts, K], its last output dim split over tp.

    `parts` is (N,) or, for matrices stacked into one GEMM, (2, F) with N = 2 F: then each rank has its piece of both.
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
    ) -> None:
        super().__init__()
        self.mesh, self.state = mesh, state
        split = {len(parts) - 1: "tp"}
        self.weight = declare(Layout((*parts, in_features), split), Init(std), mesh=mesh, dtype=dtype)
        self.bias = declare(Layout(parts, split), Init(), mesh=mesh, dtype=dtype) if bias else None

    def forward(self, x: Tensor, rebuild: Rebuild | None = None) -> Tensor:
        """`rebuild`, if given, makes x again in the backward pass, so that x is not kept."""
        make = rebuild
        if make is not None and self.mesh.sequence_parallel:
            again = make

            def make() -> Tensor:
                return all_gather(again(), self.mesh.group("tp"))

        return linear(enter(x, self.mesh), self.weight, self.bias, self.state, make)


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
        self.mesh, self.state = mesh, state
        self.weight = declare(Layout((out_features, in_features), {1: "tp"}), Init(std), mesh=mesh, dtype=dtype)
        partial = ("tp",) if mesh.sequence_parallel else ()
        layout = Layout((out_features,), grad_sum=partial)
        self.bias = declare(layout, Init(), mesh=mesh, dtype=dtype) if bias else None

    def forward(self, x: Tensor, rebuild: Rebuild | None = None) -> Tensor:
        """`rebuild`, if given, makes x again in the backward pass, so that x is not kept."""
        alone = self.mesh.size("tp") == 1
        y = leave(linear(x, self.weight, self.bias if alone else None, self.state, rebuild), self.mesh)
        return y if alone or self.bias is None else y + self.bias
