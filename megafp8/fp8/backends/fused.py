"""Quantization on CUDA: the definitions of fp8/kernels and fp8/blocks, compiled into a few kernels each.

Inductor is told to compute as eager torch does: divisions rounded to nearest, no fused multiply-add, subnormals kept.
Without that a scale would be a unit off here and there, and codes with it.
"""

from __future__ import annotations

import functools
import logging
import types
from collections.abc import Callable
from typing import Any

import torch

from megafp8.core.log import event, get_logger
from megafp8.fp8.kernels import encode, scaler
from megafp8.fp8.quantized import Operand, QuantizedTensor, quantize
from megafp8.fp8.recipe import TensorSpec, amax_of, scale_inverse

_log = get_logger(__name__)
EAGER_NUMERICS: dict[str, str | int | bool | Callable[..., Any]] = {
    "eager_numerics.division_rounding": True,
    "eager_numerics.disable_ftz": True,
    "emulate_precision_casts": True,
}
_Function = Callable[..., tuple[torch.Tensor, ...]]


def fused_quantize(
    x: torch.Tensor,
    spec: TensorSpec,
    scale: torch.Tensor | None,
    *,
    columnwise: bool,
    tensor_amax: torch.Tensor | None,
    seed: torch.Tensor | None,
) -> tuple[QuantizedTensor, torch.Tensor | None]:
    """As the backends' `quantize`, for `x` [M, K]; one scale: with the transposed codes too, if `columnwise`."""
    if x.numel() == 0:
        made = quantize(x, spec, scale, columnwise=columnwise, tensor_amax=tensor_amax, seed=seed)
        return made, amax_of(x) if spec.block is None else None
    call = _fused().of(spec, columnwise)
    with torch.no_grad():
        if spec.block is not None:
            return _tensor(call(_baseless(x), tensor_amax, seed), spec), None
        codes, transposed, scale_inv, amax = call(_baseless(x), scale)
    columns = Operand(transposed, scale_inv, spec) if columnwise else None
    return QuantizedTensor(Operand(codes, scale_inv, spec), columns), amax


def one_scale(spec: TensorSpec, *, columnwise: bool) -> _Function:
    """(x [M, K], scale [1] or None) -> codes, their transpose (empty if not asked for), scale_inv [1], amax [1]."""
    scale_of, fmt = scaler(spec), spec.format

    def quantize_one(x: torch.Tensor, scale: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        amax = amax_of(x)
        scale = scale_of(amax) if scale is None else scale
        codes = encode(x, scale, fmt)
        transposed = codes.t().contiguous() if columnwise else codes.new_empty(0)
        return codes, transposed, scale_inverse(scale), amax

    return quantize_one


def in_blocks(spec: TensorSpec, *, columnwise: bool) -> _Function:
    """(x, tensor_amax, seed) -> codes, scales and tensor's amax of each operand, scales of one byte as uint8."""

    def quantize_both(
        x: torch.Tensor, tensor_amax: torch.Tensor | None, seed: torch.Tensor | None
    ) -> tuple[torch.Tensor, ...]:
        made = quantize(x, spec, columnwise=columnwise, tensor_amax=tensor_amax, seed=seed)
        operands = [made.rows] if made.blockwise_columns is None else [made.rows, made.blockwise_columns]
        return tuple(t for operand in operands for t in _parts(operand))

    return quantize_both


def _parts(operand: Operand) -> tuple[torch.Tensor, ...]:
    # Triton has no E8M0, and a graph's outputs need a type it has
    scales = operand.scale_inv if operand.scale_inv.dtype == torch.float32 else operand.scale_inv.view(torch.uint8)
    amax = operand.tensor_amax if operand.tensor_amax is not None else scales.new_empty(0, dtype=torch.float32)
    return operand.data, scales, amax


def _tensor(parts: tuple[torch.Tensor, ...], spec: TensorSpec) -> QuantizedTensor:
    scale_dtype = torch.float32 if spec.scale_format is None else spec.scale_format.dtype
    assert scale_dtype is not None
    operands = [
        Operand(data, scales.view(scale_dtype), spec, amax if amax.numel() else None)
        for data, scales, amax in zip(parts[::3], parts[1::3], parts[2::3])
    ]
    return QuantizedTensor(operands[0], operands[1] if len(operands) > 1 else None)


class Fused:
    """The compiled functions, one for each spec; as written from the first failure of the compiler on."""

    def __init__(self) -> None:
        self._made: dict[tuple[TensorSpec, bool], Callable[..., Any]] = {}
        self._why_not = _missing_numerics()
        if self._why_not:
            self._warn()

    def of(self, spec: TensorSpec, columnwise: bool) -> Callable[..., Any]:
        """The function for this spec, compiled at its first call."""
        key = (spec, columnwise)
        if key not in self._made:
            plain = (one_scale if spec.block is None else in_blocks)(spec, columnwise=columnwise)
            self._made[key] = plain if self._why_not else self._guarded(plain, key)
        return self._made[key]

    def _guarded(self, plain: _Function, key: tuple[TensorSpec, bool]) -> Callable[..., Any]:
        compiled = torch.compile(_own_code(plain), fullgraph=True, options=EAGER_NUMERICS)

        def call(*args: Any) -> tuple[torch.Tensor, ...]:
            try:
                return compiled(*args)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # whatever the compiler meets, the plain function is right
                self._why_not = self._why_not or (str(error).strip() or type(error).__name__).splitlines()[0]
                self._made[key] = plain
                self._warn()
                return plain(*args)

        return call

    def _warn(self) -> None:
        event(_log, "native quantizes uncompiled, slower", level=logging.WARNING, reason=self._why_not)


def _missing_numerics() -> str:
    """Which of the options this torch does not know, as a reason; empty if none."""
    known = torch._inductor.list_options()
    missing = [name for name in EAGER_NUMERICS if name not in known]
    return f"torch {torch.__version__} has no {', '.join(missing)}" if missing else ""


def _own_code(function: _Function) -> _Function:
    """The same closure with a code object of its own: torch.compile counts recompilations by code object."""
    assert isinstance(function, types.FunctionType)
    code = function.__code__.replace()
    return types.FunctionType(code, function.__globals__, function.__name__, None, function.__closure__)


def _baseless(x: torch.Tensor) -> torch.Tensor:
    """`x` over the same memory, no view in autograd's books: torch.compile guards on the shape of a view's base.

    Its dims are marked as varying, so that one compilation serves all sizes; `dynamic=True` would make variables of the
    block's sides and the formats' limits too.
    """
    dense = x.detach().contiguous()
    plain = dense.new_empty(0).set_(dense.untyped_storage(), dense.storage_offset(), dense.shape, dense.stride())
    for dim in range(plain.dim()):
        torch._dynamo.maybe_mark_dynamic(plain, dim)
    return plain


@functools.cache
def _fused() -> Fused:
    return Fused()
