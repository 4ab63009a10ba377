"""DeepSeek-V3: latent attention, first layers dense, then many small experts chosen by sigmoid score plus bias.

Dims from the published config.json of DeepSeek-V3 and its report (arXiv:2412.19437, section 4.2). The preset has the
published yarn scaling; pretraining itself ran at 4,096 tokens without it (`rope_scaling.type = "none"`). The module
that predicts a second token (MTP) is not part of this model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megafp8.models.families import llama
from megafp8.models.families.qwen3_moe import EXPERT_RULES
from megafp8.models.families.rules import Family, Rule

_MLA = {
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
}  # fmt: skip
_MOE = {
    "num_experts": 256, "top_k": 8, "ffn_hidden_size": 2048, "num_shared_experts": 1, "first_dense_layers": 3,
    "score": "sigmoid", "normalize_top_k": True, "scaling_factor": 2.5, "num_groups": 8, "top_k_groups": 4,
}  # fmt: skip
DEFAULTS: dict[str, Any] = llama.DEFAULTS | {"norm_eps": 1e-6, "mla": _MLA, "moe": _MOE}

_YARN = {
    "type": "yarn", "factor": 40.0, "original_max_length": 4096, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0,
    "mscale_all_dim": 1.0,
}  # fmt: skip
PRESETS: dict[str, dict[str, Any]] = {
    "tiny_deepseek": llama.dims(3, 64, 176, 4, 4, 256, 128)
    | {
        "mla": {
            "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16,
        },
        "moe": _MOE | {
            "num_experts": 8, "top_k": 2, "ffn_hidden_size": 48, "first_dense_layers": 1, "num_groups": 4,
            "top_k_groups": 2,
        },
    },
    "deepseek_v3": llama.dims(61, 7168, 18432, 128, 128, 129280, 163840) | {"rope_scaling": _YARN},
}  # fmt: skip

_ATTENTION = llama.LAYER + "self_attn."
_LATENT = {
    "q": "q_proj", "q_down": "q_a_proj", "q_norm": "q_a_layernorm", "q_up": "q_b_proj",
    "kv_down": "kv_a_proj_with_mqa", "kv_norm": "kv_a_layernorm", "kv_up": "kv_b_proj", "out": "o_proj",
}  # fmt: skip
_SHARED = llama.LAYER + "mlp.shared_experts."
RULES = (
    *(rule for rule in llama.RULES if ".attention." not in rule.ours),
    *(
        Rule(f"layers.{{i}}.attention.{ours}.weight", (f"{_ATTENTION}{theirs}.weight",))
        for ours, theirs in _LATENT.items()
    ),
    *EXPERT_RULES,
    Rule("layers.{i}.mlp.router.bias", (llama.LAYER + "mlp.gate.e_score_correction_bias",)),
    Rule(
        "layers.{i}.mlp.shared.gate_up.weight", (_SHARED + "gate_proj.weight", _SHARED + "up_proj.weight"), "stack"
    ),
    Rule("layers.{i}.mlp.shared.down.weight", (_SHARED + "down_proj.weight",)),
)  # fmt: skip

_MOE_KEYS = {
    "num_experts": "n_routed_experts", "top_k": "num_experts_per_tok", "ffn_hidden_size": "moe_intermediate_size",
    "num_shared_experts": "n_shared_experts", "first_dense_layers": "first_k_dense_replace",
    "normalize_top_k": "norm_topk_prob", "scaling_factor": "routed_scaling_factor", "num_groups": "n_group",
    "top_k_groups": "topk_group",
}  # fmt: skip
_MLA_KEYS = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "rope_interleave")


def to_config(model: Mapping[str, Any]) -> dict[str, Any]:
    """Our model section as config.json of DeepseekV3ForCausalLM."""
    config = llama.to_config(model) | {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}
    del config["mlp_bias"], config["head_dim"]
    config |= {theirs: model["moe"][ours] for ours, theirs in _MOE_KEYS.items()}
    config |= {name: model["mla"][name] for name in _MLA_KEYS}
    return config | {
        "q_lora_rank": model["mla"]["q_lora_rank"] or None, "moe_layer_freq": 1, "scoring_func": "sigmoid",
        "topk_method": "noaux_tc", "num_nextn_predict_layers": 0,
    }  # fmt: skip


def from_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """config.json of DeepseekV3ForCausalLM as our model section."""
    model = llama.from_config({name: value for name, value in config.items() if name != "head_dim"})
    moe = {ours: config[theirs] for ours, theirs in _MOE_KEYS.items() if config.get(theirs) is not None}
    mla = {name: config[name] for name in _MLA_KEYS if config.get(name) is not None}
    return model | {
        "family": "deepseek", "moe": {"score": "sigmoid", **moe}, "mla": {"q_lora_rank": 0, **mla},
    }  # fmt: skip


def problems(model: Mapping[str, Any]) -> list[str]:
    """What Hugging Face's class cannot express."""
    found = llama.fixed_problems(model, DEFAULTS, latent=True)
    found += llama.expert_problems(model["moe"], {"score": "sigmoid", "layer_interval": 1})
    width = model["moe"]["num_shared_experts"] * model["moe"]["ffn_hidden_size"]
    if model["moe"]["shared_ffn_hidden_size"] != width or not width:
        found.append(
            f"model.moe.shared_ffn_hidden_size = {model['moe']['shared_ffn_hidden_size']}: it has shared experts of "
            f"an expert's width; nearest: {width or model['moe']['ffn_hidden_size']}"
        )
    return found


FAMILY = Family("deepseek", "deepseek_v3", DEFAULTS, PRESETS, RULES, to_config, from_config, problems)
