"""What a layer remembers: amax once a micro-batch, no trace of evaluation or recompute, weight cached and renewed."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from megafp8.fp8 import LinearState, backend, quantized_linear, recipe, update_states
from tests.distributed.ranks import run_ranks


def make(name: str = "delayed", **options) -> LinearState:
    return LinearState("layer", recipe(name, **options), backend("emulated", "fast", compiled=False))


def operands(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(32, 48, generator=generator).bfloat16().requires_grad_()
    return x, torch.nn.Parameter((torch.randn(64, 48, generator=generator) * 0.02).bfloat16())


def snapshot(state: LinearState) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in state.tensors().items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def train(state: LinearState, x: torch.Tensor, weight: torch.Tensor, factor: float = 1e-3) -> torch.Tensor:
    y = quantized_linear(x, weight, None, state)
    y.backward(torch.full_like(y, factor))
    update_states([state])
    return y.detach()


def test_one_micro_batch_records_three_amaxes_and_sets_three_scales():
    state, (x, weight) = make(amax_history_len=4), operands()
    train(state, x, weight, factor=2.0**-12)
    tensors = state.tensors()
    for role, tensor, limit in (("input", x, 448.0), ("weight", weight, 448.0)):
        amax = tensor.detach().float().abs().max()
        assert tensors[f"{role}.amax_history"].tolist() == [0.0, 0.0, 0.0, amax.item()]
        assert tensors[f"{role}.scale"].item() == torch.div(torch.tensor(limit), amax).item()
    assert tensors["grad_output.scale"].item() == 57344.0 * 2.0**12


def test_scales_are_used_one_micro_batch_later():
    """The first micro-batch runs at scale 1 (E5M2 loses what is below 2**-17), the second with the first's amax."""
    state, (x, weight) = make(), operands()
    tiny = 2.0**-20
    train(state, x, weight, factor=tiny)
    assert x.grad.count_nonzero() == 0
    train(state, x, weight, factor=tiny)
    assert x.grad.count_nonzero() > 0


def test_stateless_recipe_has_no_tensors_and_update_leaves_it_alone():
    state, (x, weight) = make("current"), operands()
    train(state, x, weight)
    assert state.tensors() == {}


def test_evaluation_leaves_no_trace():
    """Training with evaluations between must be bit-equal to training without, whoever quantizes the weight first."""

    def run(evaluate: bool):
        state, (x, weight) = make(amax_history_len=4), operands()
        other, _ = operands(5)
        outputs = []
        for _ in range(3):
            if evaluate:
                before = snapshot(state)
                with torch.no_grad():
                    quantized_linear(other.detach() * 100, weight, None, state)
                with torch.inference_mode():
                    quantized_linear(other.detach() * 100, weight, None, state)
                assert same(before, snapshot(state))
            outputs.append(train(state, x, weight))
            with torch.no_grad():
                weight.add_(0.01)
            state.drop_weight_cache()
        return outputs, snapshot(state), x.grad

    (a, state_a, grad_a), (b, state_b, grad_b) = run(True), run(False)
    assert all(torch.equal(p, q) for p, q in zip(a, b, strict=True))
    assert same(state_a, state_b) and torch.equal(grad_a, grad_b)


def test_weight_is_quantized_once_a_step_and_its_history_rolls_once():
    state, (x, weight) = make(amax_history_len=4), operands()
    train(state, x, weight)
    cached = state.quantized_weight(weight, record=True)
    history = state.tensors()["weight.amax_history"].clone()
    train(state, x, weight)
    assert state.quantized_weight(weight, record=True) is cached
    # not seen in the second micro-batch: neither rolled nor rescaled, while the input's history moved on
    assert torch.equal(state.tensors()["weight.amax_history"], history)
    assert state.tensors()["input.amax_history"].count_nonzero() == 2


def test_cached_weight_keeps_its_own_scale():
    """The scale moves under a cached weight; the cached bytes must still be read with the scale they were made with."""
    x, weight = operands()
    state = make()
    first = train(state, x, weight)  # weight at scale 1, after it the scale is 448 / amax
    assert state.tensors()["weight.scale"].item() != 1.0
    second = train(state, x, weight)
    error = (first.float() - second.float()).abs().max() / first.float().abs().max()
    assert error < 0.1  # the input's scale changed, so not equal; a wrong weight scale would be off by 5,000


def test_a_weight_that_is_not_kept_has_the_bits_and_the_history_of_one_that_is():
    """Full sharding gives the weight's memory away between passes; three micro-batches, then the optimizer's step."""
    states, (_, weight) = [make(amax_history_len=4) for _ in range(2)], operands()
    states[1].keeps_weight = False
    for factor in (1.0, 3.0):
        with torch.no_grad():
            weight.mul_(factor)
        for _ in range(3):
            copies = [weight.detach().clone() for _ in states]  # gathered anew
            kept, made = (s.quantized_weight(w, record=True) for s, w in zip(states, (weight, copies[1]), strict=True))
            again = states[1].quantized_weight(copies[0], record=False)  # in backward
            for other in (made, again):
                assert torch.equal(kept.data, other.data) and torch.equal(kept.scale_inv, other.scale_inv)
            assert states[1]._cached is not None and states[1]._cached.quantized is None
            update_states(states)
            assert same(snapshot(states[0]), snapshot(states[1]))
        for state in states:
            state.drop_weight_cache()


def test_an_optimizer_step_renews_the_weight():
    state, (x, weight) = make("current"), operands()
    with torch.no_grad():
        old = quantized_linear(x, weight, None, state)
        weight.mul_(2.0)  # in place: noticed
        doubled = quantized_linear(x, weight, None, state)
        assert torch.equal(doubled, 2 * old)
        weight.data.mul_(2.0)  # behind autograd's back, as fused optimizers may: the cache must be dropped
        state.drop_weight_cache()
        assert torch.equal(quantized_linear(x, weight, None, state), 4 * old)


def test_a_view_of_a_stacked_parameter_is_cached_and_renewed():
    state = make("current")
    stacked = torch.nn.Parameter(torch.randn(2, 32, 48).bfloat16())
    x, _ = operands()
    with torch.no_grad():
        old = quantized_linear(x, stacked.flatten(0, 1), None, state)
        cached = state.quantized_weight(stacked.flatten(0, 1), record=False)
        assert state.quantized_weight(stacked.flatten(0, 1), record=False) is cached
        stacked.mul_(2.0)
        assert torch.equal(quantized_linear(x, stacked.flatten(0, 1), None, state), 2 * old)


@pytest.mark.parametrize("reentrant", [False, True])
def test_recompute_changes_nothing(reentrant):
    """Same scales, same bits, same history with and without activation recompute."""

    def run(recompute: bool):
        state, (x, weight) = make(amax_history_len=4), operands()
        outputs = []
        for _ in range(3):
            layer = lambda t: quantized_linear(t, weight, None, state)  # noqa: E731
            y = checkpoint(layer, x, use_reentrant=reentrant) if recompute else layer(x)
            y.backward(torch.full_like(y, 1e-3))
            update_states([state])
            state.drop_weight_cache()
            outputs.append(y.detach())
        return outputs, snapshot(state), x.grad, weight.grad

    (a, state_a, *grads_a), (b, state_b, *grads_b) = run(True), run(False)
    assert all(torch.equal(p, q) for p, q in zip(a + grads_a, b + grads_b, strict=True))
    assert same(state_a, state_b)


def test_recompute_frees_the_quantized_input():
    """Only what goes through save_for_backward can be freed by recompute."""
    state, (x, weight) = make(), operands()
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t.shape) or t, lambda t: t):
        quantized_linear(x, weight, None, state)
    assert x.shape in packed and weight.shape not in packed  # the weight's bytes live in the cache anyway


def test_a_skipped_layer_does_not_roll():
    ran, skipped = make(amax_history_len=4), make(amax_history_len=4)
    x, weight = operands()
    for _ in range(2):
        y = quantized_linear(x, weight, None, ran)
        y.backward(torch.ones_like(y))
        update_states([ran, skipped])
    assert same(snapshot(skipped), snapshot(make(amax_history_len=4)))


def test_a_layer_called_twice_keeps_the_larger_amax():
    state, (x, weight) = make(amax_history_len=4), operands()
    y = quantized_linear(x * 4, weight, None, state) + quantized_linear(x, weight, None, state)
    y.backward(torch.ones_like(y))
    update_states([state])
    assert state.tensors()["input.amax_history"][-1] == 4 * x.detach().abs().max()


def test_resume_from_saved_tensors_is_bit_equal():
    def steps(state, x, weight, count):
        return [train(state, x, weight) for _ in range(count)]

    (x, weight), whole = operands(), make(amax_history_len=3)
    want = steps(whole, x, weight, 4)
    first = make(amax_history_len=3)
    steps(first, x, weight, 2)
    second = make(amax_history_len=3)
    with torch.no_grad():
        quantized_linear(x, weight, None, second)  # a cache made before loading
    for name, tensor in second.tensors().items():
        tensor.copy_(first.tensors()[name])
    second._cached = first._cached  # the weight was cached across the two micro-batches
    assert all(torch.equal(a, b) for a, b in zip(steps(second, x, weight, 2), want[2:], strict=True))
    assert same(snapshot(whole), snapshot(second))


def test_states_are_plain_fp32_under_stable_names():
    tensors = make(amax_history_len=7).tensors()
    roles = ("input", "weight", "grad_output")
    assert set(tensors) == {f"{role}.{field}" for role in roles for field in ("amax_history", "scale")}
    assert all(t.dtype == torch.float32 and t.shape in ((7,), (1,)) for t in tensors.values())


def test_mixed_recipes_update_together():
    x, weight = operands()
    states = [make(amax_history_len=3), make("current"), make(amax_history_len=5, margin=1)]
    for state in states:
        y = quantized_linear(x, weight, None, state)
        y.backward(torch.ones_like(y))
    update_states(states)
    assert states[0].tensors()["input.scale"] == 2 * states[2].tensors()["input.scale"]


def _rank_scales(rank: int, world: int) -> dict[str, float]:
    group = torch.distributed.group.WORLD
    calls = []
    original = torch.distributed.all_reduce
    torch.distributed.all_reduce = lambda *args, **kwargs: (calls.append(args[0].numel()), original(*args, **kwargs))
    states = [make(amax_history_len=3), make(amax_history_len=3, reduce_amax=False), make("current")]
    x, weight = operands(rank)
    for state in states:
        y = quantized_linear(x * (1 + rank), weight, None, state)
        y.backward(torch.full_like(y, 1.0 + rank))
    update_states(states, group)
    shared, own = states[0].tensors(), states[1].tensors()
    return {
        "calls": calls,
        "shared": [shared[f"{r}.scale"].item() for r in ("input", "weight", "grad_output")],
        "own": own["input.scale"].item(),
    }


def test_ranks_share_the_largest_amax_in_one_reduction():
    zero, one = run_ranks(_rank_scales, 2)
    assert zero["shared"] == one["shared"] and zero["own"] != one["own"]
    assert zero["shared"][2] == 57344.0 / 2.0
    assert zero["calls"] == [3]
