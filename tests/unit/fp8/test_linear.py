"""The FP8 linear layer: values and gradients against an analytic straight-through reference, backends compared."""

import numpy as np
import pytest
import torch

from megafp8.fp8 import LinearState, backend, quantized_linear, recipe
from megafp8.fp8.formats import E4M3, E5M2
from tests.unit.fp8.reference import fake_quantize, scale_for

TOKENS, INPUTS, OUTPUTS = 48, 96, 64
DELAYED_SCALES = (231.7, 911.3, 5.3e6)  # as earlier tensors gave them; the input's clips its largest values
FP32_UNIT, BF16_UNIT = 2.0**-24, 2.0**-8  # half a step, relative to the value


def operands(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(3, TOKENS // 3, INPUTS, generator=generator)
    weight = torch.randn(OUTPUTS, INPUTS, generator=generator) * 0.05
    bias = torch.randn(OUTPUTS, generator=generator)
    grad = torch.randn(3, TOKENS // 3, OUTPUTS, generator=generator) * 1e-3
    return tuple(t.to(dtype) for t in (x, weight, bias, grad))


def run(dtype, made, chosen):
    """-> y, dx, dw, db of one layer, 2-dim where they are activations, with the operands they came from."""
    x, weight, bias, grad = operands(dtype)
    for tensor in (x, weight, bias):
        tensor.requires_grad_()
    state = LinearState("layer", made, chosen)
    for role, scale in zip(("input", "weight", "grad_output"), DELAYED_SCALES, strict=True):
        if "scale" in state.roles[role].tensors:
            state.roles[role].tensors["scale"].fill_(scale)
    y = quantized_linear(x, weight, bias, state)
    assert y.shape == (3, TOKENS // 3, OUTPUTS) and y.dtype == dtype
    y.backward(grad)
    assert [t.grad.dtype for t in (x, weight, bias)] == [dtype] * 3
    flat = lambda t: t.detach().flatten(0, -2) if t.dim() > 1 else t.detach()  # noqa: E731
    results = {"y": y, "dx": x.grad, "dw": weight.grad, "db": bias.grad}
    return {k: flat(v).double().numpy() for k, v in results.items()}, [flat(t) for t in (x, weight, bias, grad)]


def straight_through(x, weight, bias, grad, scales):
    """Each result, its terms in magnitude, their count: y = Q(x) Q(w)' + b, dx = Q(g) Q(w), dw = Q(g)' Q(x)."""
    wide = [t.float().numpy() for t in (x, weight, grad)]
    formats = (E4M3, E4M3, E5M2)
    qx, qw, qg = (fake_quantize(t, s, f) for t, s, f in zip(wide, scales(wide, formats), formats, strict=True))
    b, g = bias.double().numpy(), grad.double().numpy()
    ax, aw, ag = np.abs(qx), np.abs(qw), np.abs(qg)
    return {
        "y": (qx @ qw.T + b, ax @ aw.T + np.abs(b), INPUTS),
        "dx": (qg @ qw, ag @ aw, OUTPUTS),
        "dw": (qg.T @ qx, ag.T @ ax, TOKENS),
        "db": (g.sum(0), np.abs(g).sum(0), TOKENS),
    }


def current_scales(tensors, formats):
    return [scale_for(t, f) for t, f in zip(tensors, formats, strict=True)]


def delayed_scales(tensors, formats):
    return [np.float32(scale) for scale in DELAYED_SCALES]


@pytest.mark.parametrize(("name", "scales"), [("current", current_scales), ("delayed", delayed_scales)])
@pytest.mark.parametrize("kind", ["emulated", "native"])
def test_values_and_gradients_in_fp32(name, scales, kind):
    got, inputs = run(torch.float32, recipe(name), backend(kind, "exact", device="cpu"))
    for key, (want, magnitude, terms) in straight_through(*inputs, scales).items():
        # a sum of n fp32 terms errs by at most n units of the sum of magnitudes; scale_inv twice, their product, the
        # product with it (or both operands' products), the bias and the last rounding add six
        bound = (terms + 6) * FP32_UNIT * magnitude
        assert (np.abs(got[key] - want) <= bound).all(), key


@pytest.mark.parametrize("name", ["current", "delayed"])
@pytest.mark.parametrize("kind", ["emulated", "native"])
def test_bf16_exact_rounds_once(name, kind):
    scales = current_scales if name == "current" else delayed_scales
    got, inputs = run(torch.bfloat16, recipe(name), backend(kind, "exact", device="cpu"))
    for key, (want, magnitude, terms) in straight_through(*inputs, scales).items():
        # one bf16 rounding of the result, the bias in it
        bound = BF16_UNIT * np.abs(want) * (1 + BF16_UNIT) + (terms + 6) * FP32_UNIT * magnitude
        assert (np.abs(got[key] - want) <= bound).all(), key


@pytest.mark.parametrize("name", ["current", "delayed"])
def test_fast_mode_rounds_twice(name):
    fast, inputs = run(torch.bfloat16, recipe(name), backend("emulated", "fast", compiled=False))
    exact, _ = run(torch.bfloat16, recipe(name), backend("emulated", "exact"))
    scales = current_scales if name == "current" else delayed_scales
    for key, (want, magnitude, terms) in straight_through(*inputs, scales).items():
        bias = np.abs(inputs[2].double().numpy()) if key == "y" else 0.0
        # the sum is rounded to bf16 before the scale and (with the bias added) after it, exact mode once
        bound = 3 * BF16_UNIT * (1 + BF16_UNIT) * (np.abs(want) + bias) + 2 * (terms + 6) * FP32_UNIT * magnitude
        assert (np.abs(fast[key] - exact[key]) <= bound).all(), key
        assert (fast[key] == exact[key]).mean() > 0.5, key  # and most values are the very same


@pytest.mark.parametrize("name", ["current", "delayed"])
def test_native_differs_from_emulated_only_by_summation(name):
    native, inputs = run(torch.float32, recipe(name), backend("native", device="cpu"))
    emulated, _ = run(torch.float32, recipe(name), backend("emulated", "exact"))
    scales = current_scales if name == "current" else delayed_scales
    for key, (_, magnitude, terms) in straight_through(*inputs, scales).items():
        # both sum n terms in fp32 in their own order; native scales the operands (2 roundings a term), emulated the sum
        bound = 2 * (terms + 4) * FP32_UNIT * magnitude
        assert (np.abs(native[key] - emulated[key]) <= bound).all(), key


def test_wide_tensors_are_exact_in_fast_mode_too():
    fast, _ = run(torch.float32, recipe("current"), backend("emulated", "fast"))
    exact, _ = run(torch.float32, recipe("current"), backend("emulated", "exact"))
    assert all(np.array_equal(fast[key], exact[key]) for key in fast)


def test_frozen_parts_get_no_gradient():
    x, weight, bias, grad = operands(torch.bfloat16)
    state = LinearState("layer", recipe("current"), backend("emulated", "fast", compiled=False))
    x.requires_grad_()
    quantized_linear(x, weight, bias, state).backward(grad)
    assert x.grad is not None and weight.grad is None and bias.grad is None
    x.requires_grad_(False)
    weight.requires_grad_()
    quantized_linear(x, weight, None, state).backward(grad)
    assert weight.grad is not None


def test_expanded_gradients_and_sliced_inputs():
    """Not contiguous: a gradient out of `.sum()`, an input cut out of a larger tensor."""
    x, weight, _, _ = operands(torch.bfloat16)
    state = LinearState("layer", recipe("current"), backend("emulated", "fast", compiled=False))
    wide = torch.cat([x, x], dim=-1)
    cut = wide[..., :INPUTS].requires_grad_()
    y = quantized_linear(cut, weight, None, state)
    assert torch.equal(y, quantized_linear(x, weight, None, state))
    y.sum().backward()
    assert cut.grad is not None


def test_all_zero_tensors():
    for name in ("current", "delayed"):
        state = LinearState("layer", recipe(name), backend("emulated", "fast", compiled=False))
        x = torch.zeros(32, INPUTS, dtype=torch.bfloat16, requires_grad=True)
        weight = torch.zeros(OUTPUTS, INPUTS, dtype=torch.bfloat16, requires_grad=True)
        y = quantized_linear(x, weight, None, state)
        y.backward(torch.zeros_like(y))
        assert all(t.count_nonzero() == 0 for t in (y, x.grad, weight.grad))


def test_no_tokens():
    """An expert that was sent nothing."""
    for name in ("current", "delayed"):
        for compiled in (False, True):
            state = LinearState("layer", recipe(name), backend("emulated", "fast", compiled=compiled))
            x = torch.zeros(0, INPUTS, dtype=torch.bfloat16, requires_grad=True)
            weight = torch.ones(OUTPUTS, INPUTS, dtype=torch.bfloat16, requires_grad=True)
            y = quantized_linear(x, weight, None, state)
            y.backward(torch.zeros_like(y))
            assert y.shape == (0, OUTPUTS) and weight.grad.count_nonzero() == 0


def test_garbage_in_one_tensor_stays_visible():
    """NaN is not hidden by the quantizer: the loss must show it."""
    x, weight, _, _ = operands(torch.bfloat16)
    x[0, 0, 0] = float("nan")
    state = LinearState("layer", recipe("current"), backend("emulated", "fast", compiled=False))
    y = quantized_linear(x, weight, None, state)
    assert y[0, 0].isnan().all() and y[0, 1:].isfinite().all() and y[1:].isfinite().all()
