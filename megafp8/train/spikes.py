"""A loss that jumps: seen before the step is taken, and computed again on demand, to tell data from chips."""

from __future__ import annotations

import logging
import statistics
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch

from megafp8.core.errors import CorruptionError, NumericsError
from megafp8.core.log import event, get_logger
from megafp8.parallel.collectives import all_reduce_, merge_dicts
from megafp8.parallel.mesh_config import RANK_ORDER
from megafp8.parallel.pieces import own_piece
from megafp8.train.guard_config import GuardSection
from megafp8.train.replicas import fingerprint
from megafp8.train.setup import Parts
from megafp8.train.step import StepResult

logger = get_logger(__name__)
_SIGMA = 1.4826  # of a normal distribution, in median absolute deviations
_FLOOR = 0.02  # of the median: the least spread that is believed, for a curve that lies flat
_GPU_TOLERANCE = 1e-3  # relative, of a loss: kernels that add in no fixed order


class SpikeDetector:
    """Holds the last losses that counted; a spike is one above median + `factor` x spread of them."""

    def __init__(self, factor: float, window: int) -> None:
        self.factor, self._enough = factor, max(2, window // 2)
        self._recent: deque[tuple[int, float]] = deque(maxlen=window)

    def add(self, step: int, loss: float) -> None:
        """Note the loss of a step that was taken."""
        self._recent.append((step, loss))

    def restart(self, losses: Iterable[tuple[int, float]]) -> None:
        """Begin with these (step, loss) of steps that were taken, in order."""
        self._recent.clear()
        self._recent.extend(losses)

    @property
    def limit(self) -> float:
        """Above it a loss is a spike; infinite while too few are known, or if spikes are not looked for."""
        if not self.factor or len(self._recent) < self._enough:
            return float("inf")
        losses = [loss for _, loss in self._recent]
        median = statistics.median(losses)
        spread = _SIGMA * statistics.median(abs(loss - median) for loss in losses)
        return median + self.factor * max(spread, _FLOOR * abs(median))


class StepJudge:
    """Decides, after a step's gradients are there, whether the optimizer takes them. The same on all ranks.

    Attributes:
        limit, spiked: of the last step that was judged.
        in_a_row: spikes.
        transient: results that were other when they were computed again.
    """

    def __init__(self, parts: Parts) -> None:
        self._parts, self._guard = parts, parts.config.guard
        self.losses = SpikeDetector(self._guard.spike_factor, self._guard.spike_window)
        self.limit, self.spiked, self.in_a_row, self.transient = float("inf"), False, 0, 0
        exact = parts.device.type == "cpu" or parts.config.train.deterministic
        self._tolerance = 0.0 if exact else _GPU_TOLERANCE

    def __call__(self, step: int, result: StepResult, again: Callable[[], StepResult]) -> StepResult | None:
        """The result to take; None: the step is not taken. Collective.

        Args:
            again: computes the step once more, from the same state.

        Raises:
            CorruptionError: every computation gives another result.
        """
        guard = self._guard
        self.limit = self.losses.limit
        self.spiked = result.loss > self.limit
        every = guard.rerun_interval
        if (self.spiked and guard.rerun_suspicious) or (every and step % every == 0):
            result = self._confirm(step, result, again)
            self.spiked = result.loss > self.limit
        self.in_a_row = self.in_a_row + 1 if self.spiked else 0
        if self.spiked and guard.spike_action != "report":
            return None
        if not self.spiked:
            self.losses.add(step, result.loss)
        return result

    def _confirm(self, step: int, first: StepResult, again: Callable[[], StepResult]) -> StepResult:
        first_bits, second, second_bits = self._bits(), again(), self._bits()
        ranks = self._differing(first, second, first_bits, second_bits)
        if not ranks:
            return second
        third, third_bits = again(), self._bits()
        as_second = not self._differing(second, third, second_bits, third_bits)
        if not (as_second or not self._differing(first, third, first_bits, third_bits)):
            raise CorruptionError(
                f"step {step}: computed three times, with three results (on rank {ranks}); losses {first.loss!r}, "
                f"{second.loss!r}, {third.loss!r}; go on from the newest checkpoint without that host"
            )
        self.transient += 1
        losses: dict[str, Any] = {"first": first.loss, "again": third.loss}
        event(logger, "a result that came and went: the step as computed again is taken", level=logging.WARNING,
              step=step, ranks=ranks, transient=self.transient, **losses)  # fmt: skip
        return third

    def _bits(self) -> torch.Tensor:
        """Of the gradients as this rank holds them."""
        if self._tolerance:
            return torch.zeros(2, dtype=torch.int64)
        grads = [own_piece(param).grad for _, param in self._parts.named_parameters]
        return torch.stack([fingerprint(grad) for grad in grads]).sum(0).cpu()

    def _differing(self, a: StepResult, b: StepResult, a_bits: torch.Tensor, b_bits: torch.Tensor) -> str:
        """The ranks whose own part of the loss differs, else those whose gradients do; empty if all are the same."""
        everyone = self._parts.mesh.group_of(RANK_ORDER)
        loss = abs(a.own_loss - b.own_loss) > self._tolerance * abs(a.own_loss)
        total = abs(a.loss - b.loss) > self._tolerance * abs(a.loss)
        grads = not torch.equal(a_bits, b_bits)
        if not all_reduce_(torch.tensor([float(loss or grads or total)]), everyone, "max").item():
            return ""
        found = merge_dicts({str(self._parts.mesh.rank): (loss, grads)}, everyone)
        by_loss = [rank for rank, (own, _) in found.items() if own]
        return ", ".join(by_loss or [rank for rank, (_, own) in found.items() if own] or found)

    def refuse(self, step: int, loss: float, guard: GuardSection) -> None:
        """After a spike that is not taken.

        Raises:
            NumericsError: the run is to end at it, or it is one of too many in a row.
        """
        too_many = self.in_a_row > guard.max_spikes
        if guard.spike_action == "stop" or too_many:
            count = f", spike {self.in_a_row} in a row (guard.max_spikes {guard.max_spikes})" if too_many else ""
            raise NumericsError(
                f"step {step}: loss {loss:.6g} is above {self.limit:.6g}, guard.spike_factor {guard.spike_factor:g} "
                f"spreads over the median{count}; the step was not taken and nothing was saved after it: go on with "
                'guard.spike_action = "rewind", a lower optimizer.lr, or from an older checkpoint'
            )
