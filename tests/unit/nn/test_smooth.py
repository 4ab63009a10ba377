"""Smooth-SwiGLU: the same function to the last bit, and codes that an outlier channel does not spoil."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megafp8.fp8.backend import backend
from megafp8.fp8.linear import LinearState, begin_step, update_states
from megafp8.fp8.recipe import recipe
from megafp8.models import ModelConfig, build, check_model
from megafp8.nn.context import Context
from megafp8.nn.grouped import grouped_linear
from megafp8.nn.kernels import Kernels
from megafp8.nn.layers import OwnLayers
from megafp8.nn.mlp import SwiGLU
from megafp8.nn.parameter import materialize
from megafp8.nn.precision import PrecisionConfig
from megafp8.nn.smooth import channel_scales, smooth
from megafp8.parallel.mesh import Mesh

TINY = ModelConfig(preset="tiny_llama", init_std=0.1)
CONTEXT = Context(None, None, None, None, 0, None)


def made(dtype: torch.dtype, *, smoothed: bool, recompute: bool = False, state: LinearState | None = None) -> SwiGLU:
    """A dense MLP of 64, 96 and 64 features."""
    shape: Any = ModelConfig(hidden_size=64, ffn_hidden_size=96, num_attention_heads=4)
    states = {} if state is None else {"m.down": state}
    layers = OwnLayers(shape, mesh=Mesh.single(), dtype=dtype, states=states, compiled=False)
    module = layers.mlp("m")
    assert isinstance(module, SwiGLU)
    materialize(module, mesh=Mesh.single(), seed=1, device="cpu")
    module.smooth = smoothed
    module.recompute = frozenset({"activation"} if recompute else ())
    return module


def passed(module: SwiGLU, x: torch.Tensor, grad: torch.Tensor) -> list[torch.Tensor]:
    """Output and all gradients."""
    x = x.clone().requires_grad_()
    y = module(x, CONTEXT)
    y.backward(grad)
    return [y.detach(), x.grad, module.gate_up.weight.grad, module.down.weight.grad]  # type: ignore[list-item]


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_function_and_its_gradients_are_unchanged_bit_for_bit(dtype: torch.dtype, recompute: bool) -> None:
    """Powers of two change no mantissa, so every product and every sum rounds as before, in any dtype."""
    x, grad = (torch.randn(16, 2, 64, generator=torch.Generator().manual_seed(i)).to(dtype) for i in (0, 1))
    x[:, :, 0] *= 50
    with_it = passed(made(dtype, smoothed=True, recompute=recompute), x, grad)
    without = passed(made(dtype, smoothed=False, recompute=recompute), x, grad)
    assert all(torch.equal(a, b) for a, b in zip(with_it, without, strict=True))


def test_scales_are_powers_of_two_by_channel_and_expert() -> None:
    hidden = torch.tensor([[3.0, -0.26, 0.0, 1e-45], [1.0, 0.1, 0.0, float("inf")], [8.0, 0.75, float("nan"), 7.9]])
    assert channel_scales(hidden, [2, 0, 1]).tolist() == [[2.0, 0.25, 1.0, 1.0], [1.0] * 4, [8.0, 0.5, 1.0, 4.0]]
    scales = channel_scales(hidden[:2, :2].bfloat16(), [2])
    assert scales.dtype == torch.bfloat16 and scales.tolist() == [[2.0, 0.25]]
    whole = smooth(hidden, channel_scales(hidden, [2, 0, 1]), [2, 0, 1])
    assert whole[:, 0].tolist() == [1.5, 0.5, 1.0] and whole[2, 1] == 1.5


@pytest.mark.parametrize("counts", [[5, 0, 11], [0, 0, 16]])
def test_experts_are_unchanged_each_by_its_own_channels(counts: list[int]) -> None:
    x = torch.randn(16, 32, dtype=torch.float64)
    x[:5, 3] *= 1000  # an outlier of the first expert alone
    weight = torch.randn(3, 48, 32, dtype=torch.float64)
    results = []
    for smoothed in (False, True):
        a, w = x.clone().requires_grad_(), weight.clone().requires_grad_()
        scales = channel_scales(x, counts) if smoothed else None
        hidden = smooth(a, scales, counts) if scales is not None else a
        y = grouped_linear(hidden, w, torch.tensor(counts), columns=scales)
        y.square().sum().backward()
        results.append([y.detach(), a.grad, w.grad])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def error_beside_an_outlier(name: str, *, smoothed: bool, sudden: bool, growth: float = 2.0**10) -> float:
    """Relative error of the down linear's output where one channel is `growth` times the others, suddenly or not."""
    state = LinearState("m.down", recipe(name), backend("emulated", "exact"))
    module = made(torch.bfloat16, smoothed=smoothed, state=state)
    x = torch.randn(64, 1, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    grad = torch.ones(64, 1, 64).bfloat16()
    for step in (1, 2, 3):
        begin_step([state], step, 0)
        if not sudden or step == 3:  # the up row of channel 7 aligns with what comes in
            with torch.no_grad():
                module.gate_up.weight[1, 7].mul_(growth if sudden or step == 1 else 1)
        y = module(x, CONTEXT)
        if step < 3:
            y.backward(grad)
            update_states([state])
            state.drop_weight_cache()
    gate_up, down = module.gate_up.weight.detach().double(), module.down.weight.detach().double()
    gates = (x.double() @ gate_up.flatten(0, 1).T).bfloat16().view(64, 1, 2, 96)  # what reaches the activation
    exact = Kernels().swiglu(gates).double() @ down.T
    return float((y.detach().double() - exact).norm() / exact.norm())


def test_a_sudden_outlier_channel_is_clipped_without_it_and_not_with_it() -> None:
    """Delayed scaling knows the last steps: 2^10 times as much is cut to 2^-10 of itself, and all of it is lost.

    Smoothed, each operand is rounded to 3 mantissa bits: 2^-4 / sqrt(3) at most and 0.026 on average, both together
    0.037, and 0.002 of bf16.
    """
    assert error_beside_an_outlier("delayed", smoothed=False, sudden=True) > 0.9
    assert error_beside_an_outlier("delayed", smoothed=True, sudden=True) < 0.05


@pytest.mark.parametrize("name", ["delayed", "current", "mxfp8"])
def test_where_nothing_is_clipped_it_costs_no_accuracy(name: str) -> None:
    plain = error_beside_an_outlier(name, smoothed=False, sudden=False)
    assert error_beside_an_outlier(name, smoothed=True, sudden=False) < min(0.05, 1.25 * plain)


def test_an_outlier_no_longer_pushes_the_other_channels_to_zero() -> None:
    """A channel 2^14 times the others under one scale: E4M3 ends 2^-17.8 below its largest value, and half of a
    normal tensor lies below 2^-3 of its peak. Smoothed, every channel has the whole format."""
    hidden = torch.randn(256, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    hidden[:, 5] *= 2.0**14
    exact, spec = backend("emulated", "exact"), recipe("current").spec("input")
    zeros = [
        int((exact.quantize(h, spec, None)[0].dequantize() == 0).sum())
        for h in (hidden, smooth(hidden, channel_scales(hidden, [256]), [256]))
    ]
    assert zeros[0] > 0.01 * hidden.numel() and zeros[1] < zeros[0] / 10


@pytest.mark.parametrize("name", ["delayed", "current", "nvfp4"])
@pytest.mark.parametrize("experts", [False, True])
def test_recompute_makes_the_same_bits(name: str, experts: bool) -> None:
    moe = {"moe": {"num_experts": 4, "ffn_hidden_size": 64, "num_shared_experts": 1}} if experts else {}
    config = ModelConfig(num_layers=1, hidden_size=64, ffn_hidden_size=64, num_attention_heads=4, vocab_size=64, **moe)
    tokens = torch.randint(0, 64, (2, 32), generator=torch.Generator().manual_seed(0))
    found = []
    for recompute in ("none", "selective", "full"):
        model = build(config, precision=PrecisionConfig(recipe=name, smooth_swiglu=True), recompute=recompute)
        begin_step(model.fp8_states.values(), 1, 7)
        loss, _ = model(tokens, tokens.roll(-1, 1))
        loss.backward()
        update_states(model.fp8_states.values())
        state = [t for s in model.fp8_states.values() for t in s.tensors().values()]
        found.append([loss.detach(), *(p.grad for p in model.parameters()), *state])
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_it_is_on_only_where_the_linear_behind_it_is_in_fp8() -> None:
    precision = PrecisionConfig(recipe="current", smooth_swiglu=True, first_layers_bf16=1)
    model = build(TINY, precision=precision)
    assert [layer.mlp.smooth for layer in model.layers] == [False, True]


def test_what_has_nothing_to_smooth_is_refused() -> None:
    gelu = ModelConfig(preset="tiny_llama", activation="gelu")
    (line,) = check_model(gelu, precision=PrecisionConfig(recipe="current", smooth_swiglu=True))
    assert line.startswith("precision.smooth_swiglu = true: model.activation is 'gelu'") and "nearest: false" in line
    for values in ({}, {"recipe": "current", "patterns": {"down": "none"}}):
        (line,) = check_model(TINY, precision=PrecisionConfig(smooth_swiglu=True, **values))
        assert "no down linear is in FP8" in line
    lines = check_model(TINY, precision=PrecisionConfig(recipe="current", smooth_swiglu=True, backend="te"))
    assert any("multiply the weight as it is" in line for line in lines)
