"""Qwen3 (dense): Llama with an RMSNorm on every query and key head, and a head size of its own.

Dims from the published config.json files.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megafp8.models.families import llama
from megafp8.models.families.rules import Family

DEFAULTS: dict[str, Any] = llama.DEFAULTS | {"qk_norm": True, "norm_eps": 1e-6, "rope_theta": 1e6, "head_dim": 128}


def _qwen3(layers: int, hidden: int, ffn: int, heads: int, *, tied: bool) -> dict[str, Any]:
    return llama.dims(layers, hidden, ffn, heads, 8, 151936, 40960) | {"tied_embeddings": tied}


PRESETS: dict[str, dict[str, Any]] = {
    "tiny_qwen3": llama.dims(2, 64, 176, 4, 2, 256, 128) | {"head_dim": 32, "tied_embeddings": True},
    "qwen3_0_6b": _qwen3(28, 1024, 3072, 16, tied=True),
    "qwen3_1_7b": _qwen3(28, 2048, 6144, 16, tied=True),
    "qwen3_4b": _qwen3(36, 2560, 9728, 32, tied=True),
    "qwen3_8b": _qwen3(36, 4096, 12288, 32, tied=False),
    "qwen3_14b": _qwen3(40, 5120, 17408, 40, tied=False),
    "qwen3_32b": _qwen3(64, 5120, 25600, 64, tied=False),
}


def to_config(model: Mapping[str, Any]) -> dict[str, Any]:
    """Our model section as config.json of Qwen3ForCausalLM."""
    config = llama.to_config(model) | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    config |= {"use_sliding_window": False, "sliding_window": None}
    del config["mlp_bias"]  # Qwen3 has none
    return config


def from_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """config.json of Qwen3ForCausalLM as our model section.

    Raises:
        ValueError: a sliding window shorter than the model's positions.
    """
    return llama.from_config({"use_sliding_window": False, **config}) | {"family": "qwen3", "qk_norm": True}


def problems(model: Mapping[str, Any]) -> list[str]:
    """What Hugging Face's class cannot express."""
    return llama.fixed_problems(model, DEFAULTS, biases=("mlp_bias",))


FAMILY = Family("qwen3", "qwen3", DEFAULTS, PRESETS, llama.RULES, to_config, from_config, problems)
