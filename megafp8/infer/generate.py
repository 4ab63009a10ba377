"""Generation: greedy or sampled, rows of any lengths together, the same text for the same seed.

Prompts are read at once; then each step brings one token a row, and attention finds the rest in a cache
(nn/cache). Rows that have ended leave the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megafp8.core.errors import ConfigError
from megafp8.core.rng import uniform_at
from megafp8.models.decoder import Decoder
from megafp8.nn.cache import KeyValueCache

Tensor = torch.Tensor
_ROW_STRIDE = 1 << 40  # a row's random numbers: positions lie below this


@dataclass(frozen=True)
class Sampling:
    """How a next token is chosen. Filters apply in the order top_k, then top_p, as in transformers.

    Attributes:
        temperature: 0 takes the likeliest token; else logits are divided by it and sampled.
        top_k: only the k likeliest tokens; 0: all.
        top_p: only the likeliest tokens that together have this probability (nucleus, arXiv:1904.09751); 1: all.
        seed: of the sampling; a row's text depends on seed, row number and prompt, not on the other rows.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not (self.temperature >= 0 and self.top_k >= 0 and 0 < self.top_p <= 1):
            raise ConfigError(
                f"temperature {self.temperature} and top_k {self.top_k} must not be negative, top_p {self.top_p} lies "
                "above 0 and at most at 1"
            )


GREEDY = Sampling()


@torch.inference_mode()
def generate(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    sampling: Sampling = GREEDY,
    eod_id: int | None = None,
    stop: Callable[[int, list[int]], bool] | None = None,
    on_step: Callable[[int], Any] = lambda _: None,
) -> list[list[int]]:
    """Continue every prompt. With tensor parallelism every rank calls it alike and gets the same.

    Args:
        prompts: token ids, at least one in each; lengths may differ.
        max_new_tokens: for each prompt, at most.
        eod_id: ends a row when it is generated; it is not returned.
        stop: called with row number and its new ids after each token; True ends the row, which keeps that token.
        on_step: called with the number of rows that got a token, after each step.

    Returns:
        the new ids of each row.

    Raises:
        ConfigError: an empty prompt, or more tokens than the model has positions for.
    """
    _check(model, prompts, max_new_tokens)
    made: list[list[int]] = [[] for _ in prompts]
    if max_new_tokens == 0:
        return made
    device = next(model.parameters()).device
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    longest = int(lengths.max())
    cache = KeyValueCache(len(prompts), longest + max_new_tokens)
    tokens = torch.zeros(len(prompts), longest, dtype=torch.int64, device=device)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = torch.tensor(prompt, device=device)
    positions = torch.arange(longest, device=device).expand_as(tokens)
    rows = torch.arange(len(prompts), device=device)
    last = lengths - 1  # what lies right of it is padding, which no token of the row sees
    for step in range(max_new_tokens):
        logits = model(tokens, positions=positions, cache=cache, only=last)
        assert isinstance(logits, Tensor)
        chosen = choose(logits[:, 0], sampling, rows * _ROW_STRIDE + lengths)
        goes_on = _take(chosen, rows, made, eod_id, stop)
        on_step(len(rows))
        if not goes_on or step + 1 == max_new_tokens:
            break
        if len(goes_on) < len(rows):
            kept = torch.tensor(goes_on, device=device)
            cache.keep_rows(kept)
            rows, lengths, chosen = rows[kept], lengths[kept], chosen[kept]
        tokens, positions, last = chosen[:, None], lengths[:, None], torch.zeros_like(rows)
        lengths = lengths + 1
    return made


def _take(
    chosen: Tensor,
    rows: Tensor,
    made: list[list[int]],
    eod_id: int | None,
    stop: Callable[[int, list[int]], bool] | None,
) -> list[int]:
    """Note each row's new token; which places of the batch go on."""
    goes_on = []
    for place, (row, token) in enumerate(zip(rows.tolist(), chosen.tolist(), strict=True)):
        if token == eod_id:
            continue
        made[row].append(token)
        if stop is None or not stop(row, made[row]):
            goes_on.append(place)
    return goes_on


def _check(model: Decoder, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
    limit, vocabulary = model.config.max_sequence_length, model.config.vocab_size
    if max_new_tokens < 0:
        raise ConfigError(f"max_new_tokens {max_new_tokens} must not be negative")
    if not prompts or not all(prompts):
        raise ConfigError("a prompt without tokens; give at least one, e.g. the end-of-document id")
    longest = max(len(prompt) for prompt in prompts)
    if longest + max_new_tokens > limit:
        raise ConfigError(
            f"{longest} tokens of prompt and {max_new_tokens} new ones exceed the model's {limit} positions; "
            f"ask for at most {max(limit - longest, 0)}"
        )
    wrong = [token for prompt in prompts for token in prompt if not 0 <= token < vocabulary]
    if wrong:
        raise ConfigError(f"token id {wrong[0]} is not in the model's vocabulary of {vocabulary}")


def choose(logits: Tensor, sampling: Sampling, index: Tensor) -> Tensor:
    """The next token of each row. logits [B, V]; index [B] int64, which random number a row takes -> [B] int64."""
    if sampling.temperature == 0:
        return logits.argmax(-1)
    # fp64: with fp32 sums over a large vocabulary the tail would be off by more than its own mass.
    scaled = logits.double() / sampling.temperature
    if sampling.top_k:
        least = scaled.topk(min(sampling.top_k, scaled.shape[-1])).values[:, -1:]
        scaled = scaled.masked_fill(scaled < least, float("-inf"))
    probabilities = torch.softmax(scaled, -1)
    if sampling.top_p < 1:
        ordered, places = torch.sort(probabilities, stable=True, dim=-1, descending=True)
        beyond = ordered.cumsum(-1) - ordered >= sampling.top_p  # the one that crosses the line stays
        probabilities = probabilities.masked_fill(torch.zeros_like(beyond).scatter(-1, places, beyond), 0.0)
    steps = probabilities.cumsum(-1)
    at = uniform_at(sampling.seed, index).double().unsqueeze(-1) * steps[:, -1:]
    return torch.searchsorted(steps, at, right=True).squeeze(-1).clamp_(max=logits.shape[-1] - 1)
