"""The model: a decoder of any family, written as for one device.

Layers come from a LayerSet, which alone knows about ranks and number formats. The residual stream `x` and the last
branch travel separately, so that adding and normalising are one pass.

Shapes: B micro-batch, S sequence, H hidden, V vocabulary; hidden tensors are [S, B, H].
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from megafp8.core.errors import ConfigError
from megafp8.models.config import ModelConfig
from megafp8.nn.layers import Context, DropoutKey, LayerSet
from megafp8.nn.recompute import Recompute, checkpointed

Tensor = torch.Tensor


class Layer(nn.Module):
    """One decoder layer: (x, branch) -> (x, branch), with x + branch as the residual stream."""

    def __init__(self, layers: LayerSet, name: str, recompute: Recompute) -> None:
        super().__init__()
        self.selective = recompute == "selective"
        self.attention_norm: Any = layers.norm()
        self.attention = layers.attention(f"{name}.attention")
        self.attention_dropout = layers.dropout(f"{name}.attention.dropout")
        self.mlp_norm: Any = layers.norm()
        self.mlp = layers.mlp(f"{name}.mlp")
        self.mlp_dropout = layers.dropout(f"{name}.mlp.dropout")

    def forward(self, x: Tensor, branch: Tensor | None, context: Context) -> tuple[Tensor, Tensor]:
        x, y = self.attention_norm(x, branch)
        rebuild = partial(self.attention_norm.again, x.detach()) if self.selective else None
        branch = self.attention_dropout(self.attention(y, context, rebuild), context)
        x, y = self.mlp_norm(x, branch)
        rebuild = partial(self.mlp_norm.again, x.detach()) if self.selective else None
        return x, self.mlp_dropout(self.mlp(y, context, rebuild), context)


class Decoder(nn.Module):
    """Tokens to loss or logits.

    Attributes:
        fp8_states: the quantization state of each linear by module name; empty where nothing is quantized.
        has_dropout: whether training wants a DropoutKey.
    """

    def __init__(self, config: ModelConfig, layers: LayerSet, *, recompute: Recompute = "none") -> None:
        super().__init__()
        self.config, self.recompute = config, recompute
        self.fp8_states = layers.states
        self.has_dropout = config.hidden_dropout > 0 or config.attention_dropout > 0
        self._context, self._local = layers.context, layers.local
        self.embedding = layers.embedding()
        self.position_embedding = layers.position_embedding()
        self.embedding_dropout = layers.dropout("embedding.dropout")
        self.layers: Any = nn.ModuleList(Layer(layers, f"layers.{i}", recompute) for i in range(config.num_layers))
        self.final_norm = layers.norm()
        self.output: Any = layers.output(self.embedding if config.tied_embeddings else None)

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
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Run the model.

        Args:
            tokens: [B, S] int64.
            targets: [B, S] int64, -100 where there is no loss.
            loss_scale: the gradient that the loss will be given in backward, if known (e.g. `(loss * s).backward()`
                gives s); it saves a pass.
            segment_ids: [B, S] int64; attention stays within equal ids.
            positions: [B, S] int64, or None for 0 ... S - 1.
            dropout: None drops nothing.
            num_sequences: of the global batch, over which auxiliary losses of experts are averaged and added to the
                gradient; 0 = they are left out, as in evaluation.

        Returns:
            with targets: summed loss (fp32 scalar; fp64 for an fp64 model) and the number of targets (int64 scalar);
            else logits [B, S, V] in the compute dtype. Loss and count are those of this rank's part of the sequence.

        Raises:
            ConfigError: a sequence longer than the learned positions, or that does not divide over the ranks.
        """
        if self.position_embedding is not None and tokens.shape[1] > self.config.max_sequence_length:
            raise ConfigError(
                f"a sequence of {tokens.shape[1]} tokens is longer than model.max_sequence_length "
                f"{self.config.max_sequence_length}, and learned positions end there; shorten it"
            )
        context = self._context(tokens, segment_ids, positions, dropout, num_sequences)
        tokens, targets, positions = self._local(tokens, targets, positions, context)
        x = self._hidden(tokens, context, positions)
        if targets is None:
            logits: Tensor = self.output(x)
            return logits
        return self.output.loss(x, targets, loss_scale), (targets >= 0).sum()

    def _hidden(self, tokens: Tensor, context: Context, positions: Tensor | None) -> Tensor:
        x = self.embedding(tokens)
        if self.position_embedding is not None:
            x = self.position_embedding(x, positions)
        x, branch = self.embedding_dropout(x, context), None
        recompute = self.recompute == "full" and torch.is_grad_enabled()
        for layer in self.layers:
            x, branch = checkpointed(layer, x, branch, context) if recompute else layer(x, branch, context)
        _, y = self.final_norm(x, branch)
        return y
