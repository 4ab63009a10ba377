"""The options of each FP8 recipe under Transformer Engine's names and defaults. No torch: `megafp8 check` judges them.

They stand on the first floor because two rooms read them: nn/precision, which checks a run's section before anything
starts, and fp8/recipes, whose recipes are these options and what follows from them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from megafp8.core.config import build, config_dataclass

_AmaxEpsilon = Annotated[float, Field(ge=0, description="smallest amax a scale is computed from")]
_Dim = Annotated[Literal[1, 2], Field(description="1: blocks of 1x128, 2: of 128x128")]
_Scope = Literal["none", "weights", "activations", "all"]


@config_dataclass
class DelayedOptions:
    """Of `DelayedScaling`."""

    margin: Annotated[int, Field(ge=0, description="scale is divided by 2**margin")] = 0
    fp8_format: Annotated[
        Literal["HYBRID", "E4M3"], Field(description="HYBRID: E4M3 forward, E5M2 backward; E4M3: everywhere")
    ] = "HYBRID"
    amax_history_len: Annotated[int, Field(ge=1, description="micro-batches in the amax window")] = 1024
    amax_compute_algo: Annotated[
        Literal["max", "most_recent"], Field(description="amax of the whole window, or the newest one")
    ] = "max"
    reduce_amax: Annotated[bool, Field(description="take the largest amax over the ranks that share a tensor")] = True


@config_dataclass
class CurrentOptions:
    """Of `Float8CurrentScaling`."""

    fp8_format: Annotated[
        Literal["HYBRID", "E4M3"], Field(description="HYBRID: E4M3 forward, E5M2 backward; E4M3: everywhere")
    ] = "HYBRID"
    use_power_2_scales: Annotated[bool, Field(description="round scales down to powers of two")] = False
    amax_epsilon: _AmaxEpsilon = 0.0


@config_dataclass
class BlockwiseOptions:
    """Of `Float8BlockScaling`."""

    fp8_format: Annotated[
        Literal["E4M3", "HYBRID"], Field(description="E4M3: everywhere; HYBRID: E5M2 for gradients")
    ] = "E4M3"
    use_f32_scales: Annotated[bool, Field(description="scales of any value, not only powers of two")] = False
    amax_epsilon: _AmaxEpsilon = 0.0
    x_block_scaling_dim: _Dim = 1
    w_block_scaling_dim: _Dim = 2
    grad_block_scaling_dim: _Dim = 1

    def __post_init__(self) -> None:
        square = [name for name in ("x", "w", "grad") if getattr(self, f"{name}_block_scaling_dim") == 2]
        if len(square) > 1:
            names = " and ".join(f"{name}_block_scaling_dim" for name in square)
            raise ValueError(
                f"{names} are 2, but no GEMM multiplies 128x128 blocks by 128x128 blocks; nearest: "
                f"{square[0]}_block_scaling_dim = 1"
            )


@config_dataclass
class MXFP8Options:
    """Of `MXFP8BlockScaling`."""

    fp8_format: Annotated[
        Literal["E4M3", "HYBRID"], Field(description="E4M3: everywhere; HYBRID: E5M2 for gradients, known to diverge")
    ] = "E4M3"
    enable_2d_quantization: Annotated[bool, Field(description="weights in blocks of 32x32 instead of 1x32")] = False


@config_dataclass
class NVFP4Options:
    """Of `NVFP4BlockScaling`."""

    disable_rht: Annotated[bool, Field(description="no random Hadamard transform of wgrad's operands")] = False
    disable_stochastic_rounding: Annotated[bool, Field(description="gradients rounded to nearest")] = False
    disable_2d_quantization: Annotated[bool, Field(description="weights in blocks of 1x16 instead of 16x16")] = False
    nvfp4_4over6: Annotated[
        _Scope, Field(description="whose blocks may map their largest value to 4 instead of 6, if that errs less")
    ] = "none"
    nvfp4_4over6_e4m3_use_256: Annotated[
        _Scope, Field(description="of those, whose block scales end at 256 instead of 448, so that 4 has room")
    ] = "all"
    nvfp4_4over6_err_mode: Annotated[
        Literal["MAE", "MSE"], Field(description="which of the two is better: mean absolute or squared error")
    ] = "MAE"

    def __post_init__(self) -> None:
        if self.nvfp4_4over6 in ("activations", "all") and not self.disable_rht:
            raise ValueError(
                f"nvfp4_4over6 = {self.nvfp4_4over6!r}: inputs cannot have it together with the Hadamard transform; "
                "nearest: 'weights', or disable_rht = true"
            )


OPTIONS: dict[str, type] = {
    "delayed": DelayedOptions,
    "current": CurrentOptions,
    "blockwise": BlockwiseOptions,
    "mxfp8": MXFP8Options,
    "nvfp4": NVFP4Options,
}

# What both dims of a weight, and the tokens that its gradient sums over, must be multiples of: Transformer Engine's
# block, where blocks have scales, else what cuBLAS's FP8 GEMM takes (TE 2.20: is_quantizable, assert_dim_for_fp8_exec).
DIM_MULTIPLES = {"delayed": 16, "current": 16, "blockwise": 128, "mxfp8": 32, "nvfp4": 16}


def check_options(recipe: str, options: dict[str, Any]) -> None:
    """Build a recipe's options and throw them away.

    Raises:
        ConfigError: unknown option (with the nearest), or a value out of range; a line each.
    """
    build(OPTIONS[recipe], options)
