"""Mixtral: Llama with a mixture of experts in every layer (Jiang et al. 2024, arXiv:2401.04088).

Dims from the published config.json files of Mixtral-8x7B-v0.1 and Mixtral-8x22B-v0.1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megafp8.models.families import llama
from megafp8.models.families.rules import Family, Rule

DEFAULTS: dict[str, Any] = llama.DEFAULTS | {"rope_theta": 1e6, "moe": {"num_experts": 8, "top_k": 2}}

PRESETS: dict[str, dict[str, Any]] = {
    "tiny_mixtral": llama.dims(2, 64, 96, 4, 2, 256, 128) | {"moe": {"num_experts": 4, "top_k": 2}},
    "mixtral_8x7b": llama.dims(32, 4096, 14336, 32, 8, 32000, 32768),
    "mixtral_8x22b": llama.dims(56, 6144, 16384, 48, 8, 32000, 65536),
}

_BLOCK = llama.LAYER + "block_sparse_moe."
RULES = (
    *(rule for rule in llama.RULES if ".mlp." not in rule.ours),
    Rule("layers.{i}.mlp.router.weight", (_BLOCK + "gate.weight",)),
    Rule(
        "layers.{i}.mlp.experts.gate_up",
        (_BLOCK + "experts.{e}.w1.weight", _BLOCK + "experts.{e}.w3.weight"),
        "stack_pairs",
    ),
    Rule("layers.{i}.mlp.experts.down", (_BLOCK + "experts.{e}.w2.weight",), "stack"),
)

_KEYS = {"num_experts": "num_local_experts", "top_k": "num_experts_per_tok"}


def to_config(model: Mapping[str, Any]) -> dict[str, Any]:
    """Our model section as config.json of MixtralForCausalLM."""
    config = llama.to_config(model) | {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}
    for name in ("attention_bias", "mlp_bias"):
        del config[name]  # Mixtral has none
    moe = model["moe"]
    config |= {theirs: moe[ours] for ours, theirs in _KEYS.items()}
    return config | {
        "intermediate_size": moe["ffn_hidden_size"], "sliding_window": None, "output_router_logits": False,
        "router_jitter_noise": 0.0, "router_aux_loss_coef": moe["aux_loss_coeff"],
    }  # fmt: skip


def from_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """config.json of MixtralForCausalLM as our model section."""
    moe = {ours: config[theirs] for ours, theirs in _KEYS.items()}
    return llama.from_config(config) | {"family": "mixtral", "moe": moe}


def problems(model: Mapping[str, Any]) -> list[str]:
    """What Hugging Face's class cannot express."""
    return llama.fixed_problems(model, DEFAULTS) + llama.expert_problems(
        model["moe"],
        {
            "score": "softmax", "normalize_top_k": True, "scaling_factor": 1.0, "num_groups": 1,
            "num_shared_experts": 0, "first_dense_layers": 0, "layer_interval": 1, "bias_update_rate": 0.0,
        },
    )  # fmt: skip


FAMILY = Family("mixtral", "mixtral", DEFAULTS, PRESETS, RULES, to_config, from_config, problems)
