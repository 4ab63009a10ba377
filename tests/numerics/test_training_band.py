"""Two layers, 200 steps, each recipe against bf16: the curve stays within twice the distance of two seeds."""

from __future__ import annotations

import functools

import pytest
import torch

from megafp8.core.config import build as build_config
from megafp8.fp8.linear import begin_step, update_states
from megafp8.models import ModelConfig, build
from megafp8.nn.precision import RECIPES, PrecisionConfig

STEPS, BATCH, LENGTH, VOCAB = 200, 8, 32, 64
CONFIG = build_config(
    ModelConfig,
    {
        "num_layers": 2, "hidden_size": 128, "ffn_hidden_size": 128, "num_attention_heads": 4, "num_kv_heads": 4,
        "vocab_size": VOCAB, "max_sequence_length": LENGTH, "init_std": 0.05,
    },
)  # fmt: skip


def batches() -> list[torch.Tensor]:
    """Sequences in which the next token is one of two, by the two before: a model has something to learn, to 0.69."""
    generator = torch.Generator().manual_seed(0)
    table = torch.randint(0, VOCAB, (VOCAB, VOCAB // 8, 2), generator=generator)
    ids = torch.randint(0, VOCAB, (STEPS * BATCH, LENGTH + 1), generator=generator)
    coins = torch.randint(0, 2, ids.shape, generator=generator)
    for place in range(2, LENGTH + 1):
        ids[:, place] = table[ids[:, place - 1], ids[:, place - 2] % (VOCAB // 8), coins[:, place]]
    return list(ids.split(BATCH))


@functools.cache
def losses(recipe: str, seed: int = 1) -> torch.Tensor:
    """Of `STEPS` steps of AdamW, fp64."""
    torch.manual_seed(0)
    model = build(CONFIG, precision=PrecisionConfig(recipe=recipe, emulation="fast"), seed=seed)
    states = list(model.fp8_states.values())
    masters = [p.detach().float().clone() for p in model.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=3e-3, betas=(0.9, 0.95))
    found = []
    for step, ids in enumerate(batches()):
        begin_step(states, step, step)
        loss, targets = model(ids[:, :-1], ids[:, 1:])
        (loss / targets).backward()
        update_states(states)
        for master, param in zip(masters, model.parameters(), strict=True):
            master.grad, param.grad = param.grad.float(), None  # type: ignore[union-attr]
        optimizer.step()
        with torch.no_grad():
            for master, param in zip(masters, model.parameters(), strict=True):
                param.copy_(master)
        for state in states:
            state.drop_weight_cache()
        found.append(float(loss.detach()) / int(targets))
    return torch.tensor(found, dtype=torch.float64)


@pytest.mark.parametrize("recipe", RECIPES)
def test_within_the_band_of_bf16(recipe: str) -> None:
    """Means of 20 steps all along the curve, and of the last 50.

    bf16 from three seeds: means of 20 steps lie up to 0.033 nats apart, of the last 50 up to 0.033 (measured here, in
    the second test). FP8 keeps 3 or 2 mantissa bits: within twice that. FP4 keeps one: its loss is known to lie about
    1 % higher while a model trains (arXiv:2509.25149, figure 2), more for a model of 128 columns, each value of which
    is a larger part of a sum: 0.12 of 1.8.
    """
    bf16, found = losses("none"), losses(recipe)
    band = 0.12 if recipe == "nvfp4" else 0.066
    difference = found - bf16
    assert difference.unfold(0, 20, 20).mean(1).abs().max() < band
    assert abs(difference[-50:].mean()) < band
    assert difference.abs().max() > 1e-3  # it did run in this recipe


def test_the_band_is_that_of_seeds() -> None:
    runs = [losses("none", seed) for seed in (1, 2, 3)]
    assert runs[0][-50:].mean() < 2.0 < 4.0 < runs[0][0]  # there was something to learn
    apart = [abs((a - b)[-50:].mean()) for a in runs for b in runs]
    assert 0.01 < max(apart) < 0.04
