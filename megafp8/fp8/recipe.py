"""A recipe says WHAT is quantized and how: role (input, weight, grad_output) -> TensorSpec, and the life of scales.

It does not quantize and knows no backend. The folder `recipes/` is the registry: a file there with a class `RECIPE`
is a recipe of the file's name.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from megafp8.core.config import build, nearest
from megafp8.core.errors import ConfigError
from megafp8.fp8.formats import E4M3, E5M2, UE4M3, Format

ROLES = ("input", "weight", "grad_output")
DIM_MULTIPLE = 16  # cuBLAS's FP8 GEMM: both dims of a weight; a config that runs here must run there
FLOAT32_MAX = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class TensorSpec:
    """How one tensor is quantized: with one scale, or with one for each block of it.

    Attributes:
        format: of the codes.
        block: (rows, columns) that share a scale; columns run along the dim that the GEMM sums over. None: one scale
            for the tensor.
        scale_format: of the block scales: None is fp32, E8M0 powers of two (MXFP8), UE4M3 under one fp32 factor of
            the whole tensor (NVFP4).
        power_2_scale: round an fp32 scale down to a power of two.
        amax_epsilon: smallest amax that an fp32 scale is computed from.
        delayed: the scale comes from earlier tensors (`amax_history`), not from this one.
        hadamard: the copy whose blocks run along the rows (for wgrad) is put through `blocks.hadamard` first.
        stochastic: round up or down by chance, in proportion to the distances; needs a seed.
        four_over_six: NVFP4 only: a block's largest value becomes 4 instead of 6 where that errs less, by mean
            absolute ("MAE") or squared ("MSE") error.
        block_scale_max: NVFP4 only: what the largest block scale of the tensor becomes.
    """

    format: Format
    block: tuple[int, int] | None = None
    scale_format: Format | None = None
    power_2_scale: bool = False
    amax_epsilon: float = 0.0
    delayed: bool = False
    hadamard: bool = False
    stochastic: bool = False
    four_over_six: str | None = None
    block_scale_max: float = 448.0

    @property
    def two_level(self) -> bool:
        """Whether the blocks' scales count in units of one fp32 scale of the tensor."""
        return self.scale_format == UE4M3

    @property
    def same_both_ways(self) -> bool:
        """Whether the transpose's codes are the transposed codes."""
        return not self.hadamard and (self.block is None or self.block[0] == self.block[1])

    @property
    def exact_in_bf16(self) -> bool:
        """Whether bf16 holds every code times its block's scale: 8 bits for at most 4 + 0 or 2 + 4 of them."""
        return self.scale_format is not None or self.power_2_scale


class Recipe(Protocol):
    """What every recipe offers. Implementations are frozen configuration dataclasses with TE's option names."""

    @property
    def name(self) -> str: ...

    def spec(self, role: str) -> TensorSpec:
        """The spec of "input", "weight" or "grad_output"."""
        ...

    def new_state(self, device: torch.device | str) -> dict[str, torch.Tensor]:
        """Fresh state of one tensor, plain fp32 tensors by name; empty for a recipe without memory."""
        ...

    @property
    def shares_amax(self) -> bool:
        """Whether amaxes are reduced over the ranks that share the tensors before `update`."""
        ...

    def update(
        self, states: Sequence[dict[str, torch.Tensor]], specs: Sequence[TensorSpec], amax: torch.Tensor
    ) -> None:
        """End a micro-batch: `amax` fp32 [T] holds the largest magnitudes (over ranks) of these T tensors."""
        ...


def recipe(name: str, **options: Any) -> Recipe:
    """The recipe `name` ("delayed", "current") with Transformer Engine's option names.

    Raises:
        ConfigError: unknown name or option (with the nearest), or a value out of range.
    """
    if name not in recipe_names():
        raise ConfigError(f"recipe {name!r} does not exist; there are {', '.join(recipe_names())}{_near(name)}")
    made: Recipe = build(importlib.import_module(f"megafp8.fp8.recipes.{name}").RECIPE, options)
    return made


def recipe_names() -> list[str]:
    """The recipes that exist, sorted."""
    return sorted(m.name for m in pkgutil.iter_modules([str(Path(__file__).parent / "recipes")]))


def _near(name: str) -> str:
    return nearest(name, recipe_names())


def format_of(fp8_format: str, role: str) -> Format:
    """HYBRID is E4M3 forward and E5M2 backward; E4M3 is E4M3 everywhere."""
    return E5M2 if fp8_format == "HYBRID" and role == "grad_output" else E4M3


def magnitude(x: torch.Tensor) -> torch.Tensor:
    """|x| in fp32, same shape; 0 for NaN, which no amax sees, as by the device kernels' fmaxf."""
    wide = x.float().abs()
    return torch.where(wide == wide, wide, 0.0)


def amax_of(x: torch.Tensor) -> torch.Tensor:
    """Largest magnitude, fp32 [1]; 0 for an empty tensor."""
    if x.numel() == 0:
        return torch.zeros(1, dtype=torch.float32, device=x.device)
    return magnitude(x).amax().reshape(1)


def scale_from_amax(
    amax: torch.Tensor,
    fp8_max: float,
    *,
    power_2_scale: bool = False,
    amax_epsilon: float = 0.0,
    value_for_inf: float = FLOAT32_MAX,
) -> torch.Tensor:
    """The scale that maps `amax` to `fp8_max`, bit for bit as TE's kernel computes it.

    Args:
        amax: fp32, any shape.
        fp8_max: largest value of the format.
        value_for_inf: what an overflowing scale becomes; block scaling passes the input dtype's maximum.

    Returns:
        fp32, same shape; 1 where amax is 0, infinite or NaN.

    Source: Transformer Engine 2.20 common/recipe/recipe_common.cuh, compute_scale_from_amax.
    """
    a = torch.where(amax < amax_epsilon, torch.full_like(amax, amax_epsilon), amax)
    # full_like, for `448.0 / a` would be computed as a.reciprocal() * 448, which is 1 ulp off in a quarter of cases
    scale = torch.div(torch.full_like(a, fp8_max), a)
    scale = torch.where(torch.isinf(scale), torch.full_like(a, value_for_inf), scale)
    if power_2_scale:
        scale = (scale.view(torch.int32) & -(1 << 23)).view(torch.float32)
    usable = torch.isfinite(a) & (a > 0)
    return torch.where(usable, scale, torch.ones_like(scale))


def scale_inverse(scale: torch.Tensor) -> torch.Tensor:
    """1 / scale, rounded to nearest; fp32, same shape."""
    return torch.div(torch.ones_like(scale), scale)


def dim_multiple(recipe: Recipe) -> int:
    """What both dims of a weight must be multiples of: whole blocks, and cuBLAS's 16."""
    blocks = [size for role in ROLES for size in recipe.spec(role).block or ()]
    return max(DIM_MULTIPLE, *blocks) if blocks else DIM_MULTIPLE


def dims_refusal(recipe: Recipe, in_features: int, out_features: int) -> str | None:
    """Why a weight of these dims cannot be multiplied in this recipe, or None."""
    multiple = dim_multiple(recipe)
    for what, size in (("in_features", in_features), ("out_features", out_features)):
        if size % multiple:
            below = size // multiple * multiple
            near = f"{below}, {below + multiple}" if below else str(multiple)
            return f"{what} {size} is not a multiple of {multiple}, as {recipe.name} needs; nearest: {near}"
    return None
