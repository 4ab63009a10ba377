"""Faults that users of FP8 training reported elsewhere, where no other test covers them; docs/fp8.md lists all."""

from __future__ import annotations

import pytest
import torch

from megafp8.fp8 import LinearState, backend, begin_step, quantized_linear, recipe, update_states
from megafp8.fp8.grouped import RowBlocks
from megafp8.fp8.recipe import recipe_names

ROWS, INPUTS, OUTPUTS = 64, 128, 256


def make(name: str) -> LinearState:
    state = LinearState("layer", recipe(name), backend("emulated", "fast", compiled=False))
    begin_step([state], 1, 7)
    return state


def micro_batches(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    sizes = ((ROWS, INPUTS), (ROWS, OUTPUTS))
    return [tuple(torch.randn(s, generator=generator).bfloat16() for s in sizes) for _ in range(count)]  # type: ignore[misc]


def weight() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.randn(OUTPUTS, INPUTS, generator=torch.Generator().manual_seed(2)).bfloat16())


@pytest.mark.parametrize("name", recipe_names())
def test_a_cached_weight_gives_the_curve_of_one_made_anew(name: str) -> None:
    """TransformerEngine issues 1047 and 2852: results moved from the second micro-batch on when weights were cached."""
    outcomes = []
    for cached in (True, False):
        state, parameter, results = make(name), weight(), []
        scale = None
        for number, (x, grad) in enumerate(micro_batches(3)):
            if not cached and number:
                # made anew with the scale of the step's first time, as the cache has it
                role = state.roles["weight"]
                now = {key: tensor.clone() for key, tensor in role.tensors.items()}
                state.drop_weight_cache()
                if scale is not None:
                    role.tensors["scale"].copy_(scale)
                state.quantized_weight(parameter, record=False)
                for key, tensor in now.items():
                    role.tensors[key].copy_(tensor)
            elif role_scale := state.roles["weight"].scale:
                scale = role_scale.clone()
            x = x.clone().requires_grad_()
            y = quantized_linear(x, parameter, None, state)
            y.backward(grad)
            update_states([state])
            results += [y.detach(), x.grad]
        outcomes.append([*results, parameter.grad])
    assert all(torch.equal(a, b) for a, b in zip(*outcomes, strict=True))


@pytest.mark.parametrize("name", recipe_names())
def test_gradients_of_all_micro_batches_are_summed(name: str) -> None:
    """Primus PR 1046: only the first micro-batch's weight gradient was kept."""
    together, parameter, apart = make(name), weight(), torch.zeros(OUTPUTS, INPUTS)
    alone = make(name)
    for x, grad in micro_batches(4):
        quantized_linear(x, parameter, None, together).backward(grad)
        fresh = weight()
        quantized_linear(x, fresh, None, alone).backward(grad)
        assert fresh.grad is not None
        apart += fresh.grad.float()
        for state in (together, alone):
            update_states([state])
    assert parameter.grad is not None
    # .grad is bf16: each of 4 sums is rounded to half of 2^-8 of a value that is at most the sum of magnitudes
    assert (parameter.grad.float() - apart).abs().max() < 4 * 2.0**-8 * apart.abs().max()


def test_amaxes_of_all_micro_batches_before_an_update_count() -> None:
    """Levanter issue 8360: the state of the last micro-batch alone survived accumulation."""
    state, parameter = make("delayed"), weight()
    for factor in (1.0, 8.0, 2.0):
        x = torch.full((ROWS, INPUTS), factor).bfloat16()
        quantized_linear(x, parameter, None, state).sum().backward()
    update_states([state])
    assert float(state.roles["input"].scale) == 448.0 / 8.0  # type: ignore[arg-type]


def test_rows_between_experts_are_zeros_whatever_lay_there() -> None:
    """TransformerEngine PR 2547: padded rows held what was in memory, and its scales were NaN."""
    poison = torch.full((4096,), float("nan"))
    del poison
    blocks = RowBlocks([5, 0, 33], 32)
    x = torch.randn(38, 16)
    apart = blocks.apart(x)
    assert blocks.counts == [32, 0, 64] and apart.shape == (96, 16)
    assert torch.equal(blocks.together(apart), x)
    assert apart.count_nonzero() == x.count_nonzero()
