"""Recomputation: the same bits whatever is recomputed, and less kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megafp8.core.config import build as build_config
from megafp8.core.errors import ConfigError
from megafp8.fp8.linear import update_states
from megafp8.models import ModelConfig, build
from megafp8.nn.dropout import DropoutKey
from megafp8.nn.precision import PrecisionConfig
from megafp8.nn.recompute import MODULES, RecomputePlan
from megafp8.train.config import TrainSection
from tests.kept import kept_bytes

PLANS: list[Any] = [
    "selective",
    *(RecomputePlan("selective", modules=(module,)) for module in MODULES),
    "full",
    RecomputePlan("full", layers=1),
]
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"preset": "tiny_llama", "hidden_dropout": 0.1},
    "qwen3": {"preset": "tiny_qwen3"},
    "gpt": {"preset": "tiny_gpt", "hidden_dropout": 0.1, "attention_dropout": 0.1},
    "mixtral": {"preset": "tiny_mixtral"},
    "deepseek": {"preset": "tiny_deepseek", "num_layers": 2},
    "latent": {"preset": "tiny_llama", "num_kv_heads": 0, "mla": LATENT, "attention_dropout": 0.1},
}


def tokens(length: int = 32) -> torch.Tensor:
    return torch.randint(0, 256, (2, length), generator=torch.Generator().manual_seed(0))


def run(values: dict[str, Any], dtype: torch.dtype, recompute: Any, recipe: str) -> list[torch.Tensor]:
    """Losses and gradients of two micro-batches, and in FP8 the state after them."""
    precision = PrecisionConfig(recipe=recipe)  # type: ignore[arg-type]
    model = build(ModelConfig(**values), dtype=dtype, recompute=recompute, precision=precision)
    results = []
    for step in range(2):
        key = DropoutKey(5, torch.tensor([2 * step, 2 * step + 1]))
        loss, _ = model(tokens(), tokens().roll(-1, 1), dropout=key, num_sequences=2)
        loss.backward()
        update_states(model.fp8_states.values())
        results.append(loss.detach())
    results += [b.clone() for b in model.buffers()]  # what routers count
    state = [t.clone() for s in model.fp8_states.values() for t in s.tensors().values()]
    return [*results, *(p.grad for p in model.parameters()), *state]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    "dtype, recipe", [(torch.bfloat16, "none"), (torch.float32, "none"), (torch.bfloat16, "delayed")]
)
def test_the_same_bits(name: str, dtype: torch.dtype, recipe: str) -> None:
    values = MODELS[name]
    expected = run(values, dtype, "none", recipe)
    for plan in PLANS:
        got = run(values, dtype, plan, recipe)
        assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True)), plan


@pytest.mark.parametrize("name, recipe", [("llama", "mxfp8"), ("mixtral", "nvfp4")])
def test_the_same_bits_with_scales_of_blocks(name: str, recipe: str) -> None:
    values = {**MODELS[name], "ffn_hidden_size": 192}
    expected = run(values, torch.bfloat16, "none", recipe)
    for plan in ("selective", "full"):
        got = run(values, torch.bfloat16, plan, recipe)
        assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True)), plan


def kept(recompute: Any, dtype: torch.dtype) -> int:
    model = build(ModelConfig(preset="tiny_gpt", hidden_dropout=0.1), recompute=recompute, dtype=dtype)
    return kept_bytes(lambda: model(tokens(64), tokens(64), dropout=DropoutKey(1, torch.tensor([0, 1]))))


def test_each_choice_keeps_less() -> None:
    none = kept("none", torch.float32)
    single = [kept(RecomputePlan("selective", modules=(module,)), torch.float32) for module in MODULES]
    assert all(number < none for number in single)
    assert kept(RecomputePlan("selective", modules=MODULES), torch.float32) < min(single)
    assert kept("selective", torch.bfloat16) < kept("none", torch.bfloat16)
    one_of_two = kept(RecomputePlan("full", layers=1), torch.float32)
    assert kept("full", torch.float32) < one_of_two < none


def test_bad_choices_are_refused() -> None:
    base = {"steps": 1, "global_batch": 1}
    with pytest.raises(ConfigError, match="recompute_modules"):
        build_config(TrainSection, base | {"recompute_modules": ["softmax"]})
    with pytest.raises(ConfigError, match="recompute_modules"):
        build_config(TrainSection, base | {"recompute_modules": []})
