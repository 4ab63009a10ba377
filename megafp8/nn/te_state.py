"""What Transformer Engine remembers of a linear, under the names that our own linears give it.

Transformer Engine keeps scales and amax histories of a module in two tables (forward: input, weight, output of each
GEMM; backward: grad_output, grad_input) and would save them pickled, as `_extra_state`. Here they are the same plain
tensors as a LinearState's, views into those tables: `input.scale` [1], `input.amax_history` [L] and so on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from megafp8.fp8.recipe import Recipe

Tensor = torch.Tensor
_FORWARD, _BACKWARD = "scaling_fwd", "scaling_bwd"
# table and place in a GEMM's 3 (forward) or 2 (backward) columns
_PLACES = {"input": (_FORWARD, 3, 0), "weight": (_FORWARD, 3, 1), "grad_output": (_BACKWARD, 2, 0)}


class Named(NamedTuple):
    """Takes a Backend's place in a state."""

    name: str = "te"
    reason: str = "asked for by name"


@dataclass(eq=False)
class EngineState:
    """The state of one linear inside a Transformer Engine module; takes a LinearState's place in a model.

    Attributes:
        name: the linear's, for checkpoints.
        module: the Transformer Engine module.
        gemms: numbers of the linear's GEMMs in the module; several (experts) share the first one's state.
        initialize: gives the module its tables, if it has none yet.
        renew: makes the module quantize its weights again.
        roles, observer, backend: as of a LinearState; Transformer Engine updates its own scales, and shows no tensors.
    """

    name: str
    recipe: Recipe
    module: Any
    gemms: Sequence[int]
    initialize: Callable[[], None]
    renew: Callable[[], None]

    def __post_init__(self) -> None:
        self._shared: dict[str, Any] = {}
        self.roles: dict[str, Any] = {}
        self.observer: Any = None
        self.keeps_weight, self.step = True, 0
        self.backend = Named()

    def tensors(self) -> dict[str, Tensor]:
        """`{"input.scale": ...}` as of a LinearState: live; empty for a recipe without memory."""
        if not self.recipe.new_state("meta"):
            return {}
        self.start()
        found = {}
        for role, (table, columns, place) in _PLACES.items():
            column = self.gemms[0] * columns + place
            meta = self.module.fp8_meta[table]
            found[f"{role}.amax_history"] = meta.amax_history[:, column]
            found[f"{role}.scale"] = meta.scale[column : column + 1]
        return found

    def start(self) -> None:
        """Before a module's first pass: its tables, and one state for all experts."""
        self.initialize()
        if len(self.gemms) > 1 and self.recipe.new_state("meta"):
            self._share_scales()

    def drop_weight_cache(self) -> None:
        """The weight or the scales are new."""
        self.renew()

    def begin_step(self, step: int, seed: int) -> None:
        """Transformer Engine draws its noise itself."""
        self.step = step

    def warm_up(self, until: int) -> None:
        """Transformer Engine has no warm-up: delayed scaling begins at scale 1, or at the checkpoint's scales."""

    def running(self) -> list[Tensor]:
        """The entries of the histories that collect the micro-batch under way: live, one tensor a table."""
        tables = [self.module.fp8_meta.get(table) for table in (_FORWARD, _BACKWARD)]
        return [table.amax_history[0] for table in tables if hasattr(table, "amax_history")]

    def _share_scales(self) -> None:
        """Let all GEMMs quantize with the first one's scales and collect into its amaxes, as our experts do.

        The columns of the others stay 0 and are never updated: an amax of 0 leaves scale and history alone.
        """
        for table, columns in ((_FORWARD, 3), (_BACKWARD, 2)):
            quantizers = self.module.quantizers[table]
            if self._shared.get(table) is quantizers:
                continue
            self._shared[table] = quantizers
            for number, quantizer in enumerate(quantizers):
                first = quantizers[number % columns]
                quantizer.scale, quantizer.amax = first.scale, first.amax


@torch.no_grad()
def kept(states: Sequence[EngineState]) -> Callable[[], None]:
    """Remember the running amaxes; the returned call puts them back (evaluation leaves no trace)."""
    live = [tensor for state in states for tensor in state.running()]
    before = [tensor.clone() for tensor in live]

    def put_back() -> None:
        with torch.no_grad():
            for tensor, old in zip(live, before, strict=True):
                tensor.copy_(old)

    return put_back
