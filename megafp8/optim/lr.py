"""The learning rate as a pure function of the place in the run: nothing to save, nothing to resume."""

from __future__ import annotations

import math
from typing import NamedTuple, Protocol

from megafp8.optim.config import OptimizerConfig


class Batches(Protocol):
    """What a schedule asks of the batch sizes of a run (data/batch_size)."""

    @property
    def full(self) -> int: ...

    @property
    def ramp(self) -> tuple[int, ...]: ...

    def consumed_after(self, steps: int) -> int: ...


class Lengths(NamedTuple):
    """A schedule's parts in one unit, steps or tokens.

    Attributes:
        first: where the first step ends.
        warmup: where warm-up ends.
        end: where decay ends.
        final_decay: how long wsd's decay is.
    """

    first: int
    warmup: int
    end: int
    final_decay: int


class Schedule:
    """The rate of each step of a run.

    It runs over steps where the batch is constant and every length is given in steps, else over tokens: then a length
    in steps is the tokens that the run consumes in so many steps (wsd's final decay: in the last ones before the end),
    and the rate of a step depends on `consumed_samples` alone, so that a resumed run has the same one.

    Args:
        batches: the run's batch sizes.
        sequence_length: tokens a sample.
        total_steps: steps of the run.
    """

    def __init__(self, config: OptimizerConfig, batches: Batches, *, sequence_length: int, total_steps: int) -> None:
        self._config, self._batches, self._sequence_length = config, batches, sequence_length
        tokens = config.warmup_tokens or config.decay_tokens or config.wsd_decay_tokens
        self.by_tokens = bool(tokens or batches.ramp)
        last = config.decay_steps or total_steps
        self.lengths = Lengths(
            self._after(1),
            config.warmup_tokens or self._after(config.warmup_steps),
            config.decay_tokens or self._after(last),
            0,
        )
        tail = config.wsd_decay_tokens
        if config.wsd_decay_steps:
            # With decay_tokens no step is the last one of decay; its batch is the full one by then.
            steps = config.wsd_decay_steps
            whole = self._after(last) - self._after(last - steps) if last > steps else self._after(last)
            tail = whole if not config.decay_tokens else steps * batches.full * sequence_length
        self.lengths = self.lengths._replace(final_decay=tail)

    def __call__(self, *, step: int, consumed_samples: int) -> float:
        """The rate of step `step`, counted from 1, at whose end `consumed_samples` are consumed."""
        position = consumed_samples * self._sequence_length if self.by_tokens else step
        return learning_rate(self._config, self.lengths, position)

    def problems(self) -> list[str]:
        """Rules that its lengths break in this run, a line each with the way out; empty if all hold."""
        config, (_, warmup, end, tail) = self._config, self.lengths
        if config.schedule in ("constant", "inverse_sqrt"):
            return []
        unit = "tokens" if self.by_tokens else "steps"
        last = "optimizer.decay_tokens" if config.decay_tokens else "train.steps"
        if config.decay_steps:
            last = "optimizer.decay_steps"
        if self.by_tokens and not config.decay_tokens:
            last = f"the last of {last}, token"
        if warmup >= end:
            return [f"optimizer.warmup_{unit} = {warmup} is not before {last} = {end}; use at most {end - 1}"]
        if warmup + tail > end:
            return [
                f"optimizer.warmup_{unit} {warmup} + wsd_decay_{unit} {tail} is beyond {last} = {end}; "
                f"use wsd_decay_{unit} <= {end - warmup}"
            ]
        return []

    def _after(self, steps: int) -> int:
        return self._batches.consumed_after(steps) * self._sequence_length if self.by_tokens else steps


def learning_rate(config: OptimizerConfig, lengths: Lengths, position: int) -> float:
    """The rate of the step that ends at `position`, in the unit of `lengths`.

    With w the end of warm-up and d that of decay: w has the peak rate `lr`, d and all after it `min_lr`.
    Warm-up is lr * position / w. Then, with t = (position - w) / (d - w):

        cosine        min_lr + (lr - min_lr) * (1 + cos(pi t)) / 2         (arXiv 1608.03983)
        linear        lr + (min_lr - lr) * t
        wsd           lr, then linear to min_lr over the last `final_decay`      (arXiv 2404.06395)
        constant      lr
        inverse_sqrt  max(min_lr, lr * sqrt(max(w, first) / position)), whatever d  (arXiv 1706.03762)
    """
    assert position >= 0, "steps count from 1"
    first, warmup, end, final_decay = lengths
    if position < warmup:
        return config.lr * position / warmup
    if config.schedule == "constant":
        return config.lr
    if config.schedule == "inverse_sqrt":
        return max(config.min_lr, config.lr * math.sqrt(min(1.0, max(warmup, first) / max(position, 1))))
    if position >= end:
        return config.min_lr
    if config.schedule == "wsd":
        warmup = end - final_decay  # the decay begins here
        if position <= warmup:
            return config.lr
    done = (position - warmup) / (end - warmup)
    if config.schedule == "cosine":
        done = (1 - math.cos(math.pi * done)) / 2
    return config.lr + (config.min_lr - config.lr) * done
