"""MXFP8: a power-of-two scale of one byte (E8M0) for every 32 values along the dim that the GEMM sums over.

Both copies of a tensor are quantized from the high-precision tensor. No state. Source: OCP Microscaling Formats rev.
1.0, with scales rounded up ("Recipes for Pre-training LLMs with MXFP8", arXiv:2506.08027).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megafp8.core.config import config_dataclass
from megafp8.core.recipe_options import MXFP8Options
from megafp8.fp8.formats import E8M0
from megafp8.fp8.recipe import TensorSpec, format_of


@config_dataclass
class MXFP8(MXFP8Options):
    """MXFP8 with Transformer Engine's option names and defaults (`MXFP8BlockScaling`)."""

    @property
    def name(self) -> str:
        return "mxfp8"

    @property
    def shares_amax(self) -> bool:
        return False

    def spec(self, role: str) -> TensorSpec:
        square = self.enable_2d_quantization and role == "weight"
        return TensorSpec(format_of(self.fp8_format, role), block=(32, 32) if square else (1, 32), scale_format=E8M0)

    def new_state(self, device: torch.device | str) -> dict[str, torch.Tensor]:
        return {}

    def update(
        self, states: Sequence[dict[str, torch.Tensor]], specs: Sequence[TensorSpec], amax: torch.Tensor
    ) -> None:
        """Nothing to update."""


RECIPE = MXFP8
