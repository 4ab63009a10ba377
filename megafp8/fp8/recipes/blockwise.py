"""Block scaling: an fp32 scale, a power of two by default, for 1x128 of activations and gradients, 128x128 of weights.

The copies for the two GEMMs of a tensor are quantized each from the high-precision tensor, because their blocks lie
across one another; those of a weight's square blocks are the same bytes. No state.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megafp8.core.config import config_dataclass
from megafp8.core.recipe_options import BlockwiseOptions
from megafp8.fp8.recipe import TensorSpec, format_of


@config_dataclass
class Blockwise(BlockwiseOptions):
    """Block scaling with Transformer Engine's option names and defaults (`Float8BlockScaling`)."""

    @property
    def name(self) -> str:
        return "blockwise"

    @property
    def shares_amax(self) -> bool:
        return False

    def spec(self, role: str) -> TensorSpec:
        dims = {
            "input": self.x_block_scaling_dim,
            "weight": self.w_block_scaling_dim,
            "grad_output": self.grad_block_scaling_dim,
        }
        return TensorSpec(
            format_of(self.fp8_format, role),
            block=(128, 128) if dims[role] == 2 else (1, 128),
            power_2_scale=not self.use_f32_scales,
            amax_epsilon=self.amax_epsilon,
        )

    def new_state(self, device: torch.device | str) -> dict[str, torch.Tensor]:
        return {}

    def update(
        self, states: Sequence[dict[str, torch.Tensor]], specs: Sequence[TensorSpec], amax: torch.Tensor
    ) -> None:
        """Nothing to update."""


RECIPE = Blockwise
