"""Current scaling: each tensor's scale comes from its own amax. Costs a second read of the tensor, keeps no state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

import torch
from pydantic import Field

from megafp8.core.config import config_dataclass
from megafp8.fp8.recipe import TensorSpec, format_of


@config_dataclass
class Current:
    """Per-tensor current scaling, Transformer Engine's `Float8CurrentScaling`."""

    fp8_format: Annotated[
        Literal["HYBRID", "E4M3"], Field(description="HYBRID: E4M3 forward, E5M2 backward; E4M3: everywhere")
    ] = "HYBRID"
    use_power_2_scales: Annotated[bool, Field(description="round scales down to powers of two")] = False
    amax_epsilon: Annotated[float, Field(ge=0, description="smallest amax a scale is computed from")] = 0.0

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
