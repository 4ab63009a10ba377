"""The elementwise work around an FP8 GEMM: amax, scale, round, decode, rescale, each in one pass over a tensor.

Every kernel is a plain torch function, which is its definition; on a CPU with a C++ compiler it is compiled by
torch.compile (3 to 10 times faster, bit-equal: a test compares them), else it runs as written and says so once. No
GEMM and no state lives here.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch

from megafp8.core.log import event, get_logger
from megafp8.fp8.formats import Format, cast, round_to
from megafp8.fp8.recipe import TensorSpec, scale_from_amax, scale_inverse

_log = get_logger(__name__)


def amax_of(x: torch.Tensor) -> torch.Tensor:
    """Largest magnitude, fp32 [1]; NaN is ignored, as by the device kernels' fmaxf; 0 for an empty tensor."""
    if x.numel() == 0:
        return torch.zeros(1, dtype=torch.float32, device=x.device)
    return _amax(x)


def _amax(x: torch.Tensor) -> torch.Tensor:
    magnitude = x.float().abs()
    return torch.where(magnitude == magnitude, magnitude, 0.0).amax().reshape(1)


def encode(x: torch.Tensor, scale: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Codes of `x * scale` in `fmt.dtype`; the product is fp32 (bf16 times a scalar would stay bf16)."""
    return cast(x.float() * scale, fmt)


def round_codes(x: torch.Tensor, scale: torch.Tensor, fmt: Format) -> torch.Tensor:
    """The values of `encode(x, scale, fmt)`, in `x`'s dtype: exact, for bf16 holds every E4M3 and E5M2 value."""
    return round_to(x.float() * scale, fmt).to(x.dtype)


def _delayed(x: torch.Tensor, scale: torch.Tensor, *, spec: TensorSpec) -> tuple[torch.Tensor, ...]:
    """Round with a given scale; amax in the same read. -> values, scale_inv [1], amax [1]"""
    return round_codes(x, scale, spec.format), scale_inverse(scale), _amax(x)


def _current(x: torch.Tensor, *, spec: TensorSpec) -> tuple[torch.Tensor, ...]:
    """Round with the scale of the tensor's own amax. -> values, scale_inv [1], amax [1]"""
    amax = _amax(x)
    scale = spec_scale(amax, spec)
    return round_codes(x, scale, spec.format), scale_inverse(scale), amax


def spec_scale(amax: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """The scale of current scaling; fp32 like `amax`."""
    return scale_from_amax(
        amax, spec.format, power_2_scale=spec.power_2_scale, amax_epsilon=spec.amax_epsilon
    )


def rescale_(acc: torch.Tensor, scale_inv_a: torch.Tensor, scale_inv_b: torch.Tensor) -> torch.Tensor:
    """`acc` times both inverse scales, multiplied in fp32, rounded to its own dtype, in place."""
    return acc.copy_(acc.float() * (scale_inv_a * scale_inv_b))


def rescale_bias_(
    acc: torch.Tensor, scale_inv_a: torch.Tensor, scale_inv_b: torch.Tensor, bias: torch.Tensor
) -> torch.Tensor:
    """`acc` [M, N] times both inverse scales plus `bias` [N], computed in fp32, rounded once, in place."""
    return acc.copy_(acc.float() * (scale_inv_a * scale_inv_b) + bias.float())


class Kernels:
    """The kernels as written: `delayed`, `current`, `rescale_`, `rescale_bias_`."""

    def __init__(self, wrap: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda kernel: kernel) -> None:
        self._wrap = wrap
        self._delayed: dict[TensorSpec, Callable[..., Any]] = {}
        self._current: dict[TensorSpec, Callable[..., Any]] = {}
        self.rescale_ = wrap(rescale_)
        self.rescale_bias_ = wrap(rescale_bias_)

    def quantize(
        self, x: torch.Tensor, spec: TensorSpec, scale: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Values [same shape and dtype as `x`], inverse scale fp32 [1], amax fp32 [1]; `scale` None: from amax."""
        if x.numel() == 0:
            one = torch.ones(1, dtype=torch.float32, device=x.device)
            return torch.empty_like(x), one if scale is None else scale_inverse(scale), torch.zeros_like(one)
        kernels, kernel = (self._current, _current) if scale is None else (self._delayed, _delayed)
        if spec not in kernels:
            kernels[spec] = self._wrap(functools.partial(kernel, spec=spec))
        arguments = (x.reshape(-1),) if scale is None else (x.reshape(-1), scale)
        values, scale_inv, amax = kernels[spec](*arguments)
        return values.view(x.shape), scale_inv, amax


class _Compiled:
    """A kernel under torch.compile; where no compiler works, the kernel itself, said once."""

    def __init__(self, kernel: Callable[..., Any]) -> None:
        self._kernel = kernel
        self._run: Callable[..., Any] = torch.compile(kernel, dynamic=True)

    def __call__(self, *args: torch.Tensor) -> Any:
        try:
            return self._run(*args)
        except torch._dynamo.exc.TorchDynamoException as error:
            if self._run is self._kernel:
                raise
            event(_log, "fp8 kernels run uncompiled", level=logging.WARNING, reason=_first_line(error))
            self._run = self._kernel
            return self._kernel(*args)


def _first_line(error: Exception) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)


@functools.lru_cache(maxsize=None)
def eager_kernels() -> Kernels:
    """The kernels as written."""
    return Kernels()


@functools.lru_cache(maxsize=None)
def compiled_kernels() -> Kernels:
    """The kernels compiled, one set for the process, each compiled once for all sizes."""
    return Kernels(_Compiled)
