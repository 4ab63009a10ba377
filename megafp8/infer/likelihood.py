"""How likely continuations are: what multiple-choice tasks compare."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megafp8.core.errors import ConfigError
from megafp8.models.decoder import Decoder


@dataclass(frozen=True)
class Likelihood:
    """Of a continuation after its context.

    Attributes:
        log_probability: of all its tokens, in nats.
        is_greedy: whether greedy decoding would have written it.
        cut: tokens at the context's start that did not fit the model and were not seen.
    """

    log_probability: float
    is_greedy: bool
    cut: int = 0


@torch.inference_mode()
def likelihoods(
    model: Decoder,
    pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
    *,
    batch: int = 8,
    on_batch: Callable[[int], Any] = lambda _: None,
) -> list[Likelihood]:
    """Score each (context, continuation) of token ids; softmax in fp32 over the whole vocabulary, as in training.

    Pairs of like length are scored together, at most `batch` at once.

    Args:
        on_batch: called with the number of pairs done, after each batch.

    Raises:
        ConfigError: an empty context, or a continuation longer than the model's positions.
    """
    limit, found = model.config.max_sequence_length, [Likelihood(0.0, True)] * len(pairs)
    for context, continuation in pairs:
        if not context:
            raise ConfigError("a context without tokens; begin it with the id that begins documents")
        if len(continuation) > limit:
            raise ConfigError(f"a continuation of {len(continuation)} tokens; the model has {limit} positions")
    device = next(model.parameters()).device
    for places in _batches(pairs, batch):
        rows = [[*pairs[place][0], *pairs[place][1]] for place in places]
        cuts = [max(0, len(row) - limit - 1) for row in rows]
        rows = [row[cut:] for row, cut in zip(rows, cuts, strict=True)]
        tokens = torch.zeros(len(rows), max(map(len, rows)) - 1, dtype=torch.int64)
        for line, row in zip(tokens, rows, strict=True):
            line[: len(row) - 1] = torch.tensor(row[:-1])
        logits = model(tokens.to(device))  # padding stands on the right, where no token of the row looks
        for number, (place, cut) in enumerate(zip(places, cuts, strict=True)):
            wanted = torch.tensor(list(pairs[place][1]), device=device)
            ends = len(rows[number]) - 1
            mine = logits[number, ends - len(wanted) : ends].float()
            parts = torch.log_softmax(mine, -1).gather(-1, wanted[:, None])
            found[place] = Likelihood(float(parts.double().sum()), bool((mine.argmax(-1) == wanted).all()), cut)
        on_batch(len(places))
    return found


def _batches(pairs: Sequence[tuple[Sequence[int], Sequence[int]]], batch: int) -> Iterator[list[int]]:
    """Places of pairs that have something to score, longest first, so that what needs most memory comes first."""
    order = sorted((p for p in range(len(pairs)) if pairs[p][1]), key=lambda p: -len(pairs[p][0]) - len(pairs[p][1]))
    for start in range(0, len(order), batch):
        yield order[start : start + batch]
