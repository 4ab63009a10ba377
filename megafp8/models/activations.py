"""Bytes that a layer keeps for its backward pass, in closed form. No torch; held against measurements by tests.

Korthikanti et al. 2022, section 4, derived again for these layers: what is kept is what nn/ saves, tensor by tensor,
so GQA, SwiGLU, FP8, latent attention and experts come out right. h hidden, a heads, f ffn, t tokens of a micro-batch
on a cp rank; a tensor on the residual stream is a shard along S under sequence parallelism.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from megafp8.models.config import ModelConfig, quantizable_shapes
from megafp8.nn.precision import PrecisionConfig, plan_gemms
from megafp8.parallel.mesh_config import ParallelConfig, axis_sizes

BYTES = {"bf16": 2, "fp32": 4, "fp64": 8}
_INDEX = 8  # an int64


@dataclass(frozen=True)
class Workload:
    """What one rank of a run works on, as far as memory goes.

    Attributes:
        micro_batches: of a step, on one replica.
        world: ranks; 0 = those of one replica.
        recompute_layers, recompute_modules: as in the train section.
        moments: `exp_avg_dtype` and `exp_avg_sq_dtype` of the optimizer section.
        attention: the core's kernel, beside q, k and v. "fused" (torch's SDPA) keeps its output, which for several
            sequences is not the tensor that the linear behind it keeps, and the log-sum-exp; "merged" (our own: over
            cp, where weights are dropped, on a CPU for values of another width) both, the output once; "blocked"
            (16-bit floats on a CPU) nothing.
    """

    micro_batch: int
    sequence_length: int
    micro_batches: int = 1
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    world: int = 0
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    recompute: str = "none"
    recompute_layers: int = 0
    recompute_modules: tuple[str, ...] = ("norm", "activation")
    moments: tuple[str, str] = ("fp32", "fp32")
    attention: Literal["fused", "merged", "blocked"] = "fused"

    @property
    def size(self) -> int:
        """Bytes of an element of the compute dtype."""
        return BYTES[self.precision.dtype]

    @property
    def tokens(self) -> float:
        """Tokens of a micro-batch on a cp rank."""
        return self.micro_batch * self.sequence_length / self.parallel.cp

    @property
    def stream(self) -> int:
        """Ranks that share the residual stream's tokens."""
        return self.parallel.tp if self.parallel.sequence_parallel else 1

    def sizes(self, config: ModelConfig) -> dict[str, int]:
        """The mesh's axes, pseudo axes too."""
        p = self.parallel
        world = self.world or p.pp * p.cp * p.tp * max(1, p.dp)
        return axis_sizes(p, world, kv_heads=config.num_kv_heads, tied_embeddings=config.tied_embeddings)


def checkpoint_of_layer(config: ModelConfig, work: Workload) -> int:
    """Bytes kept of a layer that is recomputed in full: its input."""
    return int(work.tokens * config.hidden_size * work.size / work.stream)


def activation_bytes(config: ModelConfig, layer: int, work: Workload) -> int:
    """Bytes that decoder layer `layer` keeps of a micro-batch, if it is not recomputed in full."""
    return int(work.tokens * _Layer(config, layer, work).per_token())


@dataclass(frozen=True)
class _Layer:
    """The sums, in bytes for one token of a cp rank."""

    config: ModelConfig
    layer: int
    work: Workload

    @cached_property
    def quantized(self) -> dict[str, bool]:
        """Whether each linear of the layer is quantized, by its name within the layer."""
        prefix = f"layers.{self.layer}."
        names = [name for name in quantizable_shapes(self.config) if name.startswith(prefix)]
        plan, _ = plan_gemms(self.work.precision, names, self.config.num_layers)
        return {name.removeprefix(prefix): recipe != "none" for name, recipe in plan.items()}

    def again(self, module: str) -> bool:
        """Whether selective recomputation makes `module`'s outputs again."""
        return self.work.recompute == "selective" and module in self.work.recompute_modules

    def per_token(self) -> float:
        """All of the layer."""
        config, work = self.config, self.work
        moments = 4 * (2 if config.norm == "layernorm" else 1)
        streams = 2 * (config.hidden_size * work.size + moments)
        if config.hidden_dropout:
            streams += 2 * config.hidden_size  # masks
        attention = self._latent() if config.mla.enabled else self._attention()
        mlp = self._experts() if config.moe.is_moe_layer(self.layer) else self._mlp("mlp", config.ffn_hidden_size)
        return streams / work.stream + attention + mlp

    def _input(self, width: float, *linears: str, rebuilt: bool, also: bool = False) -> float:
        """The input of `linears`: codes for each in FP8, and the tensor itself if another wants it.

        `rebuilt`: it is made again, so only codes are kept. `also`: something that is never in FP8 wants it, too.
        """
        codes = sum(self.quantized[name] for name in linears)
        wanted = also or codes < len(linears)
        return width * (codes + (0 if rebuilt or not wanted else self.work.size))

    def _core(self, width: float, heads: float, values: float) -> float:
        """The core: q, k and v together `width`, its output of `values` (also `out`'s input), the log-sum-exp."""
        size = self.work.size
        kept = width * size
        if self.work.attention == "blocked" or self.again("core_attention"):
            return kept + self._input(values, "attention.out", rebuilt=False)
        # one tensor serves both if no transposition lies between
        shared = not self.quantized["attention.out"] and (self.work.attention == "merged" or self.work.micro_batch == 1)
        kept += values * size + heads * 4
        return kept if shared else kept + self._input(values, "attention.out", rebuilt=False)

    def _attention(self) -> float:
        config, tp = self.config, self.work.parallel.tp
        q = config.q_size / tp
        kv = max(config.num_kv_heads / tp, 1) * config.head_dim
        kept = self._input(config.hidden_size / self.work.stream, "attention.qkv", rebuilt=self.again("norm"))
        if config.qk_norm:
            kept += (q + 2 * kv) * self.work.size
        return kept + self._core(q + 2 * kv, config.num_attention_heads / tp, q)

    def _latent(self) -> float:
        config, mla, work = self.config, self.config.mla, self.work
        heads, stream, norm = config.num_attention_heads / work.parallel.tp, work.stream, self.again("norm")
        query = "q_down" if mla.q_lora_rank else "q"
        kept = self._input(config.hidden_size / stream, f"attention.{query}", "attention.kv_down", rebuilt=norm)
        for rank, extra, up in ((mla.q_lora_rank, 0, "q_up"), (mla.kv_lora_rank, mla.qk_rope_head_dim, "kv_up")):
            if rank:
                kept += ((rank + extra) * work.size + 4) / stream
                kept += self._input(rank / stream, f"attention.{up}", rebuilt=norm)
        width = heads * (2 * mla.qk_head_dim + mla.v_head_dim)
        return kept + self._core(width, heads, heads * mla.v_head_dim)

    def _mlp(self, name: str, ffn: int, *, also: bool = False) -> float:
        config, tp = self.config, self.work.parallel.tp
        first = f"{name}.{'gate_up' if config.activation == 'swiglu' else 'up'}"
        kept = self._input(config.hidden_size / self.work.stream, first, rebuilt=self.again("norm"), also=also)
        kept += config.num_mlp_inputs * ffn / tp * self.work.size
        return kept + self._input(ffn / tp, f"{name}.down", rebuilt=self.again("activation"))

    def _experts(self) -> float:
        """Rows go to experts evenly: `top_k` for each token, on each of the etp ranks that share an expert."""
        config, moe, work = self.config, self.config.moe, self.work
        tp, etp = work.parallel.tp, work.parallel.etp or work.parallel.tp
        ffn = moe.ffn_hidden_size / etp
        row = self._input(config.hidden_size, "mlp.experts.gate_up", rebuilt=False) + 2 * ffn * work.size
        row += self._input(ffn, "mlp.experts.down", rebuilt=self.again("activation"))
        rows = moe.top_k / tp * (row * etp + config.hidden_size * work.size)  # and what comes back
        # scores, and for the z-loss logits, in fp32; the choice, where its rows went and came from, and its weights
        router = (4 * moe.num_experts * (1 + (moe.z_loss_coeff > 0)) + moe.top_k * (3 * _INDEX + 2 * 4)) / tp
        if moe.num_shared_experts:
            return rows + router + self._mlp("mlp.shared", moe.shared_ffn_hidden_size, also=True)
        y = 0 if self.again("norm") else config.hidden_size * work.size
        return rows + router + y / work.stream
