"""Qwen3 with experts: Qwen3's attention, 128 small experts in every layer (arXiv:2505.09388, table 2).

Dims from the published config.json files of Qwen3-30B-A3B and Qwen3-235B-A22B.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megafp8.models.families import llama, qwen3
from megafp8.models.families.rules import Family, Rule

DEFAULTS: dict[str, Any] = qwen3.DEFAULTS | {"moe": {"num_experts": 128, "top_k": 8, "ffn_hidden_size": 768}}


def _qwen3(layers: int, hidden: int, ffn: int, heads: int, expert_ffn: int) -> dict[str, Any]:
    moe = DEFAULTS["moe"] | {"ffn_hidden_size": expert_ffn}
    return llama.dims(layers, hidden, ffn, heads, 4, 151936, 40960) | {"moe": moe}


PRESETS: dict[str, dict[str, Any]] = {
    "tiny_qwen3_moe": llama.dims(2, 64, 176, 4, 2, 256, 128)
    | {"head_dim": 32, "moe": {"num_experts": 8, "top_k": 2, "ffn_hidden_size": 48}},
    "qwen3_30b_a3b": _qwen3(48, 2048, 6144, 32, 768),
    "qwen3_235b_a22b": _qwen3(94, 4096, 12288, 64, 1536),
}

EXPERT_RULES = (
    Rule("layers.{i}.mlp.router.weight", (llama.LAYER + "mlp.gate.weight",)),
    Rule(
        "layers.{i}.mlp.experts.gate_up",
        (llama.LAYER + "mlp.experts.{e}.gate_proj.weight", llama.LAYER + "mlp.experts.{e}.up_proj.weight"),
        "stack_pairs",
    ),
    Rule("layers.{i}.mlp.experts.down", (llama.LAYER + "mlp.experts.{e}.down_proj.weight",), "stack"),
)
RULES = (*llama.RULES, *EXPERT_RULES)

_KEYS = {
    "num_experts": "num_experts", "top_k": "num_experts_per_tok", "ffn_hidden_size": "moe_intermediate_size",
    "normalize_top_k": "norm_topk_prob",
}  # fmt: skip


def to_config(model: Mapping[str, Any]) -> dict[str, Any]:
    """Our model section as config.json of Qwen3MoeForCausalLM."""
    config = qwen3.to_config(model) | {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}
    moe = model["moe"]
    config |= {theirs: moe[ours] for ours, theirs in _KEYS.items()}
    return config | {
        "decoder_sparse_step": 1, "mlp_only_layers": list(range(moe["first_dense_layers"])),
        "output_router_logits": False, "router_aux_loss_coef": moe["aux_loss_coeff"],
    }  # fmt: skip


def from_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """config.json of Qwen3MoeForCausalLM as our model section.

    Raises:
        ValueError: layers without experts that are not the first ones.
    """
    dense = list(config.get("mlp_only_layers") or [])
    if dense != list(range(len(dense))) or config.get("decoder_sparse_step", 1) != 1:
        raise ValueError(
            f"mlp_only_layers {dense} with decoder_sparse_step {config.get('decoder_sparse_step', 1)}: only the first "
            "layers can be without experts"
        )
    if "num_local_experts" in config:  # what transformers 5 writes; the published files have num_experts
        config = {"num_experts": config["num_local_experts"], **config}
    moe = {ours: config[theirs] for ours, theirs in _KEYS.items() if config.get(theirs) is not None}
    moe.setdefault("normalize_top_k", False)  # Hugging Face's default
    return qwen3.from_config(config) | {"family": "qwen3_moe", "moe": moe | {"first_dense_layers": len(dense)}}


def problems(model: Mapping[str, Any]) -> list[str]:
    """What Hugging Face's class cannot express."""
    return llama.fixed_problems(model, DEFAULTS, biases=("mlp_bias",)) + llama.expert_problems(
        model["moe"],
        {
            "score": "softmax", "scaling_factor": 1.0, "num_groups": 1, "num_shared_experts": 0, "layer_interval": 1,
            "bias_update_rate": 0.0,
        },
    )  # fmt: skip


FAMILY = Family("qwen3_moe", "qwen3_moe", DEFAULTS, PRESETS, RULES, to_config, from_config, problems)
