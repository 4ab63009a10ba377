"""Block scaling: an fp32 scale, a power of two by default, for 1x128 of activations and gradients, 128x128 of weights.

The copies for the two GEMMs of a tensor are quantized each from the high-precision tensor, because their blocks lie
across one another; those of a weight's square blocks are the same bytes. No state.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

import torch
from pydantic import Field

from megafp8.core.config import config_dataclass
from megafp8.fp8.recipe import TensorSpec, format_of

_DIM = Field(description="1: blocks of 1x128, 2: of 128x128")


@config_dataclass
class Blockwise:
    """Block scaling with Transformer Engine's option names and defaults (`Float8BlockScaling`)."""

    fp8_format: Annotated[
        Literal["E4M3", "HYBRID"], Field(description="E4M3: everywhere; HYBRID: E5M2 for gradients")
    ] = "E4M3"
    use_f32_scales: Annotated[bool, Field(description="scales of any value, not only powers of two")] = False
    amax_epsilon: Annotated[float, Field(ge=0, description="smallest amax a scale is computed from")] = 0.0
    x_block_scaling_dim: Annotated[Literal[1, 2], _DIM] = 1
    w_block_scaling_dim: Annotated[Literal[1, 2], _DIM] = 2
    grad_block_scaling_dim: Annotated[Literal[1, 2], _DIM] = 1

    def __post_init__(self) -> None:
        square = [name for name in ("x", "w", "grad") if getattr(self, f"{name}_block_scaling_dim") == 2]
        if len(square) > 1:
            names = ", ".join(f"{name}_block_scaling_dim" for name in square)
            raise ValueError(
                f"{names} are 2, but no GEMM multiplies 128x128 blocks by 128x128 blocks; let at most one of them be 2"
            )

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
