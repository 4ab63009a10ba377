"""The model: a decoder of any family, written as for one device.

Layers come from a LayerSet, which alone knows about ranks and number formats. The residual stream `x` and the last
branch travel separately, so that adding and normalising are one pass. A decoder may be one stage of a pipeline: then
it holds a span of the layers, under the names that they have in the whole model.

Shapes: B micro-batch, S sequence, H hidden, V vocabulary; hidden tensors are [S, B, H].
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from megafp8.core.errors import ConfigError
from megafp8.models.config import ModelConfig
from megafp8.models.stages import Span, whole
from megafp8.nn.cache import KeyValueCache
from megafp8.nn.layers import Context, DropoutKey, LayerSet
from megafp8.nn.recompute import Recompute, plan_of, select

Tensor = torch.Tensor


class Layer(nn.Module):
    """One decoder layer: (x, branch) -> (x, branch), with x + branch as the residual stream."""

    def __init__(self, layers: LayerSet, name: str, selected: frozenset[str], *, experts: bool) -> None:
        super().__init__()
        self.norms_again = "norm" in selected
        self.attention_norm: Any = layers.norm()
        self.attention = layers.attention(f"{name}.attention")
        self.attention_dropout = layers.dropout(f"{name}.attention.dropout")
        self.mlp_norm: Any = layers.norm()
        self.mlp = (layers.moe if experts else layers.mlp)(f"{name}.mlp")
        self.mlp_dropout = layers.dropout(f"{name}.mlp.dropout")
        select(self, selected)

    def forward(self, x: Tensor, branch: Tensor | None, context: Context) -> tuple[Tensor, Tensor]:
        x, y = self.attention_norm(x, branch)
        rebuild = partial(self.attention_norm.again, x.detach()) if self.norms_again else None
        branch = self.attention_dropout(self.attention(y, context, rebuild), context)
        x, y = self.mlp_norm(x, branch)
        rebuild = partial(self.mlp_norm.again, x.detach()) if self.norms_again else None
        return x, self.mlp_dropout(self.mlp(y, context, rebuild), context)


class Layers(nn.Module):
    """The layers of a span under their numbers in the whole model: `layers[i]` is decoder layer i."""

    def __init__(self, numbered: dict[int, Layer]) -> None:
        super().__init__()
        for number, layer in numbered.items():
            self.add_module(str(number), layer)

    def __getitem__(self, number: int) -> nn.Module:
        return self.get_submodule(str(number))

    def __iter__(self) -> Iterator[nn.Module]:
        return self.children()

    def __len__(self) -> int:
        return len(self._modules)


class Decoder(nn.Module):
    """Tokens to loss or logits; a stage of a pipeline begins or ends with hidden states instead.

    Args:
        span: the part of the model that is held; None: all of it.
        embedding: for a last stage with tied weights whose rank holds the first stage too: that stage's embedding.
            Without it such a stage has a copy of the weight under the embedding's name, with the same values.

    Attributes:
        span: as above.
        fp8_states: the quantization state of each linear by module name; empty where nothing is quantized.
        has_dropout: whether training wants a DropoutKey.
        ready: of the LayerSet, to be told before training.
    """

    def __init__(
        self,
        config: ModelConfig,
        layers: LayerSet,
        *,
        recompute: Recompute = "none",
        span: Span | None = None,
        embedding: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.config, self.recompute = config, plan_of(recompute)
        self.span = span = span or whole(config)
        self.fp8_states = layers.states
        self.has_dropout = config.hidden_dropout > 0 or config.attention_dropout > 0
        self.hidden_shape = layers.hidden_shape
        self._context, self._local = layers.context, layers.local
        self._surround, self._checkpoint, self.ready = layers.surround, layers.checkpoint, layers.ready
        tied = span.last and config.tied_embeddings
        self.embedding: Any = layers.embedding() if span.first or (tied and embedding is None) else None
        self.position_embedding = layers.position_embedding() if span.first else None
        self.embedding_dropout = layers.dropout("embedding.dropout")
        self.layers: Any = Layers(
            {
                i: Layer(layers, f"layers.{i}", self.recompute.selected, experts=config.moe.is_moe_layer(i))
                for i in range(span.start, span.stop)
            }
        )
        self.final_norm: Any = layers.norm() if span.last else None
        self.output: Any = layers.output((self.embedding or embedding) if tied else None) if span.last else None

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        *,
        loss_scale: float | None = None,
        segment_ids: Tensor | None = None,
        positions: Tensor | None = None,
        dropout: DropoutKey | None = None,
        num_sequences: int = 0,
        hidden: Tensor | None = None,
        cache: KeyValueCache | None = None,
        only: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Run the model, or this stage of it.

        Args:
            tokens: [B, S] int64; every stage gets them.
            targets: [B, S] int64, -100 where there is no loss.
            loss_scale: the gradient that the loss will be given in backward, if known (e.g. `(loss * s).backward()`
                gives s); it saves a pass.
            segment_ids: [B, S] int64; attention stays within equal ids.
            positions: [B, S] int64, or None for 0 ... S - 1.
            dropout: None drops nothing.
            num_sequences: of the global batch, over which auxiliary losses of experts are averaged and added to the
                gradient; 0 = they are left out, as in evaluation.
            hidden: what the stage before gave (`hidden_shape(B, S)`), for all but the first.
            cache: keys and values of the tokens before these, to which theirs are added. `positions` are needed then;
                for a model that is whole, on meshes of tp and ep without sequence parallelism.
            only: [B] int64; logits of this place of each row alone, [B, 1, V], which spares the other places' work.

        Returns:
            a stage that is not the last: hidden states of that shape. Else, with targets: summed loss (fp32 scalar;
            fp64 for an fp64 model) and the number of targets (int64 scalar) of this rank's part of the sequence;
            without: logits [B, S, V] in the compute dtype.

        Raises:
            ConfigError: a sequence longer than the learned positions, or that does not divide over the ranks.
        """
        if self.position_embedding is not None and tokens.shape[1] > self.config.max_sequence_length:
            raise ConfigError(
                f"a sequence of {tokens.shape[1]} tokens is longer than model.max_sequence_length "
                f"{self.config.max_sequence_length}, and learned positions end there; shorten it"
            )
        context = self._context(tokens, segment_ids, positions, dropout, num_sequences)
        context = context if cache is None else context.with_cache(cache, positions)
        tokens, targets, positions = self._local(tokens, targets, positions, context)
        with self._surround():
            x = self._embed(tokens, positions, context) if hidden is None else hidden
            x, branch = self._run_layers(x, context)
            if not self.span.last:
                return x if branch is None else x + branch
            _, y = self.final_norm(x, branch)
            if only is not None:
                y = y[only, torch.arange(len(only), device=y.device)][None]
            if targets is None:
                logits: Tensor = self.output(y)
                return logits
            return self.output(y, targets, loss_scale), (targets >= 0).sum()

    def _embed(self, tokens: Tensor, positions: Tensor | None, context: Context) -> Tensor:
        x: Tensor = self.embedding(tokens)
        if self.position_embedding is not None:
            x = self.position_embedding(x, positions)
        return self.embedding_dropout(x, context)

    def _run_layers(self, x: Tensor, context: Context) -> tuple[Tensor, Tensor | None]:
        branch = None
        for place, layer in enumerate(self.layers):
            if self.recompute.is_full(place) and torch.is_grad_enabled():
                x = x if branch is None else x + branch  # one tensor to keep, rounded as the norm would
                x, branch = self._checkpoint(layer, x, None, context)
            else:
                x, branch = layer(x, branch, context)
        return x, branch
