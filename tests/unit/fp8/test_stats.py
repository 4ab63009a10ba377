"""Statistics under Transformer Engine's names, on tensors whose answer is known."""

import pytest
import torch

from megafp8.fp8 import LinearState, backend, quantized_linear, recipe, stats, update_states
from megafp8.fp8.formats import E4M3
from megafp8.fp8.quantized import Operand, QuantizedTensor
from megafp8.fp8.recipe import TensorSpec


def layer(name: str = "delayed") -> LinearState:
    return LinearState("layers.0.mlp.down", recipe(name), backend("emulated", "fast", compiled=False))


def test_counts_on_a_known_tensor():
    x = torch.tensor([[0.0, 1.0, -(2.0**-12), 2.0**-12, 1000.0, -500.0, 448.0, 16.5]])
    data = x.clamp(-448, 448).to(torch.float8_e4m3fn)
    quantized = QuantizedTensor(Operand(data, torch.ones(1), TensorSpec(E4M3)))
    underflows, overflows, amax, scale, mse = stats.collect(x, quantized, torch.tensor([1000.0])).tolist()
    assert (underflows, overflows) == (25.0, 25.0)  # 2 of 8 each; a zero that stays zero is no underflow
    assert (amax, scale) == (1000.0, 1.0)
    errors = [0.0, 0.0, 2.0**-12, 2.0**-12, 552.0, 52.0, 0.0, 0.5]
    assert mse == pytest.approx(sum(e * e for e in errors) / 8, rel=1e-6)  # eight fp32 additions


def test_armed_for_one_step_only():
    state = layer()
    x = torch.randn(32, 48).bfloat16().requires_grad_()
    weight = torch.randn(64, 48).bfloat16().requires_grad_()
    assert state.observer is None
    stats.arm([state])
    y = quantized_linear(x, weight, None, state)
    y.backward(torch.full_like(y, 2.0**-20))
    values = stats.read([state])
    roles = ("input", "weight", "grad_output")
    assert set(values) == {f"layers.0.mlp.down.{role}.{name}" for role in roles for name in stats.NAMES}
    assert values["layers.0.mlp.down.grad_output.underflows%"] == 100.0  # scale 1: below 2**-17 all is lost
    assert values["layers.0.mlp.down.input.amax"] == x.detach().float().abs().max().item()
    assert state.observer is None and stats.read([state]) == {}


def test_a_spike_clips_once_and_then_holds_the_scale_low():
    """Delayed scaling's two sides: the spike overflows, and for L micro-batches after it small values are coarser."""
    state = LinearState("l", recipe("delayed", amax_history_len=3), backend("emulated", "fast", compiled=False))
    weight = torch.randn(16, 32).bfloat16().requires_grad_()
    seen = []
    for factor in (1.0, 1.0, 100.0, 1.0, 1.0, 1.0, 1.0):
        x = (torch.randn(64, 32, generator=torch.Generator().manual_seed(1)) * factor).bfloat16().requires_grad_()
        stats.arm([state])
        quantized_linear(x, weight, None, state).sum().backward()
        seen.append(stats.read([state]))
        update_states([state])
    overflows = [s["l.input.overflows%"] for s in seen]
    scales = [s["l.input.scale"] for s in seen]
    assert overflows[2] > 50 and overflows[:2] == [0.0, 0.0] and overflows[3:] == [0.0] * 4
    assert scales[3] == scales[4] == scales[5] == pytest.approx(scales[1] / 100, rel=2**-7)  # bf16 rounds the spike
    assert scales[6] == scales[1]


def test_current_scaling_never_overflows():
    state = layer("current")
    stats.arm([state])
    for seed in range(20):
        x = torch.randn(64, 48, generator=torch.Generator().manual_seed(seed)).bfloat16()
        with torch.no_grad():
            quantized_linear(x, torch.randn(64, 48).bfloat16(), None, state)
        assert state.observer.roles["input"][1] == 0.0
