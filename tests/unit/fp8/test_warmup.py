"""Delayed scaling that begins with each tensor's own scale: no gradient is lost, and the switch finds a history."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from megafp8.fp8 import LinearState, backend, quantized_linear, recipe, update_states
from megafp8.fp8.linear import begin_step

TINY = 2.0**-20  # below half of E5M2's smallest value, 2^-16, which is 0 at scale 1
FACTORS = (1.0, 3.0)  # no power of two, by which a scale would change no code
ROLES = ("input", "weight", "grad_output")


def make(name: str = "delayed", until: int = 2, **options) -> LinearState:
    chosen = backend("emulated", "fast", compiled=False)
    return LinearState("layer", recipe(name, **options), chosen, warmup_until=until)


def operands(seed: int = 0) -> tuple[torch.Tensor, torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(32, 48, generator=generator).bfloat16().requires_grad_()
    return x, torch.nn.Parameter((torch.randn(64, 48, generator=generator) * 0.02).bfloat16())


def take(state: LinearState, x: torch.Tensor, weight: torch.nn.Parameter, step: int, recompute: bool = False):
    """One step of two micro-batches, the second three times as large; its outputs and gradients."""
    begin_step([state], step, 0)
    found = []
    for factor in FACTORS:
        x.grad = weight.grad = None
        layer = lambda t: quantized_linear(t, weight, None, state)  # noqa: E731
        y = checkpoint(layer, x * factor, use_reentrant=False) if recompute else layer(x * factor)
        y.backward(torch.full_like(y, TINY * factor))
        update_states([state])
        found += [y.detach(), x.grad, weight.grad]
    with torch.no_grad():
        weight.mul_(1.1)  # its amax, and with it its scale, is another in every step
    state.drop_weight_cache()
    return found


def same(a, b) -> bool:
    return len(a) == len(b) and all(torch.equal(p, q) for p, q in zip(a, b, strict=True))


def test_early_gradients_vanish_at_scale_1_and_not_with_a_warm_up():
    def first_gradients(until: int) -> list[torch.Tensor]:
        state, (x, weight) = make(until=until), operands()
        return take(state, x, weight, 1)[1:3]

    assert all(gradient.count_nonzero() == 0 for gradient in first_gradients(0))
    assert all(gradient.count_nonzero() == gradient.numel() for gradient in first_gradients(1))


def test_a_warm_up_is_current_scaling_bit_for_bit():
    (x, weight), (x2, weight2) = operands(), operands()
    delayed, current = make(until=2), make("current", until=0)
    for step in (1, 2):
        assert same(take(delayed, x, weight, step), take(current, x2, weight2, step)) and delayed.warming
    assert not same(take(delayed, x, weight, 3), take(current, x2, weight2, 3)) and not delayed.warming


def test_history_is_recorded_as_without_and_gives_the_scale_at_the_switch():
    x, weight = operands()
    state = make(until=2, amax_history_len=8)
    for step in (1, 2):
        take(state, x, weight, step)
    tensors, peaks = state.tensors(), [float((x.detach() * factor).abs().max()) for factor in FACTORS]
    # a scale of one's own needs no memory, but it is kept: two micro-batches a step, the weight once a step
    assert tensors["input.amax_history"].tolist() == [0.0, 0.0, 0.0, 0.0, *peaks, *peaks]
    assert tensors["weight.amax_history"].count_nonzero() == 2
    for role, limit in (("input", 448.0), ("weight", 448.0), ("grad_output", 57344.0)):
        amax = tensors[f"{role}.amax_history"].amax()
        assert tensors[f"{role}.scale"] == torch.div(torch.tensor(limit), amax)
        assert state.roles[role].scale is None
    begin_step([state], 3, 0)
    assert all(state.roles[role].scale is tensors[f"{role}.scale"] for role in ROLES)


def test_only_delayed_scaling_warms_up_and_only_to_its_step():
    assert not make("current").warming and not make("mxfp8").warming and not make(until=0).warming
    state = make(until=2)
    assert not state.warming, "who never says which step it is has delayed scaling from the start"
    for step, warming in ((1, True), (2, True), (3, False), (2, True), (700, False)):
        begin_step([state], step, 0)
        assert state.warming == warming


def test_evaluation_inside_a_warm_up_and_at_its_edge_leaves_no_trace():
    """What an evaluation after the last step of the warm-up caches has not the scale of the next step."""

    def run(evaluate: bool):
        state, (x, weight) = make(until=2, amax_history_len=4), operands()
        other, _ = operands(5)
        found = []
        for step in range(1, 5):
            found += take(state, x, weight, step)
            if evaluate:
                before = {name: tensor.clone() for name, tensor in state.tensors().items()}
                with torch.no_grad():
                    quantized_linear(other.detach() * 100, weight, None, state)
                assert all(torch.equal(before[name], tensor) for name, tensor in state.tensors().items())
        return [*found, *state.tensors().values()]

    assert same(run(True), run(False))


def test_recompute_takes_the_same_scales_inside_a_warm_up():
    def run(recompute: bool):
        state, (x, weight) = make(until=2, amax_history_len=4), operands()
        found = [take(state, x, weight, step, recompute) for step in range(1, 5)]
        return [tensor for step in found for tensor in step] + list(state.tensors().values())

    assert same(run(True), run(False))


@pytest.mark.parametrize("stop", [1, 2, 3])
def test_resume_before_at_and_after_the_edge_is_bit_equal(stop: int):
    (x, weight), whole = operands(), make(until=2, amax_history_len=3)
    want = [take(whole, x, weight, step) for step in range(1, 6)]
    (x, weight), first = operands(), make(until=2, amax_history_len=3)
    for step in range(1, stop + 1):
        take(first, x, weight, step)
    second = make(until=2, amax_history_len=3)
    for name, tensor in second.tensors().items():
        tensor.copy_(first.tensors()[name])
    for step in range(stop + 1, 6):
        assert same(take(second, x, weight, step), want[step - 1])


def test_a_weight_that_is_not_kept_has_one_scale_in_a_warm_up():
    _, weight = operands()
    states = [make(until=1), make(until=1)]
    states[1].keeps_weight = False
    begin_step(states, 1, 0)
    forward = [state.quantized_weight(weight, record=True) for state in states]
    again = states[1].quantized_weight(weight.detach().clone(), record=False)
    for other in (forward[1], again):
        assert torch.equal(forward[0].dequantize(), other.dequantize())
