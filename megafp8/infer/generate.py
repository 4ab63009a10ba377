"""Generation: greedy or sampled, rows of any lengths together, the same text for the same seed.

Each new token runs the model over the whole text so far: right for judging a model, not for serving one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megafp8.core.errors import ConfigError
from megafp8.core.rng import uniform_at
from megafp8.models.decoder import Decoder

_ROW_STRIDE = 1 << 40  # a row's random numbers: positions lie below this


@torch.inference_mode()
def generate(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
    eod_id: int | None = None,
) -> list[list[int]]:
    """Continue every prompt.

    Args:
        prompts: token ids, at least one in each; lengths may differ.
        max_new_tokens: for each prompt, at most.
        temperature: 0 takes the likeliest token; else logits are divided by it and sampled.
        seed: of the sampling; a row's text depends on seed, row number and prompt, not on the other rows.
        eod_id: ends a row when it is generated; it is not returned.

    Returns:
        the new ids of each row.

    Raises:
        ConfigError: an empty prompt, or more tokens than the model has positions for.
    """
    _check(model, prompts, max_new_tokens, temperature)
    device = next(model.parameters()).device
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    total = int(lengths.max()) + max_new_tokens
    tokens = torch.zeros(len(prompts), total, dtype=torch.int64, device=device)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = torch.tensor(prompt, device=device)
    rows = torch.arange(len(prompts), device=device)
    running = torch.ones(len(prompts), dtype=torch.bool, device=device)
    start = lengths.clone()
    for _ in range(max_new_tokens):
        # What lies right of a row's end is padding that no earlier position can see.
        logits = model(tokens[:, : int(lengths.max())])
        chosen = _choose(logits[rows, lengths - 1], temperature, seed, rows * _ROW_STRIDE + lengths)
        if eod_id is not None:
            running &= chosen != eod_id
        if not running.any():
            break
        tokens[rows[running], lengths[running]] = chosen[running]
        lengths += running
    return [tokens[row, int(start[row]) : int(lengths[row])].tolist() for row in range(len(prompts))]


def _check(model: Decoder, prompts: Sequence[Sequence[int]], max_new_tokens: int, temperature: float) -> None:
    limit, vocabulary = model.config.max_sequence_length, model.config.vocab_size
    if max_new_tokens < 0 or temperature < 0:
        raise ConfigError(f"max_new_tokens {max_new_tokens} and temperature {temperature} must not be negative")
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


def _choose(logits: torch.Tensor, temperature: float, seed: int, index: torch.Tensor) -> torch.Tensor:
    """The next token of each row. logits [B, V], index [B] int64 -> [B] int64."""
    if temperature == 0:
        return logits.argmax(-1)
    # fp64: with fp32 sums over a large vocabulary the tail would be off by more than its own mass.
    steps = torch.softmax(logits.double() / temperature, -1).cumsum(-1)
    at = uniform_at(seed, index).double().unsqueeze(-1) * steps[:, -1:]
    return torch.searchsorted(steps, at, right=True).squeeze(-1).clamp_(max=logits.shape[-1] - 1)
