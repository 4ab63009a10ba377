"""The quantized linear with scales of blocks: results are those of the operands' values, dense and for experts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megafp8.fp8 import LinearState, QuantizedTensor, backend, quantize, quantized_linear, recipe
from megafp8.fp8.quantized import Operand
from megafp8.nn.grouped import grouped_linear

TOKENS, INPUTS, OUTPUTS = 160, 256, 384  # 160 = 128 + 32: the last block of a column-wise copy is ragged
FP32_UNIT, BF16_UNIT = 2.0**-24, 2.0**-8  # half a step, relative to the value
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "blockwise": ("blockwise", {}),
    "blockwise-fp32": ("blockwise", {"use_f32_scales": True}),
    "blockwise-hybrid": ("blockwise", {"fp8_format": "HYBRID"}),
    "mxfp8": ("mxfp8", {}),
    "mxfp8-2d": ("mxfp8", {"enable_2d_quantization": True}),
    "nvfp4": ("nvfp4", {}),
    "nvfp4-plain": ("nvfp4", {"disable_rht": True, "disable_stochastic_rounding": True}),
    "nvfp4-1d": ("nvfp4", {"disable_2d_quantization": True}),
}
ALL = pytest.mark.parametrize("case", CASES)


def operands(dtype: torch.dtype, rows: int = TOKENS) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(rows, INPUTS, generator=generator) * torch.logspace(-2, 2, INPUTS)
    weight = torch.randn(OUTPUTS, INPUTS, generator=generator) * 0.05
    bias = torch.randn(OUTPUTS, generator=generator)
    grad = torch.randn(rows, OUTPUTS, generator=generator) * torch.logspace(-5, -2, rows)[:, None]
    return tuple(t.to(dtype) for t in (x, weight, bias, grad))


def state_of(case: str, mode: str) -> tuple[LinearState, dict[str, QuantizedTensor]]:
    """A state, and where it puts what it quantizes."""
    name, options = CASES[case]
    state, seen = LinearState("layer", recipe(name, **options), backend("emulated", mode, compiled=False)), {}
    state.observer = lambda role, x, quantized, amax: seen.__setitem__(role, quantized)
    return state, seen


def wide(operand: Operand) -> torch.Tensor:
    return operand.dequantize().double()


def results(case: str, mode: str, dtype: torch.dtype) -> tuple[dict[str, torch.Tensor], dict[str, QuantizedTensor]]:
    state, seen = state_of(case, mode)
    x, weight, bias, grad = operands(dtype)
    for tensor in (x, weight, bias):
        tensor.requires_grad_()
    y = quantized_linear(x, weight, bias, state)
    y.backward(grad)
    return {"y": y.detach(), "dx": x.grad, "dw": weight.grad, "db": bias.grad}, seen  # type: ignore[dict-item]


def straight_through(seen: dict[str, QuantizedTensor], dtype: torch.dtype) -> dict[str, Any]:
    """Each result in fp64, the sum of its terms' magnitudes, their count."""
    x, w, g = seen["input"], seen["weight"], seen["grad_output"]
    bias = operands(dtype)[2].double()
    pairs = {"y": (x.rows, w.rows), "dx": (g.rows, w.columnwise), "dw": (g.columnwise, x.columnwise)}
    found: dict[str, Any] = {}
    for key, (a, b) in pairs.items():
        left, right = wide(a), wide(b)
        extra = bias if key == "y" else torch.zeros(1, dtype=torch.float64)
        found[key] = (left @ right.t() + extra, left.abs() @ right.abs().t() + extra.abs(), left.shape[1])
    return found


@ALL
def test_exact_is_the_straight_through_reference(case: str) -> None:
    made, seen = results(case, "exact", torch.float32)
    for key, (want, magnitude, terms) in straight_through(seen, torch.float32).items():
        # n fp32 terms err by at most n units of the sum of magnitudes; decoding (2 products each side), the tensors'
        # factors, their product, the product with it, the bias and the last rounding add ten
        bound = (terms + 10) * FP32_UNIT * magnitude
        assert ((made[key].double() - want).abs() <= bound).all(), key


@ALL
def test_fast_differs_by_roundings_to_bf16(case: str) -> None:
    made, seen = results(case, "fast", torch.bfloat16)
    exact, seen_exact = results(case, "exact", torch.bfloat16)
    # the operands are the same, bit for bit: code times block scale fits bf16 (or is kept in fp32)
    for role, quantized in seen.items():
        theirs = seen_exact[role]
        assert torch.equal(quantized.rows.dequantize(), theirs.rows.dequantize()), role
        assert torch.equal(quantized.columnwise.dequantize(), theirs.columnwise.dequantize()), role
    for key, (want, magnitude, terms) in straight_through(seen, torch.bfloat16).items():
        bias = operands(torch.bfloat16)[2].double().abs() if key == "y" else 0.0
        # the sum is rounded to bf16 before a tensor's factor and bias, and after; exact rounds once
        bound = 3 * BF16_UNIT * (1 + BF16_UNIT) * (want.abs() + bias) + 2 * (terms + 10) * FP32_UNIT * magnitude
        assert ((made[key].double() - exact[key].double()).abs() <= bound).all(), key


@ALL
def test_both_operands_of_a_tensor_stand_for_it(case: str) -> None:
    """The column-wise operand is that of the transpose: within half a step of the format of each block's largest."""
    name, options = CASES[case]
    for role in ("input", "weight", "grad_output"):
        spec = recipe(name, **options).spec(role)
        x = operands(torch.bfloat16)[{"input": 0, "weight": 1, "grad_output": 3}[role]]
        seed = torch.tensor([5]) if spec.stochastic else None
        made = quantize(x, spec, columnwise=True, seed=seed)
        steps = 1.0 if spec.stochastic else 0.5
        for operand, source in ((made.rows, x), (made.columnwise, x.t())):
            if spec.hadamard and operand is made.columnwise:
                continue  # of the transformed tensor
            error = (operand.dequantize() - source.float()).abs()
            # a step at the top of the range is 2**-m of at most the block's amax; scales of 3 bits add 2**-4 of it
            largest = source.float().abs().amax(1, keepdim=True)
            assert (error <= (steps * 2.0**-spec.format.mantissa_bits + 2.0**-4 * spec.two_level) * largest).all(), role


def test_wgrad_with_hadamard_is_that_without_up_to_quantization() -> None:
    """The transform is orthogonal: it cancels in the sum."""
    plain, _ = results("nvfp4-plain", "exact", torch.float32)
    turned, _ = results("nvfp4", "exact", torch.float32)
    x, _, _, grad = operands(torch.float32)
    want = grad.t() @ x
    for made in (plain["dw"], turned["dw"]):
        # E2M1 with block scales errs by about 0.1 rms on each operand, independent over 160 terms
        assert (made - want).norm() < 0.35 * want.norm()
    assert not torch.equal(plain["dw"], turned["dw"])


@pytest.mark.parametrize("name", ["blockwise", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("counts", [[37, 0, 123], [0, 0, 0]])
def test_experts_are_linears_of_their_rows(name: str, counts: list[int]) -> None:
    """Each expert's codes are those of its own rows and its own matrix, so its results are those of a linear."""
    # noise depends on an element's place
    options = {"disable_stochastic_rounding": True} if name == "nvfp4" else {}
    state = LinearState("e", recipe(name, **options), backend("emulated", "exact"))
    x, _, _, grad = (t[: sum(counts)].clone() for t in operands(torch.bfloat16))
    if name == "nvfp4":  # one amax for all experts, as ranks share it: let every expert's rows have it
        for tensor, largest in ((x, 400.0), (grad, 0.5)):
            begin = 0
            for count in counts:
                tensor[begin : begin + 16 * bool(count)] = largest
                begin += count
    weights = torch.stack([operands(torch.bfloat16)[1]] * 3)
    x.requires_grad_()
    weights.requires_grad_()
    y = grouped_linear(x, weights, torch.tensor(counts), state=state)
    y.backward(grad)
    begin = 0
    for expert, count in enumerate(counts):
        rows = slice(begin, begin + count)
        begin += count
        if not count:
            assert not weights.grad[expert].any()  # type: ignore[index]
            continue
        alone = LinearState("a", state.recipe, state.backend)
        pad = -count % 128 if name == "blockwise" else -count % 32 if name == "mxfp8" else -count % 16
        zeros = torch.zeros(pad, INPUTS, dtype=torch.bfloat16)
        own_x = torch.cat([x.detach()[rows], zeros]).requires_grad_()
        own_w = weights.detach()[expert].clone().requires_grad_()
        own_y = quantized_linear(own_x, own_w, None, alone)
        own_y.backward(torch.cat([grad[rows], torch.zeros(pad, OUTPUTS, dtype=torch.bfloat16)]))
        # the same operands and GEMMs; a library may sum in another order for another number of rows
        pairs = ((y[rows], own_y[:count]), (x.grad[rows], own_x.grad[:count]), (weights.grad[expert], own_w.grad))
        for mine, own in pairs:  # type: ignore[assignment]
            largest = float(own.detach().abs().max())
            torch.testing.assert_close(mine, own, rtol=2 * BF16_UNIT, atol=2 * BF16_UNIT * largest)


@pytest.mark.parametrize("mode", ["fast", "exact"])
@pytest.mark.parametrize("case", ["blockwise", "mxfp8", "nvfp4"])
def test_an_evaluation_before_training_leaves_no_trace(case: str, mode: str) -> None:
    """Without gradients only the row-wise copy of a weight is made; the next pass completes it, with the same bits."""
    results_of = []
    for evaluate_first in (False, True):
        state, _ = state_of(case, mode)
        x, weight, _, grad = operands(torch.bfloat16)
        x.requires_grad_()
        weight.requires_grad_()
        if evaluate_first:
            with torch.no_grad():
                quantized_linear(x, weight, None, state)
        y = quantized_linear(x, weight, None, state)
        y.backward(grad)
        results_of.append((y.detach(), x.grad, weight.grad))
    assert all(torch.equal(a, b) for a, b in zip(*results_of, strict=True))


def test_noise_of_a_step_is_its_own_and_can_be_repeated() -> None:
    def gradient(step: int, seed: int) -> torch.Tensor:
        state, _ = state_of("nvfp4", "exact")
        state.begin_step(step, seed)
        x, weight, _, grad = operands(torch.bfloat16)
        weight.requires_grad_()
        quantized_linear(x, weight, None, state).backward(grad)
        assert weight.grad is not None
        return weight.grad

    assert torch.equal(gradient(1, 7), gradient(1, 7))
    assert not torch.equal(gradient(1, 7), gradient(2, 8))
