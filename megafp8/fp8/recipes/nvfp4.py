"""NVFP4: 4-bit values (E2M1), a scale of one byte (E4M3) for every 16, under one fp32 factor of the whole tensor.

What keeps training stable: weights in square blocks, so that both GEMMs see the same weight; a random Hadamard
transform of the operands of wgrad, which spreads outliers; stochastic rounding of gradients. No state. Source:
"Pretraining Large Language Models with NVFP4", arXiv:2509.25149.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megafp8.core.config import config_dataclass
from megafp8.core.recipe_options import NVFP4Options
from megafp8.fp8.formats import E2M1, UE4M3
from megafp8.fp8.recipe import TensorSpec


@config_dataclass
class NVFP4(NVFP4Options):
    """NVFP4 with Transformer Engine's option names and defaults (`NVFP4BlockScaling`)."""

    @property
    def name(self) -> str:
        return "nvfp4"

    @property
    def shares_amax(self) -> bool:
        return False

    def spec(self, role: str) -> TensorSpec:
        square = role == "weight" and not self.disable_2d_quantization
        # gradients never have it: they keep stochastic rounding
        group = {"input": "activations", "weight": "weights"}.get(role, "gradients")
        four_over_six = self.nvfp4_4over6 in (group, "all") and role != "grad_output"
        narrow = four_over_six and self.nvfp4_4over6_e4m3_use_256 in (group, "all")
        return TensorSpec(
            E2M1,
            block=(16, 16) if square else (1, 16),
            scale_format=UE4M3,
            hadamard=role != "weight" and not self.disable_rht,
            stochastic=role == "grad_output" and not self.disable_stochastic_rounding,
            four_over_six=self.nvfp4_4over6_err_mode if four_over_six else None,
            block_scale_max=256.0 if narrow else UE4M3.max,
        )

    def new_state(self, device: torch.device | str) -> dict[str, torch.Tensor]:
        return {}

    def update(
        self, states: Sequence[dict[str, torch.Tensor]], specs: Sequence[TensorSpec], amax: torch.Tensor
    ) -> None:
        """Nothing to update."""


RECIPE = NVFP4
