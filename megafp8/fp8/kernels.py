"""The elementwise work around an FP8 GEMM: amax, scale, round, decode, rescale, each in one pass over a tensor.

Every kernel is a plain torch function, which is its definition; on a CPU with a C++ compiler it is compiled by
torch.compile, with the rounding done by arithmetic that vectorises (about 10 times faster, bit-equal: a test compares
them), else it runs as written and says so once. No GEMM and no state lives here.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch

from megafp8.core.log import event, get_logger
from megafp8.fp8.formats import Format, cast, rounder
from megafp8.fp8.recipe import TensorSpec, scale_from_amax, scale_inverse

_log = get_logger(__name__)
Round = Callable[[torch.Tensor], torch.Tensor]


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


def delayed_kernel(spec: TensorSpec, round_values: Round) -> Callable[..., tuple[torch.Tensor, ...]]:
    """(x, scale [1]) -> values in `x`'s dtype, scale_inv [1], amax [1], in one read of the vector `x`.

    The values are those of `encode(x, scale, spec.format)`; bf16 holds every value of E4M3 and E5M2.
    """

    def delayed(x: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return round_values(x.float() * scale).to(x.dtype), scale_inverse(scale), _amax(x)

    return delayed


def current_kernel(spec: TensorSpec, round_values: Round) -> Callable[..., tuple[torch.Tensor, ...]]:
    """(x) -> values in `x`'s dtype, scale_inv [1], amax [1], with the scale of the vector `x`'s own amax."""
    scale_of = scaler(spec)

    def current(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        amax = _amax(x)
        scale = scale_of(amax)
        return round_values(x.float() * scale).to(x.dtype), scale_inverse(scale), amax

    return current


def scaler(spec: TensorSpec) -> Callable[[torch.Tensor], torch.Tensor]:
    """Current scaling's amax -> scale, both fp32 of one shape; constants are plain values for torch.compile."""
    fp8_max, power_2_scale, amax_epsilon = spec.format.max, spec.power_2_scale, spec.amax_epsilon

    def scale_of(amax: torch.Tensor) -> torch.Tensor:
        return scale_from_amax(amax, fp8_max, power_2_scale=power_2_scale, amax_epsilon=amax_epsilon)

    return scale_of


def _rescale_(acc: torch.Tensor, scale_inv_a: torch.Tensor, scale_inv_b: torch.Tensor) -> torch.Tensor:
    return acc.copy_(acc.float() * (scale_inv_a * scale_inv_b))


def _rescale_bias_(
    acc: torch.Tensor, scale_inv_a: torch.Tensor, scale_inv_b: torch.Tensor, bias: torch.Tensor
) -> torch.Tensor:
    return acc.copy_(acc.float() * (scale_inv_a * scale_inv_b) + bias.float())


class Kernels:
    """The kernels as written, or compiled."""

    def __init__(self, *, compiled: bool) -> None:
        self._compiled = compiled
        self._made: dict[tuple[TensorSpec, Callable[..., Any]], Callable[..., Any]] = {}
        self._amax = _compile(_amax) if compiled else _amax
        self._rescale = _compile(_rescale_) if compiled else _rescale_
        self._rescale_bias = _compile(_rescale_bias_) if compiled else _rescale_bias_

    def quantize(
        self, x: torch.Tensor, spec: TensorSpec, scale: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Values [same shape and dtype as `x`], inverse scale fp32 [1], amax fp32 [1]; `scale` None: from amax."""
        if x.numel() == 0:
            one = torch.ones(1, dtype=torch.float32, device=x.device)
            return torch.empty_like(x), one if scale is None else scale_inverse(scale), torch.zeros_like(one)
        if scale is None:
            values, scale_inv, amax = self._kernel(spec, current_kernel)(_vector(x))
        else:
            values, scale_inv, amax = self._kernel(spec, delayed_kernel)(_vector(x), scale)
        return values.view(x.shape), scale_inv, amax

    def amax(self, x: torch.Tensor) -> torch.Tensor:
        """`amax_of` in one pass."""
        return self._amax(_vector(x)) if x.numel() else amax_of(x)

    def rescale_(
        self,
        acc: torch.Tensor,
        scale_inv_a: torch.Tensor,
        scale_inv_b: torch.Tensor,
        bias: torch.Tensor | None = None,
    ) -> None:
        """`acc` [M, N] times both inverse scales [1] plus `bias` [N], in fp32, rounded once to its dtype, in place."""
        if bias is None:
            self._rescale(_vector(acc), scale_inv_a, scale_inv_b)
        else:
            self._rescale_bias(acc, scale_inv_a, scale_inv_b, _vector(bias))

    def _kernel(self, spec: TensorSpec, make: Callable[..., Callable[..., Any]]) -> Callable[..., Any]:
        if (spec, make) not in self._made:
            round_values = rounder(spec.format) if self._compiled else functools.partial(cast, fmt=spec.format)
            kernel = make(spec, round_values)
            self._made[spec, make] = _compile(kernel) if self._compiled else kernel
        return self._made[spec, make]


def _vector(x: torch.Tensor) -> torch.Tensor:
    """The elements as a vector over the same memory (a copy if they are not contiguous).

    Not a view in autograd's books: torch.compile guards on the shape of a view's base and would compile anew for
    every shape, and would do so again for tensors that require a gradient.
    """
    dense = x.detach().contiguous()
    return dense.new_empty(0).set_(dense.untyped_storage(), dense.storage_offset(), (dense.numel(),), (1,))


@functools.cache
def eager_kernels() -> Kernels:
    """The kernels as written."""
    return Kernels(compiled=False)


@functools.cache
def compiled_kernels() -> Kernels:
    """The kernels compiled, one set for the process, each once for all sizes; as written where no compiler works."""
    kernels = Kernels(compiled=True)
    one = torch.ones(1)
    try:
        kernels.rescale_(torch.ones(64, dtype=torch.bfloat16), one, one)
    except torch._dynamo.exc.TorchDynamoException as error:
        event(_log, "fp8 kernels run uncompiled, slower", level=logging.WARNING, reason=_first_line(error))
        return eager_kernels()
    return kernels


def _compile(kernel: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(kernel, dynamic=True, fullgraph=True)


def _first_line(error: Exception) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
