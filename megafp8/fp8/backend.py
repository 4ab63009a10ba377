"""The Backend protocol and the one place that turns a name into a backend."""

from __future__ import annotations

from typing import Protocol

import torch

from megafp8.core.config import nearest
from megafp8.core.errors import ConfigError
from megafp8.fp8.backends.emulated import Emulated
from megafp8.fp8.backends.native import Native, missing_hardware
from megafp8.fp8.quantized import Operand, QuantizedTensor
from megafp8.fp8.recipe import Recipe, TensorSpec

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
    name: str = "auto", mode: str = "fast", *, device: torch.device | str | None = None, compiled: bool = True
) -> Backend:
    """The backend `name`; "auto" takes native where the hardware multiplies FP8, else emulated, and says why.

    Args:
        mode: "fast" or "exact", of the emulated backend; native has one way.
        device: where the run's tensors live; None means CUDA if there is one.
        compiled: compile the emulated backend's kernels on CPU.

    Raises:
        ConfigError: unknown name or mode, or native asked for on a CUDA device without FP8.
    """
    if name not in NAMES:
        raise ConfigError(f"backend {name!r} does not exist; there are {', '.join(NAMES)}{nearest(name, NAMES)}")
    if mode not in MODES:
        raise ConfigError(f"emulation {mode!r} does not exist; there are {', '.join(MODES)}{nearest(mode, MODES)}")
    on_cpu = device is not None and torch.device(device).type == "cpu"
    missing = "the run is on CPU" if on_cpu else missing_hardware()
    if name == "native":
        if missing and not on_cpu and torch.cuda.is_available():
            raise ConfigError(f"backend native: {missing}; choose emulated or auto")
        return Native()
    if name == "emulated":
        return Emulated(mode == "fast", compiled)
    if missing:
        return Emulated(mode == "fast", compiled, reason=f"auto: {missing}")
    return Native(reason=f"auto: {torch.cuda.get_device_name()} multiplies FP8")
