"""The linears, norms and MLP of a model, computed by Transformer Engine; parameters, names and Layouts are our own.

A norm gives no tensor but a `Normed`: the LayerNormLinear or LayerNormMLP behind it computes it with its GEMM.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

from megafp8.nn.context import Context
from megafp8.nn.linear import ColumnLinear, RowLinear
from megafp8.nn.mla import ReplicatedLinear
from megafp8.nn.norm import LayerNorm, RMSNorm
from megafp8.nn.recompute import Rebuild
from megafp8.nn.te_weights import Part

Tensor = torch.Tensor


class Normed(NamedTuple):
    """The norm of x, not yet computed."""

    x: Tensor
    norm: Any

    def value(self) -> Tensor:
        """It, computed."""
        result: Tensor = self.norm.value(self.x)
        return result


def plain(y: Tensor | Normed) -> Tensor:
    """y as a tensor."""
    return y.value() if isinstance(y, Normed) else y


class EngineNorm:
    """What RMSNorm and LayerNorm by Transformer Engine have in common; mixed into our own, which hold the parameters.

    Args of `use`: inner: Transformer Engine's module; lazy: forward gives a `Normed`.
    """

    def use(self, inner: Any, *, lazy: bool) -> None:
        """Compute with `inner`."""
        self._inner, self.lazy = (inner,), lazy  # in a tuple: no child, so that it adds no names

    def forward(self, x: Tensor, branch: Tensor | None = None) -> tuple[Tensor, Tensor | Normed]:
        """(x + branch, its norm)."""
        total = x if branch is None else x + branch
        return total, Normed(total, self) if self.lazy else self.value(total)

    def value(self, total: Tensor) -> Tensor:
        """The norm of `total`."""
        inner: Any = self._inner[0]
        for name in ("weight", "bias"):
            parameter = getattr(self, name, None)
            if inner._parameters.get(name) is not parameter:
                inner._parameters[name] = parameter
        result: Tensor = inner(total)
        return result


class EngineRMSNorm(EngineNorm, RMSNorm):  # type: ignore[misc]  # its y may be a Normed
    """RMSNorm by Transformer Engine."""


class EngineLayerNorm(EngineNorm, LayerNorm):  # type: ignore[misc]  # likewise
    """LayerNorm by Transformer Engine."""


class EngineColumn(ColumnLinear):
    """ColumnLinear by Transformer Engine: LayerNormLinear if `normed`, else Linear."""

    def use(self, part: Part, *, normed: bool, quantized: bool) -> None:
        """Compute with `part`."""
        self.part, self.normed = part, normed
        for name in ("weight", "bias"):
            part.lend(self, name, name, rows=self.split.rows, quantized=quantized)

    def forward(self, x: Any, rebuild: Rebuild | None = None) -> Tensor:
        """x [S or S/tp, B, K], or the `Normed` of it; nothing is rebuilt, for codes are kept anyway."""
        assert rebuild is None, "Transformer Engine's modules keep their inputs themselves"
        if not self.normed:
            return self.part(plain(x))
        assert x.norm is self.part.norm
        return self.part(x.x)


class EngineRow(RowLinear):
    """RowLinear by Transformer Engine."""

    def use(self, part: Part, *, quantized: bool) -> None:
        """Compute with `part`."""
        self.part = part
        for name in ("weight", "bias"):
            part.lend(self, name, name, quantized=quantized)

    def forward(self, x: Tensor, rebuild: Rebuild | None = None, columns: Tensor | None = None) -> Tensor:
        """x [S, B, K/tp] -> [S or S/tp, B, N]."""
        assert rebuild is None and columns is None, "Transformer Engine's modules keep their inputs themselves"
        return self.part(x)


class EngineReplicated(ReplicatedLinear):
    """ReplicatedLinear by Transformer Engine."""

    def use(self, part: Part, *, quantized: bool) -> None:
        """Compute with `part`."""
        self.part = part
        part.lend(self, "weight", "weight", quantized=quantized)

    def forward(self, x: Any, rebuild: Rebuild | None = None) -> Tensor:
        """x [S or S/tp, B, K], or the `Normed` of it."""
        assert rebuild is None, "Transformer Engine's modules keep their inputs themselves"
        return self.part(plain(x))


class EngineMLP(nn.Module):
    """Norm, first GEMM, activation and second GEMM as one LayerNormMLP; the linears only hold the parameters."""

    def __init__(self, first: tuple[str, ColumnLinear], down: RowLinear, part: Part, *, quantized: bool) -> None:
        super().__init__()
        name, up = first
        self.add_module(name, up)
        self.down, self.part = down, part
        for holder, prefix in ((up, "fc1"), (down, "fc2")):
            for kind in ("weight", "bias"):
                part.lend(holder, kind, f"{prefix}_{kind}", quantized=quantized)

    def forward(self, y: Normed, context: Context, rebuild: Rebuild | None = None) -> Tensor:
        """The `Normed` of x [S or S/tp, B, H] -> the MLP's branch of that shape."""
        assert rebuild is None, "Transformer Engine's modules keep their inputs themselves"
        assert y.norm is self.part.norm
        return self.part(y.x)
