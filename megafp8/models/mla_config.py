"""The multi-head latent attention section of a model (DeepSeek-V2, arXiv:2405.04434, section 2.1). No torch."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from megafp8.core.config import config_dataclass


@config_dataclass
class MLAConfig:
    """Queries, keys and values made from low-rank latents; kv_lora_rank 0 is ordinary attention."""

    kv_lora_rank: Annotated[int, Field(ge=0, description="width of the latent of keys and values; 0 = no MLA")] = 0
    q_lora_rank: Annotated[int, Field(ge=0, description="width of the queries' latent; 0 = queries from hidden")] = 0
    qk_nope_head_dim: Annotated[int, Field(gt=0, description="of a query and key head, without positions")] = 128
    qk_rope_head_dim: Annotated[int, Field(gt=0, description="of a query head and of the shared key, rotated")] = 64
    v_head_dim: Annotated[int, Field(gt=0, description="of a value head")] = 128
    rope_interleave: Annotated[bool, Field(description="rotate neighbours (2j, 2j+1), not (j, j + d/2)")] = True

    def __post_init__(self) -> None:
        if self.qk_rope_head_dim % 2:
            raise ValueError(
                f"qk_rope_head_dim {self.qk_rope_head_dim} must be even; nearest: {self.qk_rope_head_dim + 1}"
            )
        if self.q_lora_rank and not self.kv_lora_rank:
            raise ValueError(f"q_lora_rank {self.q_lora_rank} needs kv_lora_rank; DeepSeek-V3: 1536 and 512")

    @property
    def enabled(self) -> bool:
        """Whether the model has latent attention."""
        return self.kv_lora_rank > 0

    @property
    def qk_head_dim(self) -> int:
        """Width of a query or key head."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim
