"""Megatron-LM's training arguments and our model section, both directions; what the other side has not is refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megafp8.core.config import build
from megafp8.core.errors import ConfigError
from megafp8.models import ModelConfig

_GIVE = "describe the model with --model-config run.toml"
_DIVISIBLE_BY = 128  # --make-vocab-size-divisible-by's default

# ours -> theirs, the same number on both sides
_KEYS = {
    "num_layers": "num_layers", "hidden_size": "hidden_size", "ffn_hidden_size": "ffn_hidden_size",
    "num_attention_heads": "num_attention_heads", "head_dim": "kv_channels", "norm_eps": "norm_epsilon",
    "max_sequence_length": "max_position_embeddings", "rope_theta": "rotary_base", "qk_norm": "qk_layernorm",
    "hidden_dropout": "hidden_dropout", "attention_dropout": "attention_dropout", "init_std": "init_method_std",
}  # fmt: skip
# Variants that our model has not: the values under which they are off. An argument that is not there is off.
_OFF: dict[str, tuple[Any, ...]] = {
    "multi_latent_attention": (False,), "rotary_percent": (1.0,), "rotary_interleaved": (False,),
    "apply_layernorm_1p": (False,), "squared_relu": (False,), "quick_geglu": (False,), "window_size": (None,),
    "mtp_num_layers": (None, 0), "moe_router_score_function": ("softmax",), "moe_router_num_groups": (None, 1),
    "moe_router_enable_expert_bias": (False,), "moe_shared_expert_intermediate_size": (None, 0),
    "softmax_type": ("vanilla",), "attention_output_gate": (False,), "qk_l2_norm": (False,),
    "is_hybrid_model": (False,), "moe_apply_probs_on_input": (False,), "qk_clip": (False,),
    "no_rope_freq": (None,), "activation_func_clamp_value": (None,), "glu_linear_offset": (0.0, 0),
    "apply_residual_connection_post_layernorm": (False,), "moe_latent_size": (None,),
}  # fmt: skip


def config_from_arguments(args: Mapping[str, Any], rows: int, vocab_size: int | None) -> ModelConfig:
    """Our model section of a checkpoint's arguments.

    Args:
        rows: of the embedding as it is stored, with padding.
        vocab_size: tokens without padding, where the arguments do not say.

    Raises:
        ConfigError: an argument is missing, or stands for what our model has not; all of them are listed.
    """
    wrong = [
        f"{name} = {args[name]!r} (we have {' or '.join(map(repr, off))})"
        for name, off in _OFF.items()
        if name in args and args[name] not in off
    ]
    missing = [name for name in ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads")
               if not isinstance(args.get(name), int)]  # fmt: skip
    if missing:
        raise ConfigError(f"the checkpoint's arguments do not say {', '.join(missing)}; {_GIVE}")
    model = {ours: args[theirs] for ours, theirs in _KEYS.items() if args.get(theirs) is not None}
    if "layernorm_epsilon" in args:  # its older name
        model.setdefault("norm_eps", args["layernorm_epsilon"])
    model["num_kv_heads"] = args["num_attention_heads"]
    if args.get("group_query_attention"):
        model["num_kv_heads"] = args.get("num_query_groups") or 1
    bias = bool(args.get("add_bias_linear", True))  # Megatron's default
    model |= {
        "vocab_size": _vocabulary(args, rows, vocab_size),
        "norm": "rmsnorm" if args.get("normalization") == "RMSNorm" else "layernorm",
        "tied_embeddings": not args.get("untie_embeddings_and_output_weights", False),
        "attention_bias": bias,
        "qkv_bias": bool(args.get("add_qkv_bias")) and not bias,
        "mlp_bias": bias,
    }
    if args.get("swiglu"):
        model["activation"] = "swiglu"
    else:
        model["activation"] = "gelu"  # the tanh form: --openai-gelu, or the fused kernel of bias and gelu
        if not args.get("openai_gelu") and not (bias and args.get("bias_gelu_fusion", True)):
            wrong.append("GELU by the error function (we have the tanh form)")
    wrong += _positions(args, model) + _experts(args, model)
    if wrong:
        raise ConfigError(f"the checkpoint's model is none that we have: {'; '.join(wrong)}")
    return build(ModelConfig, {"family": _family(model), **model})


def _vocabulary(args: Mapping[str, Any], rows: int, given: int | None) -> int:
    size = given or args.get("vocab_size")
    if not isinstance(size, int):
        raise ConfigError(
            f"the checkpoint does not say how many of its {rows} rows are tokens and how many padding; "
            f"give --vocab-size (its tokenizer's size; {rows} if there is no padding)"
        )
    return size


def _positions(args: Mapping[str, Any], model: dict[str, Any]) -> list[str]:
    """Fill in how positions enter; returns what we have not."""
    kind = args.get("position_embedding_type", "learned_absolute")
    if kind not in ("rope", "learned_absolute"):
        return [f"position_embedding_type = {kind!r} (we have 'rope' or 'learned_absolute')"]
    model["position"] = "rope" if kind == "rope" else "learned"
    model.setdefault("max_sequence_length", args.get("seq_length") or 2048)
    longer = args.get("rotary_seq_len_interpolation_factor")
    if args.get("use_rope_scaling"):
        model["rope_scaling"] = {
            "type": "llama3", "factor": float(args.get("rope_scaling_factor") or 8.0), "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_length": 8192,
        }  # fmt: skip
    elif longer not in (None, 1):
        model["rope_scaling"] = {"type": "linear", "factor": float(longer)}
    return ["two kinds of rope scaling"] if args.get("use_rope_scaling") and longer not in (None, 1) else []


def _experts(args: Mapping[str, Any], model: dict[str, Any]) -> list[str]:
    """Fill in the experts; returns what we have not."""
    if not args.get("num_experts"):
        return []
    every = args.get("moe_layer_freq", 1)
    dense = every.index(1) if isinstance(every, list) and 1 in every else 0
    model["moe"] = {
        "num_experts": args["num_experts"],
        "top_k": args.get("moe_router_topk") or 2,
        "ffn_hidden_size": args.get("moe_ffn_hidden_size") or args["ffn_hidden_size"],
        "normalize_top_k": not args.get("moe_router_pre_softmax", False),
        "scaling_factor": args.get("moe_router_topk_scaling_factor") or 1.0,
        "first_dense_layers": dense,
    }
    homogeneous = every == 1 or (isinstance(every, list) and every == [0] * dense + [1] * (len(every) - dense))
    return [] if homogeneous else [f"moe_layer_freq = {every!r} (we have dense layers first, then experts)"]


def _family(model: Mapping[str, Any]) -> str:
    """Whose names and defaults fit: only what is exported from it depends on that."""
    if model["position"] == "learned":
        return "gpt"
    if model.get("moe"):
        return "qwen3_moe" if model.get("qk_norm") or not model["moe"]["normalize_top_k"] else "mixtral"
    if model.get("qk_norm"):
        return "qwen3"
    return "qwen2" if model["qkv_bias"] else "llama"


def padded_rows(vocab_size: int) -> int:
    """Rows of the vocabulary as Megatron pads it at tp 1; other sizes of tp load that too."""
    return -(-vocab_size // _DIVISIBLE_BY) * _DIVISIBLE_BY


def refuse(config: ModelConfig) -> None:
    """Refuse what megatron-core's GPT model cannot be.

    Raises:
        ConfigError: lists all of it.
    """
    moe = config.moe
    wrong = {
        "latent attention": config.mla.enabled,
        f"rope_scaling {config.rope_scaling.type}": config.rope_scaling.type not in ("none", "linear", "llama3"),
        "biases of only some linears": config.attention_bias != config.mlp_bias,
        "llama3 scaling other than low 1, high 4, original length 8192": config.rope_scaling.type == "llama3"
        and (config.rope_scaling.low_freq_factor, config.rope_scaling.high_freq_factor,
             config.rope_scaling.original_max_length) != (1.0, 4.0, 8192),
        "dense layers among those with experts": bool(moe.first_dense_layers) or moe.layer_interval != 1,
        "shared experts": moe.num_shared_experts > 0,
        "a router with sigmoid scores, groups or a balance bias": moe.score != "softmax"
        or moe.num_groups != 1
        or moe.has_bias,
    }  # fmt: skip
    found = [what for what, broken in wrong.items() if broken]
    if found:
        raise ConfigError(f"the model cannot be exported to Megatron: it has {'; '.join(found)}")


def arguments_of(config: ModelConfig) -> dict[str, Any]:
    """The model's part of Megatron-LM's arguments (as `--use-checkpoint-args` reads them)."""
    moe, scaling = config.moe, config.rope_scaling
    args = {theirs: getattr(config, ours) for ours, theirs in _KEYS.items()}
    args |= {
        "encoder_num_layers": config.num_layers, "seq_length": config.max_sequence_length,
        "group_query_attention": config.num_kv_heads != config.num_attention_heads,
        "num_query_groups": config.num_kv_heads,
        "vocab_size": config.vocab_size, "padded_vocab_size": padded_rows(config.vocab_size),
        "make_vocab_size_divisible_by": _DIVISIBLE_BY,
        "normalization": "RMSNorm" if config.norm == "rmsnorm" else "LayerNorm", "apply_layernorm_1p": False,
        "untie_embeddings_and_output_weights": not config.tied_embeddings,
        "add_bias_linear": config.mlp_bias, "add_qkv_bias": config.qkv_bias,
        "swiglu": config.activation == "swiglu", "openai_gelu": config.activation == "gelu",
        "bias_gelu_fusion": False,
        "position_embedding_type": "rope" if config.position == "rope" else "learned_absolute",
        "add_position_embedding": config.position == "learned",
        "rotary_percent": 1.0, "rotary_interleaved": False,
        "use_rope_scaling": scaling.type == "llama3",
        "rope_scaling_factor": scaling.factor if scaling.type == "llama3" else 8.0,
        "rotary_seq_len_interpolation_factor": scaling.factor if scaling.type == "linear" else None,
        "num_experts": moe.num_experts or None,
    }  # fmt: skip
    if moe.num_experts:
        args |= {
            "moe_router_topk": moe.top_k, "moe_ffn_hidden_size": moe.ffn_hidden_size, "moe_layer_freq": 1,
            "moe_router_score_function": "softmax", "moe_router_pre_softmax": not moe.normalize_top_k,
            "moe_router_topk_scaling_factor": None if moe.scaling_factor == 1.0 else moe.scaling_factor,
        }  # fmt: skip
    return args
