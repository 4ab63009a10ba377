"""Experts by Transformer Engine's GroupedLinear: the rows of each expert padded to what its FP8 GEMM takes."""

from __future__ import annotations

from typing import Any

import torch

from megafp8.fp8.quantized import QuantizedTensor
from megafp8.nn.context import Context
from megafp8.nn.mlp import activation
from megafp8.nn.moe import Experts, MoE
from megafp8.nn.recompute import Rebuild
from megafp8.nn.te_maker import Maker
from megafp8.nn.te_modules import plain

Tensor = torch.Tensor


class EngineExperts(Experts):
    """Experts with the same parameters; tokens travel in the compute dtype."""

    def use(self, maker: Maker, name: str) -> None:
        """Compute with GroupedLinear."""
        count, _, ffn, hidden = self.gate_up.shape  # those of this rank
        shapes = {"gate_up": (hidden, 2 * ffn), "down": (ffn, hidden)}
        self.parts, self.engine_states = {}, {}
        names = [f"weight{i}" for i in range(count)]
        for which, (inputs, outputs) in shapes.items():
            linear = f"{name}.{which}"
            part = self.parts[which] = maker.grouped(linear, count, inputs, outputs)
            quantized = maker.options.quantized_model_init and maker.quantizes(linear)
            part.lend(self, which, *names, stacked=True, quantized=quantized)
            self.engine_states[which] = maker.states.get(linear)
        pads = any(maker.quantizes(f"{name}.{which}") for which in shapes)
        self._pads = (maker.te.Fp8Padding(count), maker.te.Fp8Unpadding(count)) if pads else ()

    def forward(self, x: Tensor, counts: Tensor, codes: QuantizedTensor | None = None) -> Tensor:
        """x [R, H], `counts` [E / ep] rows of each expert in order -> [R, H], summed over this rank's part of F."""
        assert codes is None, "tokens travel in the compute dtype"
        sizes: list[int] = counts.tolist()
        empty = not len(x)
        if empty:  # every module runs on every rank, or ranks would join different lists of amaxes
            x, sizes = x.new_zeros((1, x.shape[1])) + x.sum(), [1, *sizes[1:]]
        rows, padded = self._pads[0](x, sizes) if self._pads else (x, sizes)
        gates = self._times("gate_up", rows, padded)
        hidden = activation(gates.unflatten(1, (2, gates.shape[1] // 2)), "swiglu", self.kernels)
        y = self._times("down", hidden, padded)
        y = self._pads[1](y, sizes) if self._pads else y
        return y[:0] if empty else y

    def _times(self, which: str, x: Tensor, sizes: list[int]) -> Tensor:
        state: Any = self.engine_states[which]
        if state is not None:
            state.start()
        return self.parts[which](x, sizes)


class EngineMoE(MoE):
    """MoE whose router and experts read the norm as a tensor."""

    def forward(self, y: Any, context: Context, rebuild: Rebuild | None = None) -> Tensor:
        """The norm of x [S or S/tp, B, H] -> the branch."""
        return super().forward(plain(y), context, rebuild)
