"""What a model costs, as arithmetic: parameters and FLOPs. No torch; the formulas are checked against the model.

FLOPs count a multiply-add as 2 and the backward pass as twice the forward pass; embedding lookups, norms, softmax
and the optimizer are never counted. Attention comes in two conventions, and both are always shown: `causal` halves
it for the mask (Megatron since 2025-03), full does not (Megatron before, PaLM, most others).
"""

from __future__ import annotations

from megafp8.models.config import ModelConfig, expert_shapes, gemm_shapes


def num_parameters(config: ModelConfig) -> int:
    """Elements of all parameters; a tied output layer counts once. The experts' balance bias is not one of them."""
    linears = _elements(gemm_shapes(config)) + config.moe.num_experts * _elements(expert_shapes(config))
    positions = config.max_sequence_length * config.hidden_size * (config.position == "learned")
    layer, final = small_parameters(config)
    return linears + routers(config) + config.num_layers * layer + final + _embeddings(config) + positions


def active_parameters(config: ModelConfig) -> int:
    """Elements of the parameters that one token passes: of the routed experts only its top_k."""
    idle = config.moe.num_experts - config.moe.top_k if config.moe.num_experts else 0
    return num_parameters(config) - idle * _elements(expert_shapes(config))


def moe_layers(config: ModelConfig) -> int:
    """How many layers have experts."""
    return sum(config.moe.is_moe_layer(i) for i in range(config.num_layers))


def routers(config: ModelConfig) -> int:
    """Elements of all routers' weights."""
    return moe_layers(config) * config.moe.num_experts * config.hidden_size


def _elements(shapes: dict[str, tuple[int, int, str]]) -> int:
    return sum(inputs * outputs for inputs, outputs, _ in shapes.values())


def _embeddings(config: ModelConfig) -> int:
    return config.vocab_size * config.hidden_size * (1 if config.tied_embeddings else 2)


def small_parameters(config: ModelConfig) -> tuple[int, int]:
    """Norms and biases: of one layer, and the final norm."""
    hidden = config.hidden_size
    norm = hidden * (2 if config.norm == "layernorm" else 1)
    layer = 2 * norm
    if config.mla.enabled:
        return layer + config.mla.q_lora_rank + config.mla.kv_lora_rank, norm
    layer += 2 * config.head_dim * config.qk_norm
    layer += config.qkv_size * config.has_qkv_bias + hidden * config.attention_bias
    return layer + (config.num_mlp_inputs * config.ffn_hidden_size + hidden) * config.mlp_bias, norm


def flops_per_token(config: ModelConfig, sequence_length: int, *, causal: bool) -> float:
    """Training FLOPs for one token, forward and backward, without recomputation.

    Of the experts a token's own count (top_k and the shared ones), and the router. Capacity and drops do not show.
    """
    linears = _elements(gemm_shapes(config)) + routers(config)
    if config.moe.num_experts:
        linears += config.moe.top_k * _elements(expert_shapes(config))
    core = core_flops(config, causal=causal) * sequence_length
    return 6.0 * (linears + config.hidden_size * config.vocab_size) + core


def hardware_flops_per_token(
    config: ModelConfig, sequence_length: int, *, causal: bool, recompute: str = "none", recomputed_layers: int = 0
) -> float:
    """`flops_per_token` and what recomputation adds: the forward pass of the layers done twice (HFU against MFU).

    Selective recomputation repeats elementwise work only (the attention core's, too, where weights are dropped, is
    counted by nobody), so it adds nothing here.

    Args:
        recomputed_layers: of the whole model, under "full"; 0 = all.
    """
    once = flops_per_token(config, sequence_length, causal=causal)
    if recompute != "full":
        return once
    layers = (once - 6.0 * config.hidden_size * config.vocab_size) / 3
    return once + layers * (recomputed_layers or config.num_layers) / config.num_layers


def core_flops(config: ModelConfig, *, causal: bool) -> float:
    """The attention core's training FLOPs for one token and one position of the sequence, all layers."""
    mla = config.mla
    width: float = config.q_size
    if mla.enabled:
        width = config.num_attention_heads * (mla.qk_head_dim + mla.v_head_dim) / 2
    return config.num_layers * width * (6 if causal else 12)


def checkpoint_bytes(config: ModelConfig, *, dtype: str = "bf16", moments: tuple[str, str] = ("fp32", "fp32")) -> int:
    """Bytes of a checkpoint: master and two moments for each parameter (fp32, or fp64 for fp64 runs).

    `moments`: how they are kept; narrow ones are saved as bf16.
    """
    wide = 8 if dtype == "fp64" else 4
    return (wide + sum(wide if kept == "fp32" else 2 for kept in moments)) * num_parameters(config)
