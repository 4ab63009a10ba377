"""Scoring: how surprised a model is by tokens, as sum and count."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from megafp8.core.errors import ConfigError
from megafp8.models.decoder import Decoder

IGNORED = -100  # a target without loss


@dataclass(frozen=True)
class Score:
    """Summed loss in nats and the number of target tokens."""

    loss_sum: float
    tokens: int

    @property
    def loss(self) -> float:
        """Mean loss in nats a token; NaN without tokens."""
        return self.loss_sum / self.tokens if self.tokens else math.nan

    @property
    def perplexity(self) -> float:
        """exp(loss); infinite where that overflows."""
        return math.exp(self.loss) if not self.loss > 700 else math.inf

    def bits_per_byte(self, num_bytes: int) -> float:
        """Loss in bits over the bytes of the text: comparable between tokenizers."""
        return self.loss_sum / math.log(2) / num_bytes


class Windows:
    """Batches of (tokens, targets), int64 [B, length], in which every token but the first is a target once.

    Args:
        tokens: a sequence of ids that can be sliced.
        length: tokens in a window; the last one is filled up with targets that carry no loss.
        batch: windows in a batch.
    """

    def __init__(self, tokens: Sequence[int] | Any, *, length: int, batch: int) -> None:
        self.tokens, self.length, self.batch = tokens, length, batch
        self.count = max(-(-(len(tokens) - 1) // length), 0)

    def __len__(self) -> int:
        return (self.count + self.batch - 1) // self.batch

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for first in range(0, self.count, self.batch):
            rows = range(first, min(first + self.batch, self.count))
            tokens = np.zeros((len(rows), self.length), dtype=np.int64)
            targets = np.full_like(tokens, IGNORED)
            for row, number in enumerate(rows):
                start = number * self.length
                ids = np.asarray(self.tokens[start : start + self.length + 1], dtype=np.int64)
                tokens[row, : len(ids) - 1] = ids[:-1]
                targets[row, : len(ids) - 1] = ids[1:]
            yield torch.from_numpy(tokens), torch.from_numpy(targets)


@torch.inference_mode()
def score(model: Decoder, batches: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> Score:
    """Sum the losses of all targets of all batches.

    Raises:
        ConfigError: a token that the model has no embedding for.
    """
    device = next(model.parameters()).device
    loss_sum, count = 0.0, 0
    for tokens, targets in batches:
        largest = int(torch.maximum(tokens, targets).max())
        if largest >= model.config.vocab_size:
            raise ConfigError(f"token id {largest} is not in the model's vocabulary of {model.config.vocab_size}")
        batch_loss, batch_count = model(tokens.to(device), targets.to(device))
        loss_sum += float(batch_loss)
        count += int(batch_count)
    return Score(loss_sum, count)
