"""The FP8 state of layers as it was before a step, to go back to when the step is not taken or is run again."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from megafp8.fp8.linear import LinearState


class Before:
    """Holds a copy of all state tensors of `states` as they are now: one concatenation, whatever their number.

    Recipes without memory have none, and it costs nothing.
    """

    def __init__(self, states: Iterable[LinearState]) -> None:
        self._states = list(states)
        self._live = [tensor for state in self._states for tensor in state.tensors().values()]
        self._copy = torch.cat([tensor.view(-1) for tensor in self._live]) if self._live else None

    @torch.no_grad()
    def restore(self) -> None:
        """Put everything back, and forget weights that were quantized since."""
        if self._copy is not None:
            parts = self._copy.split([tensor.numel() for tensor in self._live])
            torch._foreach_copy_(self._live, [p.view_as(t) for p, t in zip(parts, self._live, strict=True)])
        for state in self._states:
            state.drop_weight_cache()
