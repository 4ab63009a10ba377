"""How fast our own engine is: whole batches through `generate`, a time stamp after each step."""

from __future__ import annotations

import random
import time
from itertools import pairwise

import torch

from megafp8.core.errors import ConfigError, ResourceError
from megafp8.infer.generate import generate
from megafp8.infer.sweep import Point, Workload, percentile
from megafp8.models import ModelConfig
from megafp8.models.decoder import Decoder


def check_fits(config: ModelConfig, workload: Workload) -> None:
    """Hold a workload against the model's positions.

    Raises:
        ConfigError: it needs more.
    """
    needed, limit = workload.prompt_tokens + workload.new_tokens, config.max_sequence_length
    if needed > limit:
        raise ConfigError(
            f"--prompt-tokens {workload.prompt_tokens} and --new-tokens {workload.new_tokens} exceed the model's "
            f"{limit} positions; ask for {needed - limit} fewer"
        )


def is_emulated(model: Decoder) -> bool:
    """Whether any of its linears computes FP8 without FP8 hardware."""
    return any(state.backend.name.startswith("emulated") for state in model.fp8_states.values())


def measure_engine(model: Decoder, workload: Workload, batch: int) -> Point:
    """The speed of `batch` rows. Every rank of tp calls it alike; each gives its own times.

    Times per token are those between two steps, which each give a token to every row.

    Raises:
        ResourceError: the GPU's memory is too small.
    """
    rng = random.Random(f"{workload.seed} {batch}")
    firsts, gaps, spent = [], [], 0.0
    for turn in range(-workload.warmup, workload.repeats):
        prompts = [
            [rng.randrange(model.config.vocab_size) for _ in range(workload.prompt_tokens)] for _ in range(batch)
        ]
        stamps = _stamps(model, prompts, workload.new_tokens)
        if turn < 0:
            continue
        firsts.append(stamps[1] - stamps[0])
        gaps += [b - a for a, b in pairwise(stamps[1:])]
        spent += stamps[-1] - stamps[0]
    return Point(
        batch=batch,
        first_token=percentile(firsts, 0.5),
        token=percentile(gaps, 0.5),
        token_p90=percentile(gaps, 0.9),
        tokens_per_second=batch * workload.new_tokens * workload.repeats / spent,
        new_tokens=workload.new_tokens,
        prompt_tokens=workload.prompt_tokens,
    )


def _stamps(model: Decoder, prompts: list[list[int]], new_tokens: int) -> list[float]:
    """When it began, and when each token was there: its ids are on the host then, so a GPU has done its work."""
    stamps = [time.perf_counter()]
    try:
        generate(model, prompts, max_new_tokens=new_tokens, on_step=lambda _: stamps.append(time.perf_counter()))
    except torch.OutOfMemoryError:
        raise ResourceError(
            f"{len(prompts)} rows of {len(prompts[0]) + new_tokens} tokens do not fit into the GPU's memory; "
            "ask for fewer rows or tokens, or split the model with tp"
        ) from None
    return stamps
