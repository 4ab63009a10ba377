"""Mistral: Llama without biases. Models with a sliding window are refused: our attention sees all tokens before.

Dims from the published config.json file of Mistral-7B-v0.3, which has none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megafp8.models.families import llama
from megafp8.models.families.rules import Family

DEFAULTS: dict[str, Any] = llama.DEFAULTS | {"rope_theta": 1e6}

PRESETS: dict[str, dict[str, Any]] = {
    "tiny_mistral": llama.dims(2, 64, 176, 4, 2, 256, 128),
    "mistral_7b": llama.dims(32, 4096, 14336, 32, 8, 32768, 32768),
}


def to_config(model: Mapping[str, Any]) -> dict[str, Any]:
    """Our model section as config.json of MistralForCausalLM."""
    config = llama.to_config(model) | {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    for name in ("attention_bias", "mlp_bias"):
        del config[name]  # Mistral has none
    return config | {"sliding_window": None}  # the class's own default is 4096


def from_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """config.json of MistralForCausalLM as our model section.

    Raises:
        ValueError: a sliding window shorter than the model's positions.
    """
    # what the class takes where the key is missing, not where it is null
    return llama.from_config({"sliding_window": 4096, **config}) | {"family": "mistral"}


def problems(model: Mapping[str, Any]) -> list[str]:
    """What Hugging Face's class cannot express."""
    return llama.fixed_problems(model, DEFAULTS)


FAMILY = Family("mistral", "mistral", DEFAULTS, PRESETS, llama.RULES, to_config, from_config, problems)
