"""GPT-2: LayerNorm, learned positions, tanh-GELU, biases, dropout, tied embeddings. Presets and Hugging Face names.

Dims from the published config.json files of gpt2, gpt2-medium, gpt2-large, gpt2-xl.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megafp8.models.families.llama import dims, fixed_problems, refuse_other
from megafp8.models.families.rules import Family, Rule

DEFAULTS: dict[str, Any] = {
    "norm": "layernorm", "activation": "gelu", "position": "learned", "qk_norm": False,
    "attention_bias": True, "qkv_bias": False, "mlp_bias": True, "tied_embeddings": True, "norm_eps": 1e-5,
}  # fmt: skip


def _gpt(layers: int, hidden: int, heads: int, vocab: int = 50257, length: int = 1024) -> dict[str, Any]:
    return dims(layers, hidden, 4 * hidden, heads, heads, vocab, length)


PRESETS: dict[str, dict[str, Any]] = {
    "tiny_gpt": _gpt(2, 64, 4, 256, 128),
    "gpt2": _gpt(12, 768, 12),
    "gpt2_medium": _gpt(24, 1024, 16),
    "gpt2_large": _gpt(36, 1280, 20),
    "gpt2_xl": _gpt(48, 1600, 25),
}

_LAYER = "transformer.h.{i}."
_NORMS = {
    "layers.{i}.attention_norm": _LAYER + "ln_1", "layers.{i}.mlp_norm": _LAYER + "ln_2",
    "final_norm": "transformer.ln_f",
}  # fmt: skip
_LINEARS = {
    "layers.{i}.attention.out": _LAYER + "attn.c_proj", "layers.{i}.mlp.up": _LAYER + "mlp.c_fc",
    "layers.{i}.mlp.down": _LAYER + "mlp.c_proj",
}  # fmt: skip
RULES = (
    Rule("embedding.weight", ("transformer.wte.weight",)),
    Rule("position_embedding.weight", ("transformer.wpe.weight",)),
    Rule("layers.{i}.attention.qkv.weight", (_LAYER + "attn.c_attn.weight",), "conv1d_qkv"),
    Rule("layers.{i}.attention.qkv.bias", (_LAYER + "attn.c_attn.bias",), "joint_qkv"),
    *(Rule(f"{ours}.{part}", (f"{theirs}.{part}",)) for ours, theirs in _NORMS.items() for part in ("weight", "bias")),
    *(Rule(f"{ours}.weight", (f"{theirs}.weight",), "conv1d") for ours, theirs in _LINEARS.items()),
    *(Rule(f"{ours}.bias", (f"{theirs}.bias",)) for ours, theirs in _LINEARS.items()),
    Rule("output.weight", ("lm_head.weight",)),
)

_KEYS = {
    "num_layers": "n_layer", "hidden_size": "n_embd", "ffn_hidden_size": "n_inner", "num_attention_heads": "n_head",
    "vocab_size": "vocab_size", "max_sequence_length": "n_positions", "norm_eps": "layer_norm_epsilon",
    "tied_embeddings": "tie_word_embeddings", "attention_dropout": "attn_pdrop", "hidden_dropout": "resid_pdrop",
    "init_std": "initializer_range",
}  # fmt: skip


def to_config(model: Mapping[str, Any]) -> dict[str, Any]:
    """Our model section as config.json of GPT2LMHeadModel."""
    config = {theirs: model[ours] for ours, theirs in _KEYS.items()}
    return config | {
        "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "activation_function": "gelu_new",
        "embd_pdrop": model["hidden_dropout"], "n_ctx": model["max_sequence_length"], "use_cache": True,
    }  # fmt: skip


def from_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """config.json of GPT2LMHeadModel as our model section.

    Raises:
        ValueError: variants that our model has not.
    """
    refuse_other(
        config,
        {
            "activation_function": ("gelu_new", "gelu_pytorch_tanh"), "scale_attn_weights": (True,),
            "scale_attn_by_inverse_layer_idx": (False,), "add_cross_attention": (False,),
        },
    )  # fmt: skip
    model = {ours: config[theirs] for ours, theirs in _KEYS.items() if config.get(theirs) is not None}
    model.setdefault("ffn_hidden_size", 4 * config["n_embd"])
    return {"family": "gpt", **DEFAULTS, **model, "num_kv_heads": config["n_head"]}


def problems(model: Mapping[str, Any]) -> list[str]:
    """What Hugging Face's class cannot express."""
    found = fixed_problems(model, DEFAULTS)
    heads, width = model["num_attention_heads"], model["num_attention_heads"] * model["head_dim"]
    if (width, model["num_kv_heads"]) != (model["hidden_size"], heads):
        found.append("model: it has head_dim = hidden_size / num_attention_heads and no shared kv heads")
    return found


FAMILY = Family("gpt", "gpt2", DEFAULTS, PRESETS, RULES, to_config, from_config, problems)
