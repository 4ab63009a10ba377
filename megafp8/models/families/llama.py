"""Llama: RMSNorm, rotary positions, grouped queries, SwiGLU. Presets and Hugging Face names.

Dims from the published config.json files of the models, and of "The Llama 3 Herd of Models", table 3.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megafp8.models.families.rules import Family, Rule

DEFAULTS: dict[str, Any] = {
    "norm": "rmsnorm", "activation": "swiglu", "position": "rope", "qk_norm": False,
    "attention_bias": False, "qkv_bias": False, "mlp_bias": False, "norm_eps": 1e-5, "rope_theta": 10000.0,
}  # fmt: skip


def dims(layers: int, hidden: int, ffn: int, heads: int, kv_heads: int, vocab: int, length: int) -> dict[str, Any]:
    """The size part of a model section."""
    return {
        "num_layers": layers, "hidden_size": hidden, "ffn_hidden_size": ffn, "num_attention_heads": heads,
        "num_kv_heads": kv_heads, "vocab_size": vocab, "max_sequence_length": length,
    }  # fmt: skip


_LLAMA31 = {
    "rope_theta": 500000.0,
    "rope_scaling": {"type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                     "original_max_length": 8192},
}  # fmt: skip

PRESETS: dict[str, dict[str, Any]] = {
    "tiny_llama": dims(2, 64, 176, 4, 2, 256, 128),
    "demo_llama": dims(4, 192, 512, 6, 2, 8192, 256) | {"tied_embeddings": True},
    "bench": dims(8, 512, 1408, 8, 4, 8192, 512),
    # The 1.5B model of the BF16-against-FP8 experiment; its dims are ours, only its size is published.
    "fp8_1b5": dims(24, 2048, 6144, 16, 8, 128000, 4096) | {"tied_embeddings": True, "rope_theta": 500000.0},
    "llama2_7b": dims(32, 4096, 11008, 32, 32, 32000, 4096),
    "llama3_8b": dims(32, 4096, 14336, 32, 8, 128256, 8192) | {"rope_theta": 500000.0},
    "llama3_70b": dims(80, 8192, 28672, 64, 8, 128256, 8192) | {"rope_theta": 500000.0},
    "llama3_405b": dims(126, 16384, 53248, 128, 8, 128256, 131072) | _LLAMA31,
}

LAYER = "model.layers.{i}."
RULES = (
    Rule("embedding.weight", ("model.embed_tokens.weight",)),
    Rule("layers.{i}.attention_norm.weight", (LAYER + "input_layernorm.weight",)),
    *(
        Rule(f"layers.{{i}}.attention.qkv.{part}", tuple(LAYER + f"self_attn.{x}_proj.{part}" for x in "qkv"), "qkv")
        for part in ("weight", "bias")
    ),
    *(Rule(f"layers.{{i}}.attention.out.{part}", (LAYER + f"self_attn.o_proj.{part}",)) for part in ("weight", "bias")),
    Rule("layers.{i}.attention.q_norm.weight", (LAYER + "self_attn.q_norm.weight",)),
    Rule("layers.{i}.attention.k_norm.weight", (LAYER + "self_attn.k_norm.weight",)),
    Rule("layers.{i}.mlp_norm.weight", (LAYER + "post_attention_layernorm.weight",)),
    *(
        Rule(
            f"layers.{{i}}.mlp.gate_up.{part}",
            (LAYER + f"mlp.gate_proj.{part}", LAYER + f"mlp.up_proj.{part}"),
            "stack",
        )
        for part in ("weight", "bias")
    ),
    *(Rule(f"layers.{{i}}.mlp.down.{part}", (LAYER + f"mlp.down_proj.{part}",)) for part in ("weight", "bias")),
    Rule("final_norm.weight", ("model.norm.weight",)),
    Rule("output.weight", ("lm_head.weight",)),
)

# ours -> Hugging Face's
_KEYS = {
    "num_layers": "num_hidden_layers", "hidden_size": "hidden_size", "ffn_hidden_size": "intermediate_size",
    "num_attention_heads": "num_attention_heads", "num_kv_heads": "num_key_value_heads", "head_dim": "head_dim",
    "vocab_size": "vocab_size", "max_sequence_length": "max_position_embeddings", "norm_eps": "rms_norm_eps",
    "tied_embeddings": "tie_word_embeddings", "attention_bias": "attention_bias", "mlp_bias": "mlp_bias",
    "attention_dropout": "attention_dropout", "init_std": "initializer_range", "rope_theta": "rope_theta",
}  # fmt: skip
_SCALING_KEYS = {
    "factor": "factor", "low_freq_factor": "low_freq_factor", "high_freq_factor": "high_freq_factor",
    "original_max_length": "original_max_position_embeddings", "beta_fast": "beta_fast", "beta_slow": "beta_slow",
    "attention_factor": "attention_factor", "mscale": "mscale", "mscale_all_dim": "mscale_all_dim",
}  # fmt: skip
_SCALING_USES = {
    "linear": ("factor",), "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_length"),
    "yarn": ("factor", "original_max_length", "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim"),
}  # fmt: skip


def to_config(model: Mapping[str, Any]) -> dict[str, Any]:
    """Our model section as config.json of LlamaForCausalLM."""
    config = {theirs: model[ours] for ours, theirs in _KEYS.items()}
    config |= {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "use_cache": True}
    scaling = model["rope_scaling"]
    kind = scaling["type"]
    rope: dict[str, Any] = {"rope_type": "default" if kind == "none" else kind}
    for ours in _SCALING_USES.get(kind, ()):
        if scaling[ours]:  # 0: transformers' own default
            rope[_SCALING_KEYS[ours]] = scaling[ours]
    # transformers 5 reads rope_parameters; TensorRT-LLM, vLLM and transformers 4 read the older two
    config["rope_scaling"] = None if kind == "none" else dict(rope)
    config["rope_parameters"] = rope | {"rope_theta": model["rope_theta"]}
    return config


def from_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """config.json of LlamaForCausalLM as our model section.

    Raises:
        ValueError: what our model has not: sliding windows, another activation, heads rotated in part; or a value is
            missing, which transformers would fill by defaults of its own, or is there twice and differs.
    """
    _refuse_missing(config)
    refuse_other(config, {"hidden_act": ("silu", "swish"), "partial_rotary_factor": (1.0,)})
    refuse_windows(config)
    model = {ours: config[theirs] for ours, theirs in _KEYS.items() if config.get(theirs) is not None}
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    refuse_other(rope, {"partial_rotary_factor": (1.0,)})
    if "rope_theta" in rope:
        if config.get("rope_theta", rope["rope_theta"]) != rope["rope_theta"]:
            raise ValueError(
                f"rope_theta {config['rope_theta']} is not {rope['rope_theta']} as in rope_parameters; make them equal"
            )
        model["rope_theta"] = float(rope["rope_theta"])
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        theirs = {ours: rope[name] for ours, name in _SCALING_KEYS.items() if rope.get(name) is not None}
        model["rope_scaling"] = {"type": kind, **theirs}
    model.setdefault("tied_embeddings", False)  # Hugging Face's default for Llama
    return {"family": "llama", **DEFAULTS, **model}


_NEEDED = ("norm_eps", "vocab_size", "hidden_size", "ffn_hidden_size", "num_layers", "num_attention_heads",
           "max_sequence_length")  # fmt: skip


def _refuse_missing(config: Mapping[str, Any]) -> None:
    needed = [_KEYS[name] for name in _NEEDED]
    if config.get("model_type") != "llama":  # which has as many as query heads; others have numbers of their own
        needed.append(_KEYS["num_kv_heads"])
    missing = [name for name in needed if config.get(name) is None]
    if missing:
        raise ValueError(f"{', '.join(missing)} missing; give what the model was made with")


def refuse_other(config: Mapping[str, Any], allowed: Mapping[str, tuple[Any, ...]]) -> None:
    """Refuse values under which the same weights compute something else.

    Raises:
        ValueError: one of the keys is there with another value than these.
    """
    for name, values in allowed.items():
        if config.get(name, values[0]) not in values:
            raise ValueError(f"{name} {config[name]!r} is not what our model computes, which is {values[0]!r}")


def refuse_windows(config: Mapping[str, Any]) -> None:
    """Refuse attention that sees only a window of tokens, unless it is as long as the model's positions.

    Raises:
        ValueError: says how the same weights can be used within the window.
    """
    window, length = config.get("sliding_window"), config["max_position_embeddings"]
    used = config.get("use_sliding_window", True) and window is not None and window < length
    if used or "sliding_attention" in (config.get("layer_types") or ()):
        raise ValueError(
            f"sliding_window {window}: our attention sees all tokens before; to use the model within {window} tokens, "
            f"set sliding_window to null and max_position_embeddings to {window} in config.json"
        )


def fixed_problems(
    model: Mapping[str, Any],
    defaults: Mapping[str, Any],
    *,
    biases: tuple[str, ...] = ("attention_bias", "mlp_bias"),
    latent: bool = False,
) -> list[str]:
    """What a family's class cannot express of what all models have: a line each.

    Args:
        biases: those that the class has no choice about.
        latent: whether the class has latent attention.
    """
    names = ("norm", "activation", "position", "qk_norm", "qkv_bias", *biases)
    problems = [
        f"model.{name} = {model[name]!r}: it has {defaults[name]!r}" for name in names if model[name] != defaults[name]
    ]
    if (model["mla"]["kv_lora_rank"] > 0) != latent:
        problems.append(f"model.mla: it has {'' if latent else 'no '}latent attention")
    if (model["moe"]["num_experts"] > 0) != ("moe" in defaults):
        problems.append(f"model.moe: it has {'' if 'moe' in defaults else 'no '}experts")
    return problems


def expert_problems(moe: Mapping[str, Any], fixed: Mapping[str, Any]) -> list[str]:
    """What a family's class cannot express of our experts' section: `fixed` is all that it can."""
    return [f"model.moe.{name} = {moe[name]!r}: it has {v!r}" for name, v in fixed.items() if moe[name] != v]


def problems(model: Mapping[str, Any]) -> list[str]:
    """What Hugging Face's class cannot express."""
    return fixed_problems(model, DEFAULTS, biases=())


FAMILY = Family("llama", "llama", DEFAULTS, PRESETS, RULES, to_config, from_config, problems)
