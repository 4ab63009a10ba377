"""Qwen2 and Qwen2.5 (dense): Llama with biases of queries, keys and values, and none elsewhere.

Dims from the published config.json files of Qwen2.5.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megafp8.models.families import llama
from megafp8.models.families.rules import Family

DEFAULTS: dict[str, Any] = llama.DEFAULTS | {"qkv_bias": True, "norm_eps": 1e-6, "rope_theta": 1e6}

PRESETS: dict[str, dict[str, Any]] = {
    "tiny_qwen2": llama.dims(2, 64, 176, 4, 2, 256, 128) | {"tied_embeddings": True},
    "qwen2_5_0_5b": llama.dims(24, 896, 4864, 14, 2, 151936, 32768) | {"tied_embeddings": True},
    "qwen2_5_1_5b": llama.dims(28, 1536, 8960, 12, 2, 151936, 131072) | {"tied_embeddings": True},
    "qwen2_5_7b": llama.dims(28, 3584, 18944, 28, 4, 152064, 131072),
}


def to_config(model: Mapping[str, Any]) -> dict[str, Any]:
    """Our model section as config.json of Qwen2ForCausalLM."""
    config = llama.to_config(model) | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
    for name in ("attention_bias", "mlp_bias"):
        del config[name]  # the class knows no choice
    return config | {"use_sliding_window": False, "sliding_window": None}


def from_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """config.json of Qwen2ForCausalLM as our model section.

    Raises:
        ValueError: a sliding window shorter than the model's positions.
    """
    return llama.from_config({"use_sliding_window": False, **config}) | {"family": "qwen2", "qkv_bias": True}


def problems(model: Mapping[str, Any]) -> list[str]:
    """What Hugging Face's class cannot express."""
    return llama.fixed_problems(model, DEFAULTS)


FAMILY = Family("qwen2", "qwen2", DEFAULTS, PRESETS, llama.RULES, to_config, from_config, problems)
