"""What a model costs, as arithmetic: parameters, FLOPs, bytes. No torch; the formulas are checked against the model.

FLOPs count a multiply-add as 2 and the backward pass as twice the forward pass; embedding lookups, norms, softmax
and the optimizer are never counted. Attention comes in two conventions, and both are always shown: `causal` halves
it for the mask (Megatron since 2025-03), full does not (Megatron before, PaLM, most others).
"""

from __future__ import annotations

from dataclasses import dataclass

from megafp8.models.config import ModelConfig, gemm_shapes

_BYTES = {"bf16": 2, "fp32": 4, "fp64": 8}


def num_parameters(config: ModelConfig) -> int:
    """Elements of all parameters; a tied output layer counts once."""
    hidden, ffn = config.hidden_size, config.ffn_hidden_size
    norm = hidden * (2 if config.norm == "layernorm" else 1)
    layer = {n: i * o for n, (i, o, _) in gemm_shapes(config).items() if n.startswith("layers.0.attention.")}
    attention = sum(layer.values()) + 2 * config.head_dim * config.qk_norm
    if config.mla.enabled:
        attention += config.mla.q_lora_rank + config.mla.kv_lora_rank  # the latents' norms
    else:
        attention += (config.qkv_size + hidden) * config.attention_bias
    mlp = (config.num_mlp_inputs + 1) * hidden * ffn
    mlp += (config.num_mlp_inputs * ffn + hidden) * config.mlp_bias
    embeddings = config.vocab_size * hidden * (1 if config.tied_embeddings else 2)
    positions = config.max_sequence_length * hidden * (config.position == "learned")
    return config.num_layers * (attention + mlp + 2 * norm) + norm + embeddings + positions


def flops_per_token(config: ModelConfig, sequence_length: int, *, causal: bool) -> float:
    """Training FLOPs for one token, forward and backward, without recomputation."""
    linears = sum(inputs * outputs for inputs, outputs, _ in gemm_shapes(config).values())
    keys, values = config.q_size, config.num_attention_heads * config.mla.v_head_dim
    width = (keys + values) / 2 if config.mla.enabled else keys
    attention = config.num_layers * width * sequence_length * (6 if causal else 12)
    return 6.0 * (linears + config.hidden_size * config.vocab_size) + attention


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
    inner = config.qkv_size + config.q_size + config.num_mlp_inputs * ffn
    kept = 2 * hidden / stream + inner / tp
    if recompute == "none":
        kept += 2 * hidden + ffn / tp  # the linears' inputs are whole sequences, gathered
    if config.qk_norm:
        kept += (config.q_size + config.num_kv_heads * config.head_dim) / tp
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
