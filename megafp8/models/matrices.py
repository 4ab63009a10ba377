"""Which linear maps lie in one parameter: several share a GEMM, and an optimizer of matrices must not mix them."""

from __future__ import annotations

from megafp8.models.config import ModelConfig


def row_parts(config: ModelConfig, name: str) -> tuple[int, ...]:
    """Heights of the maps stacked along the rows of parameter `name`, repeated to its end; empty: it is one map.

    qkv holds, for each key/value head, its query heads, the key and the value; latent attention's kv_up, for each head,
    the key's part without position and the value; its kv_down the latent and the key's rotated part.
    """
    if name.endswith(".attention.qkv.weight"):
        queries = config.num_attention_heads // config.num_kv_heads
        return queries * config.head_dim, config.head_dim, config.head_dim
    if name.endswith(".attention.kv_up.weight"):
        return config.mla.qk_nope_head_dim, config.mla.v_head_dim
    if name.endswith(".attention.kv_down.weight"):
        return config.mla.kv_lora_rank, config.mla.qk_rope_head_dim
    return ()
