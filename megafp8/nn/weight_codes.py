"""FP8 weights that replicas gather as codes (ZeRO-1): each quantizes its piece of the masters, all get the whole codes.

Megatron-LM's --fp8-param-gather. A master is rounded to the model's dtype before it is quantized, as Transformer Engine
does (2.20 pytorch/tensor/utils.py, quantize_master_weights), so that codes are those of a run that gathers the weights
in that dtype and quantizes them whole. What a replica cannot know of its piece alone, the tensor's amax, is agreed on
first. The parameter itself then has no values: its memory is one NaN for all elements, so that nothing can use a
weight of an earlier step unnoticed. A weight that Smooth-SwiGLU makes anew in every pass is gathered as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch
from torch import nn

from megafp8.core.errors import ConfigError
from megafp8.fp8.formats import E2M1
from megafp8.fp8.kernels import scaler
from megafp8.fp8.linear import LinearState, picked
from megafp8.fp8.quantized import Operand, QuantizedTensor, quantize, transposed_codes
from megafp8.fp8.recipe import TensorSpec
from megafp8.nn.linear import ColumnLinear, RowLinear
from megafp8.nn.mla import ReplicatedLinear
from megafp8.nn.mlp import SwiGLU
from megafp8.nn.moe import Experts
from megafp8.parallel.mesh import Mesh
from megafp8.parallel.pieces import OwnPiece, own_piece, piece_span, zero_dim

Tensor = torch.Tensor
Rows = Sequence[slice] | None


@dataclass(eq=False)
class WeightCodes:
    """One quantized weight [..., N, K], N and what stands before it being the rows that its GEMM sees.

    Attributes:
        rows: those of the flattened rows that this rank uses; None: all.
        piece: this rank's part of the parameter.
    """

    param: nn.Parameter
    state: LinearState
    rows: Rows
    piece: OwnPiece
    _like: Operand | None = field(init=False, default=None)
    _warming: bool = field(init=False, default=False)
    _amaxes: Tensor | None = field(init=False, default=None)
    _master: Tensor | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.shape, self.dtype = tuple(self.param.shape), self.param.dtype
        self.columns = self.shape[-1]

    @property
    def spec(self) -> TensorSpec:
        """How it is quantized."""
        return self.state.roles["weight"].spec

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """The codes' bytes, and for block scales theirs."""
        return byte_shapes(self.shape, self.spec)

    @property
    def outdated(self) -> bool:
        """Whether the codes were made with another kind of scale than the next step's: a warm-up has ended."""
        return self._like is not None and self._warming != self.state.roles["weight"].warming

    def free(self) -> None:
        """Give the parameter's memory away."""
        self.param.data = torch.full((), torch.nan, dtype=self.dtype, device=self.param.device).expand(self.shape)
        self.param.in_codes = True  # type: ignore[attr-defined]

    def amaxes(self, piece: Tensor) -> Tensor:
        """Of what this rank has of the rows that are used."""
        if self.spec.block is not None and not self.spec.two_level:
            return piece.new_empty(0)
        return self.state.backend.amaxes(self._used(self._narrow(piece)), self.spec).to(torch.float32)

    def encode(self, piece: Tensor, amaxes: Tensor, out: Sequence[Tensor]) -> None:
        """Quantize `piece` of the master with the scale that the whole weight has."""
        self._amaxes, self._master, self._warming = amaxes, piece, self.state.roles["weight"].warming
        operand = self._quantized(self._narrow(piece))
        data, scale_inv = operand.data, operand.scale_inv
        if self.spec.block is None:
            self._like = replace(operand, data=data.new_empty(0))
            out[0].copy_(operand.to_bytes().view(out[0].shape))
            return
        self._like = replace(operand, data=data.new_empty(0), scale_inv=scale_inv.new_empty(0))
        if not operand.holds_codes:  # the fast emulation keeps values; their codes are the definition's
            made = quantize(self._narrow(piece), self.spec, tensor_amax=self._two_level(amaxes)).rows
            data, scale_inv = made.data, made.scale_inv
            self._like = replace(self._like, scale_inv=scale_inv.new_empty(0))
        out[0].copy_(data.view(torch.uint8).view(out[0].shape))
        out[1].copy_(scale_inv.contiguous().view(torch.uint8).view(out[1].shape))

    def take(self, whole: Sequence[Tensor]) -> None:
        """Give the whole quantized weight to the layer."""
        like, spec = self._like, self.spec
        assert like is not None
        codes = whole[0].view(-1, whole[0].shape[-1])
        if spec.block is None:
            self.state.give_weight(
                QuantizedTensor(like.with_bytes(picked(codes, self.rows))), self._amaxes, observed=self._observed
            )
            return
        scale_inv = whole[1].view(-1, whole[1].shape[-1]).view(like.scale_inv.dtype)
        data = codes if spec.format.dtype is None else codes.view(spec.format.dtype)
        amax = None if self._amaxes is None or not spec.two_level else self._amaxes[:1]
        operand = Operand(data, scale_inv, spec, amax)
        if like.data.dtype.itemsize > 1:
            made = QuantizedTensor(operand.as_values())
        elif spec.format == E2M1:
            made = QuantizedTensor(operand, transposed_codes(operand))
        else:
            made = QuantizedTensor(operand)
        self.state.give_weight(made, None, observed=self._observed)

    def _quantized(self, flat: Tensor) -> Operand:
        role, amaxes = self.state.roles["weight"], self._amaxes
        assert amaxes is not None
        scale = role.scale
        if scale is None and self.spec.block is None:
            scale = scaler(self.spec)(amaxes)
        made, _ = self.state.backend.quantize(
            flat, self.spec, scale, columnwise=False, tensor_amax=self._two_level(amaxes)
        )
        return made.rows

    def _observed(self) -> tuple[Tensor, QuantizedTensor]:
        """This rank's piece and its codes, for statistics."""
        assert self._master is not None
        flat = self._narrow(self._master)
        return flat, QuantizedTensor(self._quantized(flat))

    def _two_level(self, amaxes: Tensor) -> Tensor | None:
        return amaxes if self.spec.two_level else None

    def _narrow(self, piece: Tensor) -> Tensor:
        return piece.to(self.dtype).view(-1, piece.shape[-1])

    def _used(self, flat: Tensor) -> Tensor:
        """The rows of this rank's piece [rows of the piece, K] that its GEMM reads."""
        if self.rows is None:
            return flat
        number = torch.arange(prod(self.shape[:-1])).view(self.shape[:-1])
        if self.piece.dim is not None and self.piece.dim < len(self.shape) - 1:
            number = self.piece.of(number)
        used = torch.cat([torch.arange(part.start, part.stop) for part in self.rows])
        return flat[torch.isin(number.flatten(), used).to(flat.device)]


def byte_shapes(shape: tuple[int, ...], spec: TensorSpec) -> list[tuple[int, ...]]:
    """Shapes of the byte tensors of a weight: codes, and the scales of its blocks."""
    if spec.block is None:
        return [shape]
    packed = 2 if spec.format == E2M1 else 1
    height, width = spec.block
    scale_bytes = 4 if spec.scale_format is None else 1
    scales = (*shape[:-2], -(-shape[-2] // height), -(-shape[-1] // width) * scale_bytes)
    return [(*shape[:-1], shape[-1] // packed), scales]


def gathered_as_codes(models: Sequence[nn.Module], states: Mapping[str, Any], mesh: Mesh) -> dict[str, WeightCodes]:
    """The weights of `models` that are quantized and cut over replicas, by global name; gradient buckets have cut them.

    Args:
        states: of the quantized linears of `models`, by name.

    Raises:
        ConfigError: layers that are not of this folder, or a weight whose pieces do not end where blocks do; all of
            them, a line each.
    """
    found: dict[str, WeightCodes] = {}
    problems = []
    if any(not isinstance(state, LinearState) for state in states.values()):
        problems.append(
            "precision.fp8_param_gather: the layers of this backend quantize their weights themselves; nearest: "
            'fp8_param_gather = false, or backend = "native"'
        )
    for model in models:
        names = {id(param): name for name, param in model.named_parameters()}
        for param, state, rows in _quantized_weights(model):
            piece = own_piece(param)
            if piece.dim is None:
                continue
            name = names[id(param)]
            refusal = _refusal(tuple(param.shape), piece, state.roles["weight"].spec, rows, mesh)
            if refusal:
                problems.append(
                    f"precision.fp8_param_gather: {name} {tuple(param.shape)}: {refusal}; nearest: fp8_param_gather = "
                    "false, or a dp x cp that cuts on blocks"
                )
            found[name] = WeightCodes(param, state, rows, piece)
    if problems:
        raise ConfigError("\n".join(problems))
    return found


def _quantized_weights(model: nn.Module) -> Iterator[tuple[nn.Parameter, LinearState, Rows]]:
    smoothed = {id(m.down) for m in model.modules() if isinstance(m, SwiGLU) and m.smooth}
    for module in model.modules():
        if id(module) in smoothed:
            continue
        if isinstance(module, ColumnLinear | RowLinear | ReplicatedLinear) and module.state is not None:
            yield module.weight, module.state, module.split.rows
        elif isinstance(module, Experts):
            if module.states[0] is not None:
                yield module.gate_up, module.states[0], None
            if module.states[1] is not None and not module.smooth:
                yield module.down, module.states[1], None


def _refusal(shape: tuple[int, ...], piece: OwnPiece, spec: TensorSpec, rows: Rows, mesh: Mesh) -> str:
    """Why the pieces of such a weight cannot be quantized apart, or nothing."""
    if spec.block is None:
        return ""
    height, width = spec.block
    if not spec.same_both_ways:
        return f"blocks of {height}x{width} have other codes for the transpose, two bytes an element in all"
    if rows is not None:
        return "tp ranks share its rows, and blocks are of those that a rank uses"
    _, parts = mesh.place(piece.layout.data_axes)
    dim, last = piece.dim, len(shape) - 1
    assert dim is not None
    scales = byte_shapes(shape, spec)[1]
    if dim == last or zero_dim(scales, parts) != dim or (last > 1 and shape[-2] % height):
        return f"its {parts} pieces do not end where blocks of {height}x{width} do"
    unit = height if dim == last - 1 else 1
    for rank in range(parts):
        start, stop = piece_span(shape[dim], rank, parts)
        first, end = piece_span(scales[dim], rank, parts)
        if (start, stop) != (min(first * unit, shape[dim]), min(end * unit, shape[dim])):
            return f"piece {rank} of {parts} is rows {start} to {stop}, not on blocks of {height}x{width}"
    return ""
