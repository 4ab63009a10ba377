"""Token and position embeddings. The vocabulary is split over tp; each rank looks up the rows that it holds."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import nn

from megafp8.core.layout import Layout
from megafp8.nn.linear import leave
from megafp8.nn.parameter import Init, declare
from megafp8.parallel.mesh import Mesh

Tensor = torch.Tensor


def vocabulary(vocab_size: int, hidden_size: int) -> Layout:
    """Rows of a [V, H] weight over tp. The last rank has fewer where V does not divide: no row is made up."""
    return Layout((vocab_size, hidden_size), {0: "tp"}, uneven=True)


class Embedding(nn.Module):
    """tokens [B, S] int64 -> [S, B, H] (a shard along S under sequence parallelism); weight [V, H], V split over tp.

    `tied`: the output layer uses the weight too. Where it stands on another pipeline rank, both hold a copy, and the
    gradient is the sum of theirs.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        *,
        std: float,
        mesh: Mesh,
        dtype: torch.dtype,
        tied: bool = False,
    ) -> None:
        super().__init__()
        self.mesh = mesh
        layout = vocabulary(vocab_size, hidden_size)
        if tied and mesh.size("embedding") > 1:
            layout = replace(layout, grad_sum=("embedding",))
        self.first_id = layout.local_slices(mesh)[0].start
        self.weight = declare(layout, Init(std), mesh=mesh, dtype=dtype)

    def forward(self, tokens: Tensor) -> Tensor:
        if self.mesh.size("tp") == 1:
            return F.embedding(tokens.t(), self.weight)
        local = tokens.t() - self.first_id
        mine = (local >= 0) & (local < self.weight.shape[0])
        found = F.embedding(local.where(mine, 0), self.weight) * mine[..., None].to(self.weight.dtype)
        return leave(found, self.mesh)


class PositionEmbedding(nn.Module):
    """x [S, B, H] (or a shard along S) -> x + the learned positions; weight [P, H], whole on every rank."""

    def __init__(self, max_length: int, hidden_size: int, *, std: float, mesh: Mesh, dtype: torch.dtype) -> None:
        super().__init__()
        self.mesh = mesh
        layout = Layout((max_length, hidden_size), grad_sum=("tp",) if mesh.sequence_parallel else ())
        self.weight = declare(layout, Init(std), mesh=mesh, dtype=dtype)

    def forward(self, x: Tensor, positions: Tensor | None) -> Tensor:
        """`positions` [1 or B, S] of the tokens of this rank's tp group, or None for 0, 1, 2, ..."""
        length = x.shape[0]
        first = self.mesh.coord("tp") * length if self.mesh.sequence_parallel else 0
        if positions is None:
            return x + self.weight[first : first + length, None]
        return x + F.embedding(positions.t()[first : first + length], self.weight)
