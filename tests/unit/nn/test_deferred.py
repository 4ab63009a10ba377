"""Backward split into input and weight gradients: the same bits as in one go, and when each is computed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megafp8.models import ModelConfig, build
from megafp8.nn.deferred import WeightGrads, current_store, deferring, deliver
from megafp8.nn.precision import PrecisionConfig

TOKENS = torch.randint(0, 256, (2, 32), generator=torch.Generator().manual_seed(3))


def gradients(split: bool, recipe: str, recompute: Any, preset: str) -> dict[str, torch.Tensor]:
    model = build(
        ModelConfig(preset=preset, num_layers=2), precision=PrecisionConfig(recipe=recipe), recompute=recompute
    )
    store = WeightGrads()
    loss, _ = model(TOKENS, TOKENS.roll(-1, 1))
    if not split:
        loss.backward()
    else:
        with deferring(store):
            loss.backward()
        linears = [n for n, p in model.named_parameters() if p.grad is None]
        assert len(linears) == len(store) == 2 * 4 and all(n.endswith(".weight") for n in linears)
        store.run()
    assert len(store) == 0 and current_store() is None
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("recipe", ["none", "delayed", "current"])
@pytest.mark.parametrize(
    "recompute, preset", [("none", "tiny_gpt"), ("selective", "tiny_qwen3"), ("full", "tiny_llama")]
)
def test_i_and_w_are_b(recipe: str, recompute: str, preset: str) -> None:
    whole, parts = (gradients(split, recipe, recompute, preset) for split in (False, True))
    assert whole.keys() == parts.keys()
    for name, gradient in whole.items():
        assert torch.equal(gradient, parts[name]), name


def test_prepare_runs_one_turn_ahead() -> None:
    store, log = WeightGrads(), []
    for i in range(3):
        store.defer(lambda i=i: log.append(f"w{i}"), prepare=lambda i=i: log.append(f"p{i}"))
    store.run()
    assert log == ["p0", "p1", "w0", "p2", "w1", "w2"]


def test_deliver() -> None:
    param = torch.nn.Parameter(torch.zeros(2))
    deliver(param, torch.ones(2))
    deliver(param, torch.ones(2))
    assert param.grad is not None and param.grad.tolist() == [2, 2]
    taken: list[torch.Tensor] = []
    param.take_grad = taken.append  # type: ignore[attr-defined]
    deliver(param, torch.ones(2))
    assert len(taken) == 1 and param.grad.tolist() == [2, 2]


def test_the_store_closes_after_an_error() -> None:
    with pytest.raises(ValueError), deferring(WeightGrads()):
        raise ValueError
    assert current_store() is None
