"""QuantizedTensor: what GEMMs read in place of a tensor. A cache of it, never part of a state dict.

A GEMM sums along the last dim of both its operands, and blocks that share a scale lie along the summed dim. So a
tensor x [M, K] has up to two operands: row-wise (blocks along K), and column-wise, which is that of its transpose
[K, M] (blocks along M). With one scale for the tensor, or square blocks, both hold the same codes.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from megafp8.fp8.blocks import BlockCodes, decode_blocks, hadamard, quantize_blocks, tensor_factor
from megafp8.fp8.formats import E2M1, Format, pack_e2m1, table, unpack_e2m1
from megafp8.fp8.kernels import encode, scaler
from megafp8.fp8.recipe import TensorSpec, amax_of, scale_inverse


@dataclass(frozen=True, eq=False)
class Operand:
    """One side of a GEMM, [R, C], summed along C.

    Attributes:
        data: the codes in the format's dtype (E2M1: uint8 [R, C / 2], the even column in the low nibble); or their
            values: bf16 that hold code times block scale, which is what the emulated backend's fast mode multiplies
            (fp32 where a block's scale is no power of two and bf16 would round).
        scale_inv: fp32 [1], the operand is `data * scale_inv`; or, beside codes in blocks, one for each block, fp32,
            E8M0 or (NVFP4) E4M3.
        spec: how it was quantized.
        tensor_amax: fp32 [1] beside NVFP4's codes, whose block scales count in units of it.
    """

    data: torch.Tensor
    scale_inv: torch.Tensor
    spec: TensorSpec
    tensor_amax: torch.Tensor | None = None

    @property
    def format(self) -> Format:
        return self.spec.format

    @property
    def holds_codes(self) -> bool:
        return self.data.dtype.itemsize == 1

    @property
    def in_blocks(self) -> bool:
        """Whether `scale_inv` has a scale for each block."""
        return self.spec.block is not None and self.holds_codes

    @property
    def shape(self) -> torch.Size:
        """[R, C] in elements, or any shape where one scale serves the tensor."""
        packed = 2 if self.holds_codes and self.format == E2M1 else 1
        return torch.Size((*self.data.shape[:-1], self.data.shape[-1] * packed))

    @property
    def has_factor(self) -> bool:
        """Whether `unscaled`'s factor can be other than 1."""
        return self.spec.block is None or self.spec.two_level

    @property
    def turns(self) -> bool:
        """Whether `transposed` is the operand of the transpose: the same codes, and not two to a byte."""
        return self.spec.same_both_ways and not (self.holds_codes and self.format == E2M1)

    @functools.cached_property
    def contiguous(self) -> torch.Tensor:
        """`data` with the summed dim contiguous, as GPUs' FP8 GEMMs want it; a copy is made once."""
        return self.data.contiguous()

    def unscaled(self) -> tuple[torch.Tensor, torch.Tensor]:
        """A matrix of the shape, exact in its dtype, and the fp32 [1] factor that makes it the operand."""
        if not self.in_blocks:
            return self.data, self.scale_inv
        values = decode_blocks(self.data, self.scale_inv, None, self.spec)
        return values, tensor_factor(self.tensor_amax, self.spec, values.device)

    def as_values(self) -> Operand:
        """The same operand with values in the place of codes."""
        values, factor = self.unscaled()
        wide = self.in_blocks and not self.spec.exact_in_bf16
        return Operand(values.float() if wide else values.to(torch.bfloat16), factor, self.spec)

    def dequantize(self) -> torch.Tensor:
        """What the codes stand for, fp32 of the same shape."""
        values, factor = self.unscaled()
        return values.float() * factor

    def transposed(self) -> Operand:
        """The operand of the transpose; for one scale or square blocks, not for packed codes."""
        scale_inv = self.scale_inv.t() if self.in_blocks else self.scale_inv
        return replace(self, data=self.data.t(), scale_inv=scale_inv)

    def part(self, rows: slice | None = None, columns: slice | None = None) -> Operand:
        """These rows or columns, which must begin and end where blocks do."""
        data, scale_inv = self.data, self.scale_inv
        block = (1, 1) if self.spec.block is None else self.spec.block
        packed = data.shape[-1] != self.shape[-1]
        if rows is not None:
            data = data[rows]
            scale_inv = scale_inv[_blocks(rows, block[0])] if self.in_blocks else scale_inv
        if columns is not None:
            data = data[:, _blocks(columns, 2) if packed else columns]
            scale_inv = scale_inv[:, _blocks(columns, block[1])] if self.in_blocks else scale_inv
        return replace(self, data=data, scale_inv=scale_inv)

    def wire(self) -> tuple[torch.Tensor, ...]:
        """What goes over the wire where ranks hold pieces of one tensor: codes as uint8, and the blocks' scales."""
        if self.spec.block is None:
            return (self.to_bytes(),)
        if not self.in_blocks:
            return (self.data,)
        scales = self.scale_inv if self.scale_inv.dtype == torch.float32 else self.scale_inv.view(torch.uint8)
        return self.data.view(torch.uint8), scales

    def from_wire(self, received: Sequence[torch.Tensor]) -> Operand:
        """The operand that `wire`'s tensors make, joined from pieces, in the form of this one."""
        if self.spec.block is None:
            return self.with_bytes(received[0])
        if not self.in_blocks:
            return replace(self, data=received[0])
        return replace(self, data=received[0].view(self.data.dtype), scale_inv=received[1].view(self.scale_inv.dtype))

    def to_bytes(self) -> torch.Tensor:
        """The codes of an operand with one scale, uint8 of the same shape."""
        assert self.format.dtype is not None and self.spec.block is None
        data = self.data if self.data.dtype == self.format.dtype else self.data.to(self.format.dtype)  # values: exact
        return data.view(torch.uint8)

    def with_bytes(self, codes: torch.Tensor) -> Operand:
        """The operand of these codes (uint8, any shape), with this one's scale, in the form of this one's data."""
        assert self.format.dtype is not None and self.spec.block is None
        if self.data.dtype == self.format.dtype:
            return replace(self, data=codes.view(self.format.dtype))
        # looked up: 0.5 ns a value where torch's cast of E4M3 takes 3.4 (one thread, Zen 5)
        values = table(self.format).to(codes.device, self.data.dtype)
        data = values.index_select(0, codes.flatten().to(torch.int32)).view(codes.shape)
        return replace(self, data=data)


def _blocks(span: slice, size: int) -> slice:
    assert span.start % size == 0 and span.stop % size == 0, f"{span} does not lie on blocks of {size}"
    return slice(span.start // size, span.stop // size)


@dataclass(frozen=True, eq=False)
class QuantizedTensor:
    """A tensor [M, K] as GEMMs read it; `quantize` makes it.

    Attributes:
        rowwise: of the tensor, where it was asked for.
        blockwise_columns: of the transpose, where its codes are not simply those of `rowwise`.
    """

    rowwise: Operand | None
    blockwise_columns: Operand | None = None

    @functools.cached_property
    def columnwise(self) -> Operand:
        """Of the transpose [K, M]."""
        if self.blockwise_columns is not None:
            return self.blockwise_columns
        assert self.rowwise is not None and self.rowwise.turns, "was quantized row-wise only"
        return self.rowwise.transposed()

    @property
    def rows(self) -> Operand:
        """`rowwise`, which must be there."""
        assert self.rowwise is not None, "was quantized column-wise only"
        return self.rowwise

    @property
    def has_columns(self) -> bool:
        return self.blockwise_columns is not None or (self.rowwise is not None and self.rowwise.turns)

    @property
    def data(self) -> torch.Tensor:
        return self.rows.data

    @property
    def scale_inv(self) -> torch.Tensor:
        return self.rows.scale_inv

    @property
    def format(self) -> Format:
        return self.rows.format

    @property
    def shape(self) -> torch.Size:
        return self.rows.shape

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The tensor that the row-wise codes stand for, computed in fp32, same shape."""
        return self.rows.dequantize().to(dtype)

    def for_wgrad(self) -> QuantizedTensor:
        """Only what a weight gradient reads."""
        return self if self.blockwise_columns is None else QuantizedTensor(None, self.blockwise_columns)

    def for_rows(self) -> QuantizedTensor:
        """Only what the forward GEMM reads."""
        return self if self.blockwise_columns is None else QuantizedTensor(self.rowwise)


def quantize(
    x: torch.Tensor,
    spec: TensorSpec,
    scale: torch.Tensor | None = None,
    *,
    columnwise: bool = False,
    tensor_amax: torch.Tensor | None = None,
    seed: torch.Tensor | None = None,
) -> QuantizedTensor:
    """Quantize to real codes.

    Args:
        x: any floating dtype; any shape with one scale, else [..., K], taken as [M, K].
        scale: fp32 [1], of a spec with one scale; None: that of `x`'s own amax.
        columnwise: make the transpose's operand too.
        tensor_amax: fp32 [2], of NVFP4: the amaxes of the two operands (over ranks); None: `x`'s own.
        seed: int64 [1], the noise of stochastic rounding.
    """
    if spec.block is None:
        if scale is None:
            scale = scaler(spec)(amax_of(x))
        return QuantizedTensor(Operand(encode(x, scale, spec.format), scale_inverse(scale), spec))
    flat = x.detach().reshape(-1, x.shape[-1])
    of_rows, of_columns = (None, None) if tensor_amax is None else tensor_amax.split(1)
    rowwise = _operand(quantize_blocks(flat, spec, tensor_amax=of_rows, seed=seed), spec)
    if not columnwise or (spec.same_both_ways and spec.format.bits == 8):  # not so where two codes share a byte
        return QuantizedTensor(rowwise)
    codes = quantize_blocks(column_source(flat, spec), spec, tensor_amax=of_columns, seed=columns_seed(seed))
    return QuantizedTensor(rowwise, _operand(codes, spec))


def columns_seed(seed: torch.Tensor | None) -> torch.Tensor | None:
    """The seed of the column-wise copy, which is rounded with other noise than the row-wise one."""
    return None if seed is None else seed ^ 0x5851F42D4C957F2D


def transposed_codes(operand: Operand) -> Operand:
    """`Operand.transposed` for packed codes in square blocks."""
    assert operand.spec.same_both_ways and operand.in_blocks, "the transpose has other codes"
    data = pack_e2m1(unpack_e2m1(operand.data).t().contiguous())
    return replace(operand, data=data, scale_inv=operand.scale_inv.t().contiguous())


def column_source(x: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """What the column-wise operand of x [M, K] is quantized from: its transpose [K, M], transformed if `spec` asks."""
    transposed = x.t().contiguous()
    return hadamard(transposed) if spec.hadamard else transposed


def tensor_amaxes(x: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """NVFP4: the amaxes fp32 [2] of what the two operands of x [M, K] are quantized from."""
    return torch.cat([amax_of(x), amax_of(column_source(x, spec)) if spec.hadamard else amax_of(x)])


def _operand(made: BlockCodes, spec: TensorSpec) -> Operand:
    return Operand(made.codes, made.scale_inv, spec, made.tensor_amax)
