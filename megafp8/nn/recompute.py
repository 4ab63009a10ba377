"""Activation recompute: what the backward pass needs is made again instead of kept, by the same functions: same bits.

full: the first layers of a stage (or all) keep their inputs only, as Megatron's `--recompute-method block`. selective
(Korthikanti et al. 2022, section 5), by choice of: "norm" and "activation", whose outputs (the inputs of the linears
behind them) are cheap to make from tensors that are kept anyway; "core_attention", which runs the core again and keeps
q, k, v only. Our cores never keep matrices of sequence x sequence, so the last one frees only a copy of the output and
the log-sum-exp (where torch's SDPA is the core), and is not among what "selective" means by default.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

Mode = Literal["none", "selective", "full"]
Rebuild = Callable[[], torch.Tensor]
MODULES = ("core_attention", "norm", "activation")
CHEAP = ("norm", "activation")


@dataclass(frozen=True)
class RecomputePlan:
    """What is recomputed.

    Attributes:
        layers: how many layers of each pipeline stage, under "full"; the others keep everything. 0 = all.
        modules: what of each layer, under "selective"; some of MODULES.
    """

    mode: Mode = "none"
    layers: int = 0
    modules: tuple[str, ...] = CHEAP

    def is_full(self, place: int) -> bool:
        """Whether the layer at `place` of its stage keeps its inputs only."""
        return self.mode == "full" and (self.layers == 0 or place < self.layers)

    @property
    def selected(self) -> frozenset[str]:
        """What every layer makes again, of MODULES."""
        return frozenset(self.modules) if self.mode == "selective" else frozenset()


Recompute = Mode | RecomputePlan


def plan_of(recompute: Recompute) -> RecomputePlan:
    """The plan, from itself or from its mode alone."""
    return recompute if isinstance(recompute, RecomputePlan) else RecomputePlan(recompute)


def select(layer: nn.Module, modules: frozenset[str]) -> None:
    """Tell every module of a layer that has the attribute `recompute` what it shall make again, of MODULES."""
    for module in layer.modules():
        if hasattr(module, "recompute"):
            module.recompute = modules  # type: ignore[assignment]  # no parameter, whatever nn.Module's stub says


def checkpointed(function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)`, of which only the inputs are kept. Layers draw no random state: dropout is by place."""
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)
