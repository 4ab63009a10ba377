"""Throughput against latency: what is measured at each batch size, and how much fits into a latency budget.

Who measures (our engine, a server) lives beside; who draws, in report/.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from megafp8.core.errors import ConfigError, MegaError


@dataclass(frozen=True)
class Workload:
    """What each request is.

    Attributes:
        prompt_tokens, new_tokens: of one request; every row brings exactly so many, ends of documents do not stop it.
        warmup: rounds that are not counted.
        repeats: rounds that are counted.
        seed: of the prompts, which are random ids: a cache of prompts must find nothing.
    """

    prompt_tokens: int = 128
    new_tokens: int = 128
    warmup: int = 1
    repeats: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        problems = [
            f"{option} {value}: at least {least}{why}"
            for option, value, least, why in (
                ("--prompt-tokens", self.prompt_tokens, 1, ""),
                ("--new-tokens", self.new_tokens, 2, ", for the time between two of them is measured"),
                ("--warmup", self.warmup, 0, ""),
                ("--repeats", self.repeats, 1, ""),
            )
            if value < least
        ]
        if problems:
            raise ConfigError("\n".join(problems))


@dataclass(frozen=True)
class Point:
    """One batch size, times in seconds.

    Attributes:
        batch: rows of our engine, or requests that a server had at once.
        first_token: from sending a prompt to its first new token, median.
        token, token_p90: for each later token, median and 90th percentile.
        tokens_per_second: new tokens of all rows over the time of the whole, reading of prompts included.
        new_tokens: that a row got, on average; fewer than asked if a server ended rows early.
        prompt_tokens: as the server counted them; None where it did not say.
    """

    batch: int
    first_token: float
    token: float
    token_p90: float
    tokens_per_second: float
    new_tokens: float
    prompt_tokens: float | None = None


@dataclass
class Curve:
    """The points of one precision, by rising batch size.

    Attributes:
        label: what is measured, in a word or two.
        facts: model, dtype, recipe and the like.
        emulated: FP8 computed without FP8 hardware: its speed says nothing about a GPU.
        failure: why batch sizes are missing; empty if none is.
        error: the same, to raise.
    """

    label: str
    facts: dict[str, object] = field(default_factory=dict)
    emulated: bool = False
    points: list[Point] = field(default_factory=list)
    failure: str = ""
    error: MegaError | None = None


def run_sweep(curve: Curve, batches: Sequence[int], measure: Callable[[int], Point]) -> Curve:
    """Measure every batch size until one fails; that is noted, and what was measured before is kept."""
    for batch in batches:
        try:
            curve.points.append(measure(batch))
        except MegaError as error:
            curve.error, curve.failure = error, f"batch {batch}: {error}"
            break
    return curve


@dataclass(frozen=True)
class Capacity:
    """The most that fits into a budget.

    Attributes:
        tokens_per_second, token: of that place on the curve; token in seconds.
        batch: interpolated like them.
        is_last: the largest batch measured fits too, so larger ones may give more.
    """

    tokens_per_second: float
    token: float
    batch: float
    is_last: bool


def capacity(points: Sequence[Point], budget_seconds: float) -> Capacity | None:
    """The largest throughput on the line through `points` whose median time per token is within the budget.

    Between neighbouring batch sizes latency, throughput and batch are interpolated linearly.

    Returns:
        None: no batch size fits.
    """
    found = [
        Capacity(p.tokens_per_second, p.token, p.batch, p is points[-1]) for p in points if p.token <= budget_seconds
    ]
    for a, b in pairwise(points):
        if (a.token <= budget_seconds) != (b.token <= budget_seconds):
            share = (budget_seconds - a.token) / (b.token - a.token)
            rate = a.tokens_per_second + share * (b.tokens_per_second - a.tokens_per_second)
            found.append(Capacity(rate, budget_seconds, a.batch + share * (b.batch - a.batch), is_last=False))
    return max(found, key=lambda one: one.tokens_per_second, default=None)


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which a `share` of `values` lies, interpolated between neighbours."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])
