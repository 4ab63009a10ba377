"""TELayers: the LayerSet that computes with Transformer Engine, over its public classes only.

The model's modules, parameter names, shapes and Layouts are those of OwnLayers; what is inside a linear, a norm, an
attention core or the experts is Transformer Engine's. Embedding, router, rotation of heads, dropout and the collectives
of experts stay our own. Needs an NVIDIA GPU; which arguments exist and what the modules hold is checked without one
(tests/contract), what they compute is checked by tests/gpu.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from math import prod
from typing import Any

import torch
from torch import nn

from megafp8.core.errors import ConfigError
from megafp8.core.log import event, get_logger
from megafp8.fp8.recipe import Recipe
from megafp8.nn.attention import Attention
from megafp8.nn.context import Context
from megafp8.nn.dropout import DropoutKey
from megafp8.nn.layers import ModelShape, OwnLayers
from megafp8.nn.linear import enter
from megafp8.nn.loss import IGNORED, Output, refuse_unknown
from megafp8.nn.mla import LATENT_EPS, LatentAttention
from megafp8.nn.moe import Experts
from megafp8.nn.norm import RMSNorm
from megafp8.nn.te_attention import EngineCore, packed
from megafp8.nn.te_config import TEConfig
from megafp8.nn.te_experts import EngineExperts, EngineMoE
from megafp8.nn.te_graphs import capture
from megafp8.nn.te_library import gpu_problem, hardware_problem, library, library_recipe
from megafp8.nn.te_maker import Maker, amax_group
from megafp8.nn.te_modules import (
    EngineColumn,
    EngineLayerNorm,
    EngineMLP,
    EngineReplicated,
    EngineRMSNorm,
    EngineRow,
    plain,
)
from megafp8.nn.te_state import kept
from megafp8.parallel.mesh import Mesh

Tensor = torch.Tensor
_logger = get_logger(__name__)


class EngineOutput(Output):
    """The output layer; its loss by Transformer Engine's fused cross entropy if `use` was called."""

    engine: Any = None

    def use(self, te: Any) -> None:
        """Compute the loss with `te`."""
        self.engine = te

    def loss(self, x: Any, targets: Tensor, scale: float | None) -> Tensor:
        """As of Output; holds all logits of the micro-batch, each rank its part of the vocabulary."""
        if self.engine is None:
            return super().loss(plain(x), targets, scale)
        refuse_unknown(targets, self.vocab_size)
        logits = enter(plain(x), self.mesh) @ self._matrix().t()
        losses: Tensor = self.engine.parallel_cross_entropy(
            logits,
            targets.t().contiguous(),
            dist_process_group=self.mesh.group("tp"),
            ignore_idx=IGNORED,
            overwrite_input=True,
        )
        return losses.sum()

    def forward(self, x: Any, targets: Tensor | None = None, scale: float | None = None) -> Tensor:
        """As of Output."""
        return super().forward(plain(x), targets, scale)


class TELayers(OwnLayers):
    """The layers by Transformer Engine, on a mesh; `maker` says how."""

    moe_kind = EngineMoE

    def __init__(self, shape: ModelShape, *, maker: Maker, mesh: Mesh, dtype: torch.dtype, compiled: bool) -> None:
        super().__init__(shape, mesh=mesh, dtype=dtype, states={}, compiled=compiled)
        self.maker = maker
        self.states = maker.states  # type: ignore[assignment]
        self._front: nn.Module | None = None  # the norm that was made last: it stands before what is made next

    @contextmanager
    def surround(self) -> Iterator[None]:
        """Autocast; in evaluation, running amaxes are put back afterwards."""
        put_back = None if torch.is_grad_enabled() else kept(list(self.maker.states.values()))
        with self.maker.autocast():
            yield
        if put_back is not None:
            put_back()

    def checkpoint(self, function: Callable[..., Any], *args: Any) -> Any:
        """Transformer Engine's checkpoint: the second forward pass quantizes with the scales of the first."""
        # partial: a module of ours shows none of Transformer Engine's, and would be taken for one without
        return self.maker.te.checkpoint(partial(function), *args, use_reentrant=False)

    def ready(self, batch: int, sequence: int) -> None:
        """Capture CUDA graphs, if the options say so, for micro-batches of this size."""
        if self.maker.options.cuda_graphs:
            capture(self.maker, self.hidden_shape(batch, sequence))

    def context(
        self,
        tokens: Tensor,
        segment_ids: Tensor | None,
        positions: Tensor | None,
        dropout: DropoutKey | None,
        num_sequences: int = 0,
    ) -> Context:
        """As of OwnLayers, with documents in the form that Transformer Engine wants."""
        return packed(super().context(tokens, segment_ids, positions, dropout, num_sequences))

    def norm(self) -> nn.Module:
        """A norm whose result the linear behind it computes."""
        s = self.shape
        kind = EngineRMSNorm if s.norm == "rmsnorm" else EngineLayerNorm
        made = kind(s.hidden_size, eps=s.norm_eps, mesh=self.mesh, dtype=self.dtype, kernels=self.kernels)
        made.use(self.maker.norm(s.hidden_size, s.norm_eps), lazy=True)
        self._front = made
        return made

    def attention(self, name: str) -> nn.Module:
        """As of OwnLayers, with Transformer Engine's core."""
        made = super().attention(name)
        s, mla, tp = self.shape, self.shape.mla, self.mesh.size("tp")
        heads = s.num_attention_heads // tp
        if isinstance(made, LatentAttention):
            groups, dims = heads, (mla.qk_head_dim, mla.v_head_dim)
        else:
            assert isinstance(made, Attention)
            groups, dims = made.num_groups, (s.head_dim, s.head_dim)
        core = EngineCore(self.maker, name, dropout=s.attention_dropout, heads=heads, groups=groups, dims=dims)
        if core.reason and name.startswith("layers.0."):
            event(_logger, "attention", core="own", instead_of="te", reason=core.reason)
        made.core = core
        return made

    def mlp(self, name: str) -> nn.Module:
        """LayerNormMLP, where both GEMMs are in one precision; else LayerNormLinear, our activation and Linear."""
        s, maker = self.shape, self.maker
        gated = s.activation == "swiglu"
        first = "gate_up" if gated else "up"
        names = (f"{name}.{first}", f"{name}.down")
        if not maker.options.layernorm_mlp or maker.quantizes(names[0]) != maker.quantizes(names[1]):
            return super().mlp(name)
        parts = (2, s.ffn_hidden_size) if gated else (s.ffn_hidden_size,)
        part = maker.layernorm_mlp(
            name, s.hidden_size, s.ffn_hidden_size, names=names, activation=s.activation, bias=s.mlp_bias
        )
        part.norm = self._front
        return EngineMLP(
            (first, super()._column(names[0], parts, bias=s.mlp_bias)),
            super()._row(names[1], s.ffn_hidden_size, bias=s.mlp_bias),
            part,
            quantized=self._holds_quantized(names[0]),
        )

    def output(self, tied: nn.Module | None) -> nn.Module:
        """As of OwnLayers, with the fused cross entropy if the options say so."""
        s = self.shape
        made = EngineOutput(
            s.vocab_size,
            s.hidden_size,
            tied=tied,
            std=s.init_std,
            mesh=self.mesh,
            dtype=self.dtype,
            kernels=self.kernels,
        )
        if self.maker.options.cross_entropy:
            made.use(self.maker.te)
        return made

    def _state(self, name: str) -> None:
        """Transformer Engine's modules hold the state."""

    def _holds_quantized(self, name: str) -> bool:
        return self.maker.options.quantized_model_init and self.maker.quantizes(name)

    def _column(
        self,
        name: str,
        parts: tuple[int, ...],
        *,
        bias: bool = False,
        inputs: int = 0,
        rows: tuple[slice, ...] | None = None,
    ) -> EngineColumn:
        # what reads a norm directly; shared experts read the tokens that the router reads too
        normed = not inputs and ".shared." not in name
        made = EngineColumn(
            inputs or self.shape.hidden_size,
            parts,
            bias=bias,
            std=self.shape.init_std,
            state=None,
            mesh=self.mesh,
            dtype=self.dtype,
            rows=rows,
        )
        outputs = prod(parts)
        if rows is not None:  # of the rows that this rank has: Transformer Engine divides by tp again
            outputs = sum(part.stop - part.start for part in rows) * self.mesh.size("tp")
        part = self.maker.linear(name, made.weight.shape[-1], outputs, "column", bias=bias, normed=normed)
        part.norm = self._front if normed else None
        made.use(part, normed=normed, quantized=self._holds_quantized(name) and rows is None)
        return made

    def _row(self, name: str, in_features: int, *, bias: bool = False) -> EngineRow:
        hidden = self.shape.hidden_size
        made = EngineRow(
            in_features, hidden, bias=bias, std=self.added_std, state=None, mesh=self.mesh, dtype=self.dtype
        )
        made.use(self.maker.linear(name, in_features, hidden, "row", bias=bias), quantized=self._holds_quantized(name))
        return made

    def _replicated(self, name: str, outputs: int) -> EngineReplicated:
        hidden = self.shape.hidden_size
        made = EngineReplicated(hidden, outputs, std=self.shape.init_std, state=None, mesh=self.mesh, dtype=self.dtype)
        made.use(self.maker.linear(name, hidden, outputs, None, bias=False), quantized=self._holds_quantized(name))
        return made

    def _latent_norm(self, size: int) -> RMSNorm:
        made = EngineRMSNorm(size, eps=LATENT_EPS, mesh=self.mesh, dtype=self.dtype, kernels=self.kernels)
        made.use(self.maker.rms_norm(size, LATENT_EPS), lazy=False)
        return made

    def _experts(self, name: str) -> Experts:
        s, moe = self.shape, self.shape.moe
        made = EngineExperts(
            moe.num_experts,
            s.hidden_size,
            moe.ffn_hidden_size,
            std=s.init_std,
            down_std=self.added_std,
            mesh=self.mesh,
            dtype=self.dtype,
            kernels=self.kernels,
        )
        made.use(self.maker, f"{name}.experts")
        return made


def maker_for(
    shape: ModelShape,
    *,
    options: TEConfig,
    mesh: Mesh,
    dtype: torch.dtype,
    plan: Mapping[str, str],
    recipes: Mapping[str, Recipe],
    amax_axes: tuple[str, ...],
    delays: bool,
    tokens: int,
    device: torch.device | str,
) -> Maker:
    """How Transformer Engine's modules of this model are made; loads the library.

    Args:
        plan: `{linear: recipe or "none"}`; recipes: ours, by name.
        delays: the pipeline's schedule computes weight gradients apart.
        tokens: of a micro-batch, for user buffers; 0 where there are none.

    Raises:
        ConfigError: Transformer Engine is missing, too old or does not load, or this device cannot run the recipe.
    """
    te = library()
    used = sorted({name for name in plan.values() if name != "none"})
    recipe = recipes[used[0]] if used else None
    problem = gpu_problem(device) or (hardware_problem(te, recipe) if recipe is not None else None)
    if problem:
        raise ConfigError(problem)
    maker = Maker(
        te,
        options,
        mesh,
        dtype,
        "RMSNorm" if shape.norm == "rmsnorm" else "LayerNorm",
        shape.norm_eps,
        plan,
        recipe,
        None if recipe is None else library_recipe(recipe),
        None if recipe is None else amax_group(mesh, amax_axes),
        delays,
    )
    maker.start_buffers(tokens, shape.hidden_size)
    name = used[0] if used else "none"
    event(_logger, "layers", by="te", version=version("transformer-engine"), recipe=name)
    return maker
