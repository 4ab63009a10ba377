"""config.json of a native TensorRT-LLM checkpoint, and what that format cannot hold.

The format of `trtllm-build` up to TensorRT-LLM 1.2: keys as its PretrainedConfig and the model classes' configurations
(tensorrt_llm/models/*/config.py) read them. Keys inside mapping, quantization and moe that a release does not know are
errors there, so only those that all of 0.13 to 1.2 know are written.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from megafp8.core.errors import ConfigError
from megafp8.models import ModelConfig

COMPAT = ("1.2", "0.13")
_ARCHITECTURES = {
    "llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "mixtral": "MixtralForCausalLM",
    "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM",
    "gpt": "GPTForCausalLM",
}  # fmt: skip
_SINCE_1 = ("qwen3", "qwen3_moe")
_SCALINGS = ("none", "linear", "dynamic", "llama3")
EXCLUDED = ["lm_head", "*router"]  # written out: what null and [] mean changed between releases


@dataclass(frozen=True)
class Target:
    """How the model is served.

    Attributes:
        tp, pp: ranks that share each layer, and stages.
        moe_ep: of the tp ranks, how many groups share out the experts; tp / moe_ep ranks share an expert's matrices.
        compat: the oldest release that must read it.
    """

    tp: int = 1
    pp: int = 1
    moe_ep: int = 1
    compat: str = "1.2"

    def spans(self, num_layers: int) -> list[range]:
        """Which layers each stage has: the first stages one more, where they do not divide (as 1.x does)."""
        least, more = divmod(num_layers, self.pp)
        starts = [stage * least + min(stage, more) for stage in range(self.pp + 1)]
        return [range(a, b) for a, b in pairwise(starts)]

    def kv_heads(self, num_kv_heads: int, rank: int) -> range:
        """The kv heads of a tp rank; where they are fewer than ranks, consecutive ranks have the same one."""
        if num_kv_heads >= self.tp:
            each = num_kv_heads // self.tp
            return range(rank * each, (rank + 1) * each)
        head = rank * num_kv_heads // self.tp
        return range(head, head + 1)


def refuse(config: ModelConfig, target: Target) -> None:
    """Raise ConfigError for what the format or the target cannot take; all of it, a line each."""
    problems, heads, kv, moe = [], config.num_attention_heads, config.num_kv_heads, config.moe
    if target.compat not in COMPAT:
        problems.append(f"--compat {target.compat}: one of {', '.join(COMPAT)}")
    if config.family not in _ARCHITECTURES:
        problems.append(f"model.family {config.family}: native checkpoints have {', '.join(_ARCHITECTURES)}")
    elif config.family in _SINCE_1 and target.compat == "0.13":
        problems.append(f"model.family {config.family}: releases before 1.0 have no such class; nearest: --compat 1.2")
    if config.rope_scaling.type not in _SCALINGS:
        problems.append(f"model.rope_scaling.type {config.rope_scaling.type}: the format has {', '.join(_SCALINGS)}")
    if min(target.tp, target.pp, target.moe_ep) < 1:
        problems.append(f"--tp {target.tp}, --pp {target.pp}, --moe-ep {target.moe_ep} must be at least 1")
        raise ConfigError("\n".join(problems))
    if heads % target.tp:
        nearest = max(n for n in range(1, min(target.tp, heads) + 1) if heads % n == 0)
        problems.append(f"--tp {target.tp} does not divide {heads} attention heads; nearest: {nearest}")
    if max(kv, target.tp) % min(kv, target.tp):
        problems.append(f"--tp {target.tp} and {kv} kv heads: one has to divide the other, so that ranks share heads")
    width = moe.ffn_hidden_size if moe.num_experts else config.ffn_hidden_size
    if width % (target.tp // target.moe_ep if moe.num_experts else target.tp):
        problems.append(f"--tp {target.tp} does not divide the MLP's {width} channels")
    if target.tp % target.moe_ep or (moe.num_experts or 1) % target.moe_ep:
        problems.append(f"--moe-ep {target.moe_ep} must divide --tp {target.tp} and the {moe.num_experts} experts")
    if moe.num_experts and any(not moe.is_moe_layer(i) for i in range(config.num_layers)):
        problems.append("model.moe: layers without experts among layers with them; the classes have one kind")
    if target.pp > config.num_layers:
        problems.append(f"--pp {target.pp}: the model has {config.num_layers} layers")
    elif config.num_layers % target.pp and target.compat == "0.13":
        problems.append(f"--pp {target.pp} does not divide {config.num_layers} layers; 0.13 drops what is left over")
    if problems:
        raise ConfigError("\n".join(problems))


def build_config(config: ModelConfig, target: Target, *, dtype: str, fp8: bool, fp8_cache: bool) -> dict[str, Any]:
    """The configuration file; `dtype` "bfloat16" or "float16"."""
    experts = config.moe.num_experts > 0
    made: dict[str, Any] = {
        "architecture": _ARCHITECTURES[config.family],
        "dtype": dtype,
        "logits_dtype": "float32",
        "vocab_size": config.vocab_size,  # the true one: only lm_head's rows are filled up
        "hidden_size": config.hidden_size,
        "intermediate_size": config.moe.ffn_hidden_size if experts else config.ffn_hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_size": config.head_dim,
        "max_position_embeddings": config.max_sequence_length,
        "norm_epsilon": config.norm_eps,
        "hidden_act": {"gpt": "gelu_new", "mixtral": "swiglu"}.get(config.family, "silu"),
        "position_embedding_type": "learned_absolute" if config.position == "learned" else "rope_gpt_neox",
        "use_parallel_embedding": False,
        "embedding_sharding_dim": 0,
        "share_embedding_table": False,
        "mapping": {
            "world_size": target.tp * target.pp, "tp_size": target.tp, "pp_size": target.pp, "cp_size": 1,
            "moe_tp_size": target.tp // target.moe_ep, "moe_ep_size": target.moe_ep,
        },
        "quantization": {"quant_algo": "FP8" if fp8 else None, "kv_cache_quant_algo": "FP8" if fp8_cache else None},
    }  # fmt: skip
    if fp8:
        made["quantization"]["exclude_modules"] = EXCLUDED
    if experts:
        mode = 1 if config.moe.normalize_top_k else 0
        made["moe"] = {"num_experts": config.moe.num_experts, "top_k": config.moe.top_k, "normalization_mode": mode}
    if config.family == "gpt":
        return made | {"gpt_variant": "gpt2", "bias": True}
    made |= {"rotary_base": config.rope_theta, "rotary_scaling": _scaling(config)}
    if config.family.startswith("qwen"):
        made |= {"qwen_type": config.family, "attn_bias": config.has_qkv_bias, "qk_layernorm": config.qk_norm}
        return made | ({"moe_intermediate_size": config.moe.ffn_hidden_size} if experts else {})
    return made | {"attn_bias": config.attention_bias, "mlp_bias": config.mlp_bias}


def _scaling(config: ModelConfig) -> dict[str, Any] | None:
    rule = config.rope_scaling
    if rule.type == "none":
        return None
    made: dict[str, Any] = {"type": rule.type, "rope_type": rule.type, "factor": rule.factor}
    if rule.type == "llama3":
        made |= {
            "low_freq_factor": rule.low_freq_factor, "high_freq_factor": rule.high_freq_factor,
            "original_max_position_embeddings": rule.original_max_length,
        }  # fmt: skip
    return made
