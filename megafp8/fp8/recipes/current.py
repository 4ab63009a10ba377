"""Current scaling: each tensor's scale comes from its own amax. Costs a second read of the tensor, keeps no state."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megafp8.core.config import config_dataclass
from megafp8.core.recipe_options import CurrentOptions
from megafp8.fp8.recipe import TensorSpec, format_of


@config_dataclass
class Current(CurrentOptions):
    """Per-tensor current scaling, Transformer Engine's `Float8CurrentScaling`."""

    @property
    def name(self) -> str:
        return "current"

    @property
    def shares_amax(self) -> bool:
        return False

    def spec(self, role: str) -> TensorSpec:
        fmt = format_of(self.fp8_format, role)
        return TensorSpec(fmt, power_2_scale=self.use_power_2_scales, amax_epsilon=self.amax_epsilon)

    def new_state(self, device: torch.device | str) -> dict[str, torch.Tensor]:
        return {}

    def update(
        self, states: Sequence[dict[str, torch.Tensor]], specs: Sequence[TensorSpec], amax: torch.Tensor
    ) -> None:
        """Nothing to update."""


RECIPE = Current
