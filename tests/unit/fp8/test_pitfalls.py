"""State where a tensor is all zero or not there: nothing is divided by zero, and no history moves."""

from __future__ import annotations

import pytest
import torch

from megafp8.fp8 import LinearState, backend, quantized_linear, recipe, update_states
from megafp8.fp8.linear import begin_step
from megafp8.fp8.recipe import recipe_names
from megafp8.nn.grouped import grouped_linear


def make(name: str, until: int = 0) -> LinearState:
    options = {"amax_history_len": 4} if name == "delayed" else {}
    return LinearState("e", recipe(name, **options), backend("emulated", "exact"), warmup_until=until)


def state_of(state: LinearState) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in state.tensors().items()}


@pytest.mark.parametrize("until", [0, 9])
@pytest.mark.parametrize("name", recipe_names())
def test_all_zero_tensors_give_zeros_and_move_no_history(name: str, until: int) -> None:
    state, fresh = make(name, until), make(name)
    begin_step([state], 1, 0)
    x = torch.zeros(128, 128, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.zeros(128, 128, dtype=torch.bfloat16, requires_grad=True)
    y = quantized_linear(x, weight, None, state)
    y.backward(torch.zeros_like(y))
    update_states([state])
    assert all(torch.equal(t, torch.zeros_like(t)) for t in (y.detach(), x.grad, weight.grad))
    assert all(torch.equal(tensor, fresh.tensors()[key]) for key, tensor in state.tensors().items())


@pytest.mark.parametrize("until", [0, 9])
@pytest.mark.parametrize("name", recipe_names())
def test_experts_that_get_no_tokens_keep_their_state_and_come_back(name: str, until: int) -> None:
    """A layer without a single row in a micro-batch: inputs and gradients were not seen, the weight was."""
    state = make(name, until)
    weight = (torch.randn(2, 128, 128, generator=torch.Generator().manual_seed(0)) * 0.1).bfloat16().requires_grad_()
    for step, counts in enumerate(([3, 2], [0, 0], [0, 5]), start=1):
        begin_step([state], step, 0)
        before = state_of(state)
        x = torch.randn(sum(counts), 128, generator=torch.Generator().manual_seed(step)).bfloat16().requires_grad_()
        weight.grad = None
        y = grouped_linear(x, weight, torch.tensor(counts), state=state)
        y.backward(torch.full_like(y, 0.5))
        update_states([state])
        state.drop_weight_cache()
        assert torch.isfinite(y).all() and torch.isfinite(weight.grad).all()
        assert [bool(g.any()) for g in weight.grad] == [count > 0 for count in counts]
        for key, tensor in state.tensors().items():
            seen = sum(counts) > 0 or key.startswith("weight")
            assert torch.isfinite(tensor).all()
            if not seen or key.endswith("history"):
                assert torch.equal(tensor, before[key]) == (not seen), key
