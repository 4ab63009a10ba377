"""The elementwise work around an FP8 GEMM: amax, scale, round, decode, rescale, each in one pass over a tensor.

Every kernel is a plain torch function, which is its definition; on a CPU with a C++ compiler it is compiled by
torch.compile, with the rounding done by arithmetic that vectorises (about 10 times faster, bit-equal: a test compares
them), else it runs as written and says so once. No GEMM and no state lives here.
"""

from __future__ import annotations

import functools
import logging
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from megafp8.core.errors import one_line
from megafp8.core.log import event, get_logger
from megafp8.fp8 import block_kernels
from megafp8.fp8.blocks import HADAMARD_DIM, hadamard, tensor_factor
from megafp8.fp8.formats import Format, cast, rounder
from megafp8.fp8.recipe import TensorSpec, amax_of, magnitude, scale_from_amax, scale_inverse

_log = get_logger(__name__)
Round = Callable[[torch.Tensor], torch.Tensor]


def _amax(x: torch.Tensor) -> torch.Tensor:
    return magnitude(x).amax().reshape(1)


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
        self._made_blocks: dict[tuple[TensorSpec, torch.dtype, bool], Callable[..., Any]] = {}
        self._extremes: dict[tuple[int, int], Callable[[torch.Tensor], torch.Tensor]] = {}
        self._amax = _compile(_amax) if compiled else _amax
        self._rescale = _compile(_rescale_) if compiled else _rescale_
        self._rescale_bias = _compile(_rescale_bias_) if compiled else _rescale_bias_
        self._hadamard = _compile_alone(block_kernels.hadamard_kernel, "hadamard") if compiled else None

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

    def amaxes(self, x: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
        """NVFP4: the amaxes fp32 [2] of what the two orientations of `x` [R, C] are quantized from."""
        return torch.cat([self.amax(x), self._columns(x)[1] if spec.hadamard else self.amax(x)])

    def block_extremes(self, x: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
        """Smallest and largest amax of the blocks of `x` [R, C] (not empty): see `block_kernels.extremes_kernel`."""
        padded = _matrix(x, block)
        if block not in self._extremes:
            kernel = block_kernels.extremes_kernel(block)
            name = f"extremes_{block[0]}_{block[1]}"
            self._extremes[block] = _compile_alone(kernel, name) if self._compiled else kernel
        return self._extremes[block](_vector(padded, marked=True) if block[0] == 1 else padded)

    def quantize_blocks(
        self,
        x: torch.Tensor,
        spec: TensorSpec,
        *,
        columnwise: bool = False,
        tensor_amax: torch.Tensor | None = None,
        seed: torch.Tensor | None = None,
    ) -> block_kernels.BlockValues:
        """One orientation of `x` [R, C] quantized by blocks, as values: see `block_kernels.block_values`.

        4over6 runs as written: it is for fine-tuning, and both of its candidates' errors take an order of additions
        that does not vectorise.
        """
        block = spec.block
        assert block is not None
        if self._as_written(x, spec, columnwise):
            return block_kernels.block_values(x, spec, columnwise=columnwise, tensor_amax=tensor_amax, seed=seed)
        if columnwise and block[0] > 1:  # square blocks: the transpose's row-wise copy
            x, columnwise = x.t(), False
        own_amax = None
        if columnwise and spec.hadamard:
            x, own_amax = self._columns(x)
        extra = []
        if not spec.two_level:
            tensor_amax = None
        else:
            if tensor_amax is None:
                tensor_amax = self.amax(x) if own_amax is None else own_amax
            extra.append(tensor_amax)
        if spec.stochastic:
            assert seed is not None, "stochastic rounding needs a seed"
            extra += [seed, torch.tensor([x.shape[0 if columnwise else 1]], dtype=torch.int32)]
        padded = _matrix(x, block[::-1] if columnwise else block)
        kernel = self._block_kernel(spec, x.dtype, columnwise)
        if columnwise or block[0] > 1:
            values, *_ = kernel(padded, *extra)
        else:
            values, *_ = kernel(_vector(padded, marked=True), *extra)
        values = values.view(padded.shape)[: x.shape[0], : x.shape[1]]
        factor = tensor_factor(tensor_amax, spec, x.device)
        return block_kernels.BlockValues(values.t() if columnwise else values, factor)

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
            name = f"{make.__name__}_{spec.format.name.lower()}"
            self._made[spec, make] = _compile(_own_code(kernel, name)) if self._compiled else kernel
        return self._made[spec, make]

    def _columns(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The Hadamard transform along the rows of `x` [R, C], as [R, C], and its amax [1]."""
        if self._hadamard is None or x.shape[0] % HADAMARD_DIM or x.numel() == 0:
            transformed = hadamard(x.t().contiguous()).t()
            return transformed, amax_of(transformed)
        padded = _matrix(x, (HADAMARD_DIM, 1))
        transformed, amax = self._hadamard(padded)
        return transformed.view(padded.shape)[: x.shape[0], : x.shape[1]], amax

    def _as_written(self, x: torch.Tensor, spec: TensorSpec, columnwise: bool) -> bool:
        """Whether no kernel fits: no compiler, nothing to do, what the definition refuses, and what is rare."""
        assert spec.block is not None
        refused = columnwise and spec.hadamard and x.shape[0] % HADAMARD_DIM
        ragged = spec.stochastic and not columnwise and x.shape[1] % spec.block[1]  # no recipe takes such a weight
        return self._hadamard is None or not x.numel() or bool(refused or ragged or spec.four_over_six)

    def _block_kernel(self, spec: TensorSpec, dtype: torch.dtype, columnwise: bool) -> Callable[..., Any]:
        assert spec.block is not None
        made = self._made_blocks
        if (spec, dtype, columnwise) not in made:
            way = "square" if spec.block[0] > 1 else "columnwise" if columnwise else "rowwise"
            make = getattr(block_kernels, f"{way}_kernel")
            name = f"{way}_{spec.block[1]}_{spec.format.name.lower()}"
            made[spec, dtype, columnwise] = _compile_alone(make(spec, dtype), name)
        return made[spec, dtype, columnwise]


def _vector(x: torch.Tensor, *, marked: bool = False) -> torch.Tensor:
    """The elements as a vector over the same memory (a copy if they are not contiguous), its size variable if `marked`.

    Not a view in autograd's books: torch.compile guards on the shape of a view's base and would compile anew for
    every shape, and would do so again for tensors that require a gradient.
    """
    dense = x.detach().contiguous()
    made = dense.new_empty(0).set_(dense.untyped_storage(), dense.storage_offset(), (dense.numel(),), (1,))
    if marked:
        torch._dynamo.mark_dynamic(made, 0)
    return made


def _matrix(x: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """`x` [R, C] as `_vector` takes it, padded by zeros to whole blocks, its sizes variable.

    To two of them at least: torch.compile takes a size of 1 for a constant, also where it is a number of blocks.
    """
    rows, columns = (max(-(-size // of), 2) * of for size, of in zip(x.shape, block, strict=True))
    if block[0] == 1:
        columns = -(-x.shape[1] // block[1]) * block[1]  # rows are taken one after another: there are two at least
    dense = x.detach()
    if x.shape != (rows, columns):
        dense = F.pad(dense, (0, columns - x.shape[1], 0, rows - x.shape[0]))
    dense = dense.contiguous()
    made = dense.new_empty(0).set_(dense.untyped_storage(), dense.storage_offset(), (rows, columns), (columns, 1))
    torch._dynamo.mark_dynamic(made, [0, 1])
    return made


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
        event(_log, "fp8 kernels run uncompiled, slower", level=logging.WARNING, reason=one_line(error))
        return eager_kernels()
    return kernels


def _compile(kernel: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(kernel, dynamic=True, fullgraph=True)


def _compile_alone(kernel: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Compile a function that a factory made; its dims are those that are marked, its numbers are constants."""
    return torch.compile(_own_code(kernel, name), fullgraph=True)


def _own_code(kernel: Callable[..., Any], name: str) -> Callable[..., Any]:
    """The function with a code object of its own, under this name.

    torch.compile counts variants by code object, of which it allows eight, and takes numbers that differ between them
    for variables.
    """
    code = kernel.__code__.replace(co_name=name)
    return types.FunctionType(code, kernel.__globals__, name, kernel.__defaults__, kernel.__closure__)
