"""A pipeline stage's part of a model. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from megafp8.models.config import ModelConfig
from megafp8.parallel.mesh_config import ParallelConfig
from megafp8.parallel.stages import spans_of


@dataclass(frozen=True)
class Span:
    """One stage: layers start ... stop - 1, and whether it begins with the embedding and ends with the loss."""

    start: int
    stop: int
    first: bool = True
    last: bool = True


def whole(config: ModelConfig) -> Span:
    """The only stage of a model that is not cut."""
    return Span(0, config.num_layers)


def split_layers(config: ModelConfig, parallel: ParallelConfig) -> tuple[Span, ...]:
    """The stages in model order, for a split that `schedule_problems` finds to be in order."""
    spans = spans_of(parallel, config.num_layers)
    last = len(spans) - 1
    return tuple(Span(start, stop, first=i == 0, last=i == last) for i, (start, stop) in enumerate(spans))
