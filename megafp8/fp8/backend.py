"""The Backend protocol and the one place that turns a name into a backend."""

from __future__ import annotations

from typing import Protocol

import torch

from megafp8.core.config import nearest
from megafp8.core.errors import ConfigError
from megafp8.fp8.backends.emulated import Emulated
from megafp8.fp8.backends.hardware import Hardware, hardware_of, refusal
from megafp8.fp8.backends.native import Native
from megafp8.fp8.quantized import Operand, QuantizedTensor
from megafp8.fp8.recipe import Recipe, TensorSpec, recipe_names
from megafp8.fp8.recipe import recipe as make_recipe

NAMES = ("auto", "emulated", "native")
MODES = ("fast", "exact")


class Backend(Protocol):
    """Quantization, and the GEMM of two operands; shapes as in backends/emulated."""

    @property
    def name(self) -> str: ...

    @property
    def reason(self) -> str: ...

    def supports(self, recipe: Recipe, in_features: int, out_features: int) -> str | None: ...

    def quantize(
        self,
        x: torch.Tensor,
        spec: TensorSpec,
        scale: torch.Tensor | None,
        *,
        columnwise: bool = True,
        tensor_amax: torch.Tensor | None = None,
        seed: torch.Tensor | None = None,
    ) -> tuple[QuantizedTensor, torch.Tensor | None]: ...

    def amaxes(self, x: torch.Tensor, spec: TensorSpec) -> torch.Tensor: ...

    def gemm(
        self, a: Operand, b: Operand, bias: torch.Tensor | None, dtype: torch.dtype, *, precise: bool
    ) -> torch.Tensor: ...


def backend(
    name: str = "auto",
    mode: str = "fast",
    *,
    device: torch.device | str | None = None,
    compiled: bool = True,
    recipe: Recipe | None = None,
) -> Backend:
    """The backend `name`; "auto" takes native where the hardware multiplies in the recipe, else emulated, and says why.

    Args:
        mode: "fast" or "exact", of the emulated backend; native has one way.
        device: where the run's tensors live; None means CUDA if there is one.
        compiled: compile the elementwise kernels: emulated's on a CPU, native's on CUDA.
        recipe: what will be multiplied; None: one scale a tensor.

    Raises:
        ConfigError: unknown name or mode, or native asked for where the device does not multiply in the recipe; the
            message names the pairs of recipe and backend that this device has.
    """
    if name not in NAMES:
        raise ConfigError(f"backend {name!r} does not exist; there are {', '.join(NAMES)}{nearest(name, NAMES)}")
    if mode not in MODES:
        raise ConfigError(f"emulation {mode!r} does not exist; there are {', '.join(MODES)}{nearest(mode, MODES)}")
    if name == "emulated":
        return Emulated(mode == "fast", compiled)
    hardware = hardware_of(device)
    missing = refusal(recipe or make_recipe("current"), hardware)
    if name == "native":
        if missing:
            what = f"recipe {recipe.name}: " if recipe else ""
            raise ConfigError(f"backend native: {what}{missing}; what runs on this machine: {served(hardware)}")
        return Native(hardware=hardware, compiled=compiled)
    if hardware.is_cpu:
        missing = "no CUDA device" if device is None else "the run is on CPU"
    if missing:
        return Emulated(mode == "fast", compiled, reason=f"auto: {missing}")
    return Native(f"auto: {hardware.name} multiplies {recipe.name if recipe else 'FP8'} itself", hardware, compiled)


def served(hardware: Hardware) -> str:
    """The pairs of backend and recipe that a device has, as a phrase: "native with current, delayed; emulated ..."."""
    own = [name for name in recipe_names() if refusal(make_recipe(name), hardware) is None]
    return f"native with {', '.join(own) or 'no recipe'}; emulated with every recipe"
