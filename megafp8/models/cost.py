"""What a model costs, as arithmetic: parameters, FLOPs, bytes. No torch; the formulas are checked against the model.

FLOPs count a multiply-add as 2 and the backward pass as twice the forward pass; embedding lookups, norms, softmax
and the optimizer are never counted. Attention comes in two conventions, and both are always shown: `causal` halves
it for the mask (Megatron since 2025-03), full does not (Megatron before, PaLM, most others).
"""

from __future__ import annotations

from dataclasses import dataclass

from megafp8.models.config import ModelConfig, expert_shapes, gemm_shapes

_BYTES = {"bf16": 2, "fp32": 4, "fp64": 8}


def num_parameters(config: ModelConfig) -> int:
    """Elements of all parameters; a tied output layer counts once. The experts' balance bias is not one of them."""
    linears = _elements(gemm_shapes(config)) + config.moe.num_experts * _elements(expert_shapes(config))
    positions = config.max_sequence_length * config.hidden_size * (config.position == "learned")
    return linears + routers(config) + _small_parameters(config) + _embeddings(config) + positions


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


def _small_parameters(config: ModelConfig) -> int:
    """Norms and biases."""
    hidden, layers = config.hidden_size, config.num_layers
    norm = hidden * (2 if config.norm == "layernorm" else 1)
    total = (2 * layers + 1) * norm
    if config.mla.enabled:
        return total + layers * (config.mla.q_lora_rank + config.mla.kv_lora_rank)
    total += layers * (2 * config.head_dim * config.qk_norm + (config.qkv_size + hidden) * config.attention_bias)
    return total + layers * (config.num_mlp_inputs * config.ffn_hidden_size + hidden) * config.mlp_bias


def flops_per_token(config: ModelConfig, sequence_length: int, *, causal: bool) -> float:
    """Training FLOPs for one token, forward and backward, without recomputation.

    Of the experts a token's own count (top_k and the shared ones), and the router. Capacity and drops do not show.
    """
    linears = _elements(gemm_shapes(config)) + routers(config)
    if config.moe.num_experts:
        linears += config.moe.top_k * _elements(expert_shapes(config))
    return 6.0 * (linears + config.hidden_size * config.vocab_size) + _core_flops(config, causal) * sequence_length


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


def _core_flops(config: ModelConfig, causal: bool) -> float:
    """The attention core's training FLOPs for one token and one position of the sequence, all layers."""
    mla = config.mla
    width: float = config.q_size
    if mla.enabled:
        width = config.num_attention_heads * (mla.qk_head_dim + mla.v_head_dim) / 2
    return config.num_layers * width * (6 if causal else 12)


@dataclass(frozen=True)
class MemoryBytes:
    """Bytes on the fullest rank, by part."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    logits: int

    @property
    def total(self) -> int:
        """All parts together."""
        return self.parameters + self.gradients + self.optimizer + self.activations + self.logits


def memory_bytes(
    config: ModelConfig,
    *,
    micro_batch: int,
    sequence_length: int,
    tp: int = 1,
    sequence_parallel: bool = True,
    dtype: str = "bf16",
    fp8: bool = False,
    recompute: str = "none",
) -> MemoryBytes:
    """Bytes on one rank for a training step; what the allocator and the libraries hold comes on top.

    Source: the model states of Megatron's distributed-optimizer page (compute copy, fp32 main gradient, fp32 master
    and two moments); activations after Korthikanti et al. 2022, derived again for this layer: see
    `activation_bytes`.
    """
    size, wide = _BYTES[dtype], max(4, _BYTES[dtype])
    local = _local_parameters(config, tp)
    weights = local * size
    if fp8:  # row-wise and column-wise bytes of each linear's weight, cached for the step
        weights += 2 * sum(i * o for i, o, _ in gemm_shapes(config).values()) // tp
    tokens = micro_batch * sequence_length
    activations = config.num_layers * activation_bytes(
        config, tokens=tokens, tp=tp, sequence_parallel=sequence_parallel, size=size, recompute=recompute
    )
    if recompute == "full":  # one layer at a time lives whole while it is recomputed
        activations += activation_bytes(
            config, tokens=tokens, tp=tp, sequence_parallel=sequence_parallel, size=size, recompute="none"
        )
    return MemoryBytes(
        parameters=weights,
        gradients=local * wide,
        optimizer=local * 3 * wide,
        activations=activations,
        logits=logits_bytes(config, tokens=tokens, tp=tp, size=size),
    )


def activation_bytes(
    config: ModelConfig, *, tokens: int, tp: int, sequence_parallel: bool, size: int, recompute: str
) -> int:
    """Bytes that one layer keeps for its backward pass on one rank.

    Kept: two norm inputs and the two linears' inputs behind them (4h), q, k, v, the attention's output, gate and up
    or the GELU's input, and the down linear's input. Selective drops the norms' outputs and the activation's output,
    which are recomputed from what is kept; full keeps the layer's two inputs.
    """
    hidden, ffn = config.hidden_size, config.ffn_hidden_size
    stream = tp if sequence_parallel else 1  # residual stream and norms
    if recompute == "full":
        return tokens * 2 * hidden * size // stream
    kv_size = max(config.num_kv_heads, tp) * config.head_dim  # ranks that share a kv head hold its k and v each
    inner = 2 * config.q_size + 2 * kv_size + config.num_mlp_inputs * ffn
    kept = 2 * hidden / stream + inner / tp
    if recompute == "none":
        kept += 2 * hidden / stream + ffn / tp  # the linears' inputs: of a gathered one the shard is kept
    if config.qk_norm:
        kept += (config.q_size + kv_size) / tp
    return int(tokens * kept * size)


LOGITS_CHUNK = 1 << 24  # elements of a chunk of logits: the loss never holds more, see nn/loss


def logits_bytes(config: ModelConfig, *, tokens: int, tp: int, size: int) -> int:
    """Bytes of the loss: one chunk of logits, the gradient of its input, and that of the output weight."""
    vocab = config.vocab_size // tp
    chunk = min(tokens * vocab, max(LOGITS_CHUNK, vocab))
    wide = max(4, size)
    return chunk * (size + wide) + tokens * config.hidden_size * size + vocab * config.hidden_size * wide


def _local_parameters(config: ModelConfig, tp: int) -> int:
    split = sum(inputs * outputs for inputs, outputs, _ in gemm_shapes(config).values())
    split += config.vocab_size * config.hidden_size * (1 if config.tied_embeddings else 2)
    return split // tp + num_parameters(config) - split


def checkpoint_bytes(config: ModelConfig, *, dtype: str = "bf16") -> int:
    """Bytes of a checkpoint: master and two moments for each parameter (fp32, or fp64 for fp64 runs)."""
    return 3 * max(4, _BYTES[dtype]) * num_parameters(config)
