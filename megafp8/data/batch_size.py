"""The global batch as a pure function of the samples consumed: constant, or a ramp as Megatron's --rampup-batch-size.

Arithmetic only: no torch, nothing to save.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class BatchSize:
    """`full` samples a step, after a ramp if there is one.

    With `ramp` = (start, increment, samples): the batch begins at `start` and grows by `increment`, each of the
    (full - start) / increment batches below `full` serving an equal share of the first `samples` samples; a step that
    began within a share keeps its batch to its end (Megatron-LM, num_microbatches_calculator.py).

    Attributes:
        full: samples a step over all ranks, in the end.
        ramp: empty = constant.
    """

    full: int
    ramp: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        problems = ramp_problems(self.full, self.ramp)
        assert not problems, "; ".join(problems)

    def at(self, consumed_samples: int) -> int:
        """The batch of the step that begins when this many samples are consumed."""
        if not self.ramp or consumed_samples >= self.ramp[2]:
            return self.full
        start, increment, samples = self.ramp
        return start + increment * (consumed_samples * self._num_increments // samples)

    def consumed_after(self, steps: int) -> int:
        """Samples consumed by the first `steps` steps of a run."""
        consumed = 0
        while self.ramp and steps > 0 and consumed < self.ramp[2]:
            batch = self.at(consumed)
            share = (batch - self.ramp[0]) // self.ramp[1] + 1
            end = -(-share * self.ramp[2] // self._num_increments)  # where the next batch begins
            taken = min(steps, -(-(end - consumed) // batch))
            consumed, steps = consumed + taken * batch, steps - taken
        return consumed + steps * self.full

    def sizes(self) -> list[int]:
        """Every batch that a run may meet, in order."""
        return [*range(self.ramp[0], self.full, self.ramp[1]), self.full] if self.ramp else [self.full]

    @property
    def _num_increments(self) -> int:
        return (self.full - self.ramp[0]) // self.ramp[1]


def ramp_problems(full: int, ramp: tuple[int, ...]) -> list[str]:
    """Rules that a ramp to `full` breaks, a line each with the way out."""
    if not ramp:
        return []
    written = f"batch_ramp = {list(ramp)}"
    if len(ramp) != 3 or min(ramp) < 1:
        return [f"{written} must be [start, increment, samples], each at least 1; or [] for none"]
    start, increment, _ = ramp
    if start >= full:
        return [f"{written}: start {start} is not below global_batch {full}; use less, or [] for no ramp"]
    if (full - start) % increment:
        low = full - (full - start) // increment * increment
        near = ", ".join(str(s) for s in (low - increment, low) if 0 < s < full)
        return [
            f"{written}: global_batch {full} - start {start} is not divisible by increment {increment}; "
            f"nearest start: {near}"
        ]
    return []


def batch_problems(full: int, ramp: tuple[int, ...], *, dp: int, micro_batch: int) -> list[str]:
    """Batches (of a sound ramp) that are no multiple of dp x micro_batch, a line each with the way out."""
    unit = dp * micro_batch
    values = {"train.global_batch": full}
    if ramp:
        values |= {"train.batch_ramp's start": ramp[0], "train.batch_ramp's increment": ramp[1]}
    return [
        f"{name} {value} is not divisible by dp {dp} x train.micro_batch {micro_batch}; nearest: {_near(value, unit)}"
        for name, value in values.items()
        if value % unit
    ]


def _near(value: int, unit: int) -> str:
    low = value // unit * unit
    return ", ".join(str(n) for n in (low, low + unit) if n > 0)
