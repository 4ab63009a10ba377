"""The load of experts over a training step: counted by routers, read for the log, and evened by their biases.

A step is: `begin_step`, the micro-batches, `update_balance`; `read_load` at any time after the last backward pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from megafp8.nn.router import Router
from megafp8.parallel.collectives import all_reduce_
from megafp8.parallel.mesh import Mesh

BATCH_AXES = ("dp", "cp", "tp")  # over which the tokens of the global batch lie


def routers_of(model: nn.Module) -> dict[str, Router]:
    """The routers of this rank's layers by global name, in order."""
    return {name: module for name, module in model.named_modules() if isinstance(module, Router)}


def begin_step(routers: Mapping[str, Router]) -> None:
    """Begin a training step: nothing has been routed."""
    for router in routers.values():
        router.tally.zero_()


@torch.no_grad()
def update_balance(routers: Mapping[str, Router], mesh: Mesh) -> None:
    """End a training step: move every bias one step towards even load; one collective over dp, cp and tp.

    Loss-free balance (Wang et al. 2024; DeepSeek-V3): bias += rate * sign(mean load - load), with the loads of the
    whole global batch, so that all ranks move alike.
    """
    moved = [r for r in routers.values() if r.bias is not None and r.rules.bias_update_rate > 0]
    if not moved:
        return
    loads = torch.stack([router.tally[: router.rules.num_experts] for router in moved])
    all_reduce_(loads, mesh.group_of(BATCH_AXES))
    for router, load in zip(moved, loads, strict=True):
        assert router.bias is not None
        router.bias += router.rules.bias_update_rate * torch.sign(load.mean() - load).to(router.bias.dtype)


@dataclass(frozen=True)
class ExpertLoad:
    """A layer's load over a step's global batch.

    Attributes:
        layer: number of the decoder layer.
        shares: of all assignments, by expert; the sum is 1.
        dropped: share of assignments that were over capacity.
        aux_loss, z_loss: without their coefficients; an even load has aux_loss 1, none has 0.
    """

    layer: int
    shares: tuple[float, ...]
    dropped: float
    aux_loss: float
    z_loss: float

    @property
    def max_load(self) -> float:
        """Load of the fullest expert over the mean; 1 is even, num_experts is all on one."""
        return max(self.shares) * len(self.shares)

    @property
    def min_load(self) -> float:
        """Load of the emptiest expert over the mean."""
        return min(self.shares) * len(self.shares)


@torch.no_grad()
def read_load(
    routers: Mapping[str, Router], mesh: Mesh, *, moe_layers: list[int], num_experts: int, device: torch.device
) -> list[ExpertLoad]:
    """The step's load of every layer with experts, equal on all ranks; one collective over the whole mesh.

    Args:
        routers: of this rank, `layers.{i}.mlp.router`; a pipeline stage may have none.
        moe_layers: numbers of all decoder layers with experts.
    """
    tallies = torch.zeros(len(moe_layers), num_experts + 3, dtype=torch.float64, device=device)
    for name, router in routers.items():
        tallies[moe_layers.index(int(name.split(".")[1]))] = router.tally
    all_reduce_(tallies, mesh.group_of(("pp", *BATCH_AXES)))
    loads = []
    for layer, (*counts, dropped, aux, z) in zip(moe_layers, tallies.tolist(), strict=True):
        total = max(1.0, sum(counts))
        loads.append(ExpertLoad(layer, tuple(c / total for c in counts), dropped / total, aux, z))
    return loads


def load_fields(loads: Sequence[ExpertLoad]) -> dict[str, Any]:
    """The record of a step's load: means over the layers, the highest load, and each layer's own."""
    layers = [
        {
            "layer": load.layer,
            "load": [round(share, 6) for share in load.shares],
            "max_load": load.max_load,
            "min_load": load.min_load,
            "dropped": load.dropped,
            "aux_loss": load.aux_loss,
            "z_loss": load.z_loss,
        }
        for load in loads
    ]
    names = ("aux_loss", "z_loss", "dropped")
    means = {name: sum(getattr(load, name) for load in loads) / len(loads) for name in names}
    return {**means, "max_load": max(load.max_load for load in loads), "layers": layers}
