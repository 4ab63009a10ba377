"""LayerSet: what a model may ask for. `OwnLayers` answers with the layers of this folder.

Another set (vendor kernels) gives parameters the same names, shapes and Layouts: names belong to the model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import nn

from megafp8.fp8.linear import LinearState
from megafp8.nn.attention import Attention
from megafp8.nn.context import Context
from megafp8.nn.dropout import DropoutKey, hidden_dropout
from megafp8.nn.embedding import Embedding, PositionEmbedding
from megafp8.nn.kernels import Kernels
from megafp8.nn.linear import ColumnLinear, RowLinear
from megafp8.nn.loss import Output
from megafp8.nn.mla import KERNELS as LATENT_KERNELS
from megafp8.nn.mla import LATENT_EPS, LatentAttention, ReplicatedLinear
from megafp8.nn.mlp import GELU, SwiGLU
from megafp8.nn.moe import Experts, MoE
from megafp8.nn.norm import LayerNorm, RMSNorm
from megafp8.nn.recompute import checkpointed
from megafp8.nn.rope import Rotary, yarn_mscale
from megafp8.nn.router import Router
from megafp8.parallel.context import local_places
from megafp8.parallel.mesh import Mesh

__all__ = ["Context", "Dropout", "DropoutKey", "LayerSet", "ModelShape", "OwnLayers"]

Tensor = torch.Tensor


class ModelShape(Protocol):
    """What layers read of a model's configuration."""

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_sequence_length: int
    norm: Any
    norm_eps: float
    activation: Any
    position: Any
    rope_theta: float
    rope_scaling: Any
    qk_norm: bool
    mla: Any
    attention_bias: bool
    qkv_bias: bool
    mlp_bias: bool
    tied_embeddings: bool
    hidden_dropout: float
    attention_dropout: float
    init_std: float
    moe: Any


class LayerSet(Protocol):
    """Makes the layers of one model; hidden tensors are [S, B, H]. `name` is the module's global name.

    The modules' calls: embedding(tokens) -> x; position_embedding(x, positions) -> x; norm(x, branch) -> (x + branch,
    its norm y), norm.again(x) -> the norm; attention and mlp(y, context, rebuild) -> branch;
    dropout(x, context) -> x; output(y) -> logits, output.loss(y, targets, scale) -> summed loss. What y is, a tensor or
    a norm that the next layer computes with its GEMM, is the set's own affair.

    surround() is entered around each forward pass of a stage; checkpoint(function, *args) is function(*args) of which
    only the inputs are kept; ready(batch, sequence) is told once, before training, what a micro-batch will be.
    """

    states: dict[str, LinearState]

    def embedding(self) -> nn.Module: ...

    def position_embedding(self) -> nn.Module | None: ...

    def norm(self) -> Any: ...

    def attention(self, name: str) -> nn.Module: ...

    def mlp(self, name: str) -> nn.Module: ...

    def moe(self, name: str) -> nn.Module: ...

    def dropout(self, name: str) -> nn.Module: ...

    def output(self, tied: nn.Module | None) -> Any: ...

    def context(
        self, tokens: Tensor, segment_ids: Any, positions: Any, dropout: DropoutKey | None, num_sequences: int = 0
    ) -> Context: ...

    def local(self, tokens: Tensor, targets: Any, positions: Any, context: Context) -> tuple[Tensor, Any, Any]: ...

    def hidden_shape(self, batch: int, sequence: int) -> tuple[int, ...]: ...

    def surround(self) -> AbstractContextManager[Any]: ...

    def checkpoint(self, function: Callable[..., Any], *args: Any) -> Any: ...

    def ready(self, batch: int, sequence: int) -> None: ...


class Dropout(nn.Module):
    """x [S, B, H] with elements dropped by place; as it is if the rate is 0 or the context has no key."""

    def __init__(self, rate: float, name: str, mesh: Mesh) -> None:
        super().__init__()
        self.rate, self.name, self.mesh = rate, name, mesh

    def forward(self, x: Tensor, context: Context) -> Tensor:
        if self.rate == 0 or context.dropout is None:
            return x
        return hidden_dropout(x, self.rate, context.dropout, self.name, mesh=self.mesh, places=context.places)


class OwnLayers:
    """The layers of this folder, on a mesh, with the FP8 states given for some of the linears.

    `smooth`: Smooth-SwiGLU where the linear behind it is in FP8.
    """

    moe_kind: type[MoE] = MoE

    def __init__(
        self,
        shape: ModelShape,
        *,
        mesh: Mesh,
        dtype: torch.dtype,
        states: Mapping[str, LinearState],
        compiled: bool,
        smooth: bool = False,
    ) -> None:
        self.smooth = smooth
        self.shape, self.mesh, self.dtype = shape, mesh, dtype
        self.states = dict(states)
        self.kernels = Kernels(compiled=compiled, more=LATENT_KERNELS)
        rotated = shape.mla.qk_rope_head_dim if shape.mla.enabled else shape.head_dim
        self.rotary = Rotary(rotated, shape.rope_theta, shape.max_sequence_length, shape.rope_scaling)
        # Megatron's and GPT-2's rule: what is added to the residual stream shrinks with the number of additions
        self.added_std = shape.init_std / (2 * shape.num_layers) ** 0.5

    def context(
        self,
        tokens: Tensor,
        segment_ids: Tensor | None,
        positions: Tensor | None,
        dropout: DropoutKey | None,
        num_sequences: int = 0,
    ) -> Context:
        """What the layers share for the whole sequences `tokens` [B, S], with `segment_ids` and `positions` [B, S]."""
        cos = sin = None
        places = local_places(tokens.shape[1], self.mesh, tokens.device)
        if self.shape.position == "rope":
            cos, sin = self.rotary.tables(tokens.shape[1], positions, tokens.device, self.dtype, places)
        return Context(cos, sin, segment_ids, dropout, num_sequences, places)

    def local(
        self, tokens: Tensor, targets: Tensor | None, positions: Tensor | None, context: Context
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """This rank's part of tokens, targets and positions (which it makes, [1, S/cp], if none are given)."""
        if context.places is None:
            return tokens, targets, positions
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
        tokens, positions = (x.index_select(1, context.places) for x in (tokens, positions))
        return tokens, None if targets is None else targets.index_select(1, context.places), positions

    def hidden_shape(self, batch: int, sequence: int) -> tuple[int, ...]:
        """Shape of this rank's hidden states for `batch` whole sequences."""
        shards = self.mesh.size("cp") * (self.mesh.size("tp") if self.mesh.sequence_parallel else 1)
        return sequence // shards, batch, self.shape.hidden_size

    def surround(self) -> AbstractContextManager[Any]:
        """Nothing surrounds these layers."""
        return nullcontext()

    def checkpoint(self, function: Callable[..., Any], *args: Any) -> Any:
        """`function(*args)`, of which only the inputs are kept."""
        return checkpointed(function, *args)

    def ready(self, batch: int, sequence: int) -> None:
        """These layers take what comes."""

    def embedding(self) -> nn.Module:
        s = self.shape
        return Embedding(
            s.vocab_size,
            s.hidden_size,
            std=s.init_std,
            tied=s.tied_embeddings,
            mesh=self.mesh,
            dtype=self.dtype,
        )

    def position_embedding(self) -> nn.Module | None:
        s = self.shape
        if s.position == "rope":
            return None
        return PositionEmbedding(s.max_sequence_length, s.hidden_size, std=s.init_std, mesh=self.mesh, dtype=self.dtype)

    def norm(self) -> nn.Module:
        kind = RMSNorm if self.shape.norm == "rmsnorm" else LayerNorm
        return kind(
            self.shape.hidden_size, eps=self.shape.norm_eps, mesh=self.mesh, dtype=self.dtype, kernels=self.kernels
        )

    def attention(self, name: str) -> nn.Module:
        if self.shape.mla.enabled:
            return self._latent_attention(name)
        s = self.shape
        q_size = s.num_attention_heads * s.head_dim
        rows = self._shared_kv_rows()
        biased = s.attention_bias or s.qkv_bias
        return Attention(
            self._column(f"{name}.qkv", (q_size + 2 * s.num_kv_heads * s.head_dim,), bias=biased, rows=rows),
            self._row(f"{name}.out", q_size, bias=s.attention_bias),
            name=name,
            num_groups=max(1, s.num_kv_heads // self.mesh.size("tp")),
            head_dim=s.head_dim,
            head_norm_eps=s.norm_eps if s.qk_norm else None,
            dropout=s.attention_dropout,
            mesh=self.mesh,
            dtype=self.dtype,
            kernels=self.kernels,
        )

    def _shared_kv_rows(self) -> tuple[slice, ...] | None:
        """Where a group of query heads with its k and v lies on several ranks: this rank's heads, and k and v."""
        s, mesh = self.shape, self.mesh
        assert mesh.size("kvtp") == min(s.num_kv_heads, mesh.size("tp")), "build_mesh wants the model's kv_heads"
        if mesh.size("kvrep") == 1:
            return None
        in_group = s.num_attention_heads // s.num_kv_heads * s.head_dim
        mine = in_group // mesh.size("kvrep")
        first = mesh.coord("kvrep") * mine
        return slice(first, first + mine), slice(in_group, in_group + 2 * s.head_dim)

    def _latent_attention(self, name: str) -> nn.Module:
        s, mla, heads = self.shape, self.shape.mla, self.shape.num_attention_heads
        q_rank, kv_rank, scaling = mla.q_lora_rank, mla.kv_lora_rank, s.rope_scaling
        query = f"{name}.q_up" if q_rank else f"{name}.q"
        sharper = yarn_mscale(scaling.factor, scaling.mscale_all_dim) if scaling.mscale_all_dim else 1.0
        return LatentAttention(
            q_down=self._replicated(f"{name}.q_down", q_rank) if q_rank else None,
            q_norm=self._latent_norm(q_rank) if q_rank else None,
            q_up=self._column(query, (heads * mla.qk_head_dim,), inputs=q_rank or s.hidden_size),
            kv_down=self._replicated(f"{name}.kv_down", kv_rank + mla.qk_rope_head_dim),
            kv_norm=self._latent_norm(kv_rank),
            kv_up=self._column(f"{name}.kv_up", (heads * (mla.qk_nope_head_dim + mla.v_head_dim),), inputs=kv_rank),
            out=self._row(f"{name}.out", heads * mla.v_head_dim),
            name=name,
            num_heads=heads // self.mesh.size("tp"),
            rope_dim=mla.qk_rope_head_dim,
            scale=mla.qk_head_dim**-0.5 * sharper**2,  # as DeepSeek's own code: yarn's factor on q and k both
            interleaved=mla.rope_interleave,
            dropout=s.attention_dropout,
            mesh=self.mesh,
            kernels=self.kernels,
        )

    def mlp(self, name: str) -> nn.Module:
        s = self.shape
        if s.activation == "swiglu":
            return self._gated(name, s.ffn_hidden_size, bias=s.mlp_bias)
        up = self._column(f"{name}.up", (s.ffn_hidden_size,), bias=s.mlp_bias)
        return GELU(up, self._row(f"{name}.down", s.ffn_hidden_size, bias=s.mlp_bias), kernels=self.kernels)

    def moe(self, name: str) -> nn.Module:
        s, moe = self.shape, self.shape.moe
        router = Router(s.hidden_size, moe, std=s.init_std, mesh=self.mesh, dtype=self.dtype)
        width = moe.shared_ffn_hidden_size
        shared = self._gated(f"{name}.shared", width, bias=False) if width else None
        return self.moe_kind(router, self._experts(name), shared, mesh=self.mesh)

    def _experts(self, name: str) -> Experts:
        s, moe = self.shape, self.shape.moe
        return Experts(
            moe.num_experts,
            s.hidden_size,
            moe.ffn_hidden_size,
            std=s.init_std,
            down_std=self.added_std,
            mesh=self.mesh,
            dtype=self.dtype,
            kernels=self.kernels,
            states=(self._state(f"{name}.experts.gate_up"), self._state(f"{name}.experts.down")),
            smooth=self.smooth and f"{name}.experts.down" in self.states,
        )

    def _state(self, name: str) -> LinearState | None:
        return self.states.get(name)

    def _gated(self, name: str, ffn_hidden_size: int, *, bias: bool) -> SwiGLU:
        gate_up = self._column(f"{name}.gate_up", (2, ffn_hidden_size), bias=bias)
        down = self._row(f"{name}.down", ffn_hidden_size, bias=bias)
        return SwiGLU(gate_up, down, kernels=self.kernels, smooth=self.smooth and f"{name}.down" in self.states)

    def dropout(self, name: str) -> nn.Module:
        return Dropout(self.shape.hidden_dropout, name, self.mesh)

    def output(self, tied: nn.Module | None) -> nn.Module:
        s = self.shape
        return Output(
            s.vocab_size,
            s.hidden_size,
            tied=tied,
            std=s.init_std,
            mesh=self.mesh,
            dtype=self.dtype,
            kernels=self.kernels,
        )

    def _latent_norm(self, size: int) -> RMSNorm:
        return RMSNorm(size, eps=LATENT_EPS, mesh=self.mesh, dtype=self.dtype, kernels=self.kernels)

    def _replicated(self, name: str, outputs: int) -> ReplicatedLinear:
        return ReplicatedLinear(
            self.shape.hidden_size,
            outputs,
            std=self.shape.init_std,
            state=self._state(name),
            mesh=self.mesh,
            dtype=self.dtype,
        )

    def _column(
        self,
        name: str,
        parts: tuple[int, ...],
        *,
        bias: bool = False,
        inputs: int = 0,
        rows: tuple[slice, ...] | None = None,
    ) -> ColumnLinear:
        return ColumnLinear(
            inputs or self.shape.hidden_size,
            parts,
            bias=bias,
            std=self.shape.init_std,
            state=self._state(name),
            mesh=self.mesh,
            dtype=self.dtype,
            rows=rows,
        )

    def _row(self, name: str, in_features: int, *, bias: bool = False) -> RowLinear:
        return RowLinear(
            in_features,
            self.shape.hidden_size,
            bias=bias,
            std=self.added_std,
            state=self._state(name),
            mesh=self.mesh,
            dtype=self.dtype,
        )
