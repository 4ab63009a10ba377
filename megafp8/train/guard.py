"""What looks at a step after it was taken, or in its stead: not finite, spikes, slow ranks, replicas that differ."""

from __future__ import annotations

import logging
from typing import Any

from megafp8.checkpoint.folders import step_of
from megafp8.core.errors import NumericsError
from megafp8.core.log import event, get_logger
from megafp8.train.metrics import MetricsWriter
from megafp8.train.replicas import check_replicas
from megafp8.train.saving import Saving
from megafp8.train.setup import Parts
from megafp8.train.spikes import StepJudge
from megafp8.train.step import StepResult
from megafp8.train.stragglers import StragglerWatch, report

logger = get_logger(__name__)


class NonFiniteGuard:
    """Counts steps that every rank skipped because the loss or the gradient norm was not finite."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.total = 0
        self.in_a_row = 0

    def observe(self, step: int, *, finite: bool, loss: float, grad_norm: float, origin: str = "") -> None:
        """Note a step; `origin` says where one that is not finite broke.

        Raises:
            NumericsError: more than `limit` steps in a row were not finite.
        """
        self.in_a_row = 0 if finite else self.in_a_row + 1
        self.total += 0 if finite else 1
        if self.in_a_row > self.limit:
            raise NumericsError(
                f"step {step}: loss {loss} and gradient norm {grad_norm}, not finite for {self.in_a_row} steps in a "
                f"row (limit train.max_nonfinite_steps {self.limit}); {origin + '; ' if origin else ''}lower "
                "optimizer.lr or resume an older checkpoint"
            )


class Guards:
    """All that watches over the steps of one attempt at a run; every method is collective."""

    def __init__(self, parts: Parts) -> None:
        config = parts.config.guard
        self.parts, self._config = parts, config
        self.nonfinite = NonFiniteGuard(parts.config.train.max_nonfinite_steps)
        self.judge = StepJudge(parts)
        self._stragglers = StragglerWatch(
            parts.mesh, parts.device, interval=config.straggler_interval, ratio=config.straggler_ratio
        )

    def report_to(self, writer: MetricsWriter, saving: Saving) -> None:
        """Where events go, and who knows what is saved; before the first step."""
        self._writer, self._saving = writer, saving

    def begin(self, step: int) -> None:
        """Before a step."""
        self.judge.spiked = False
        self._stragglers.begin(step)

    def look_at(self, step: int, result: StepResult) -> bool:
        """After a step, said what there is to say; whether the run is to go back.

        Raises:
            NumericsError: too many steps in a row that are not finite, or a spike that ends the run.
        """
        found, gone = self._stragglers.end(step)
        report(found, gone, step)
        for one in found:
            self._writer.write("event", step, event="straggler", rank=one.rank, host=one.host, ratio=one.ratio)
        self._note_nonfinite(step, result)
        return self.judge.spiked and self._note_spike(step, result)

    def compare(self, step: int, *, saves: bool) -> None:
        """Compare replicas where that is due: at the interval, and before whatever is going to be saved.

        Raises:
            CorruptionError: they differ.
        """
        every = self._config.replica_interval
        if every and (saves or step % every == 0):
            newest = self._saving.newest
            check_replicas(self.parts, step, None if newest is None else step_of(newest))

    def _note_nonfinite(self, step: int, result: StepResult) -> None:
        values: dict[str, Any] = {"loss": result.loss, "grad_norm": result.grad_norm}
        origin = ""
        if result.recomputed and result.finite:
            text = "a step that was not finite is when computed again: that is taken"
            event(logger, text, level=logging.WARNING, step=step, **values)
            self._writer.write("event", step, event="recomputed", loss=result.loss)
        if not result.finite:
            origin = str(result.origin) if result.origin else "finite when it was run again: a fault that came and went"
            event(logger, "step skipped: not finite", level=logging.WARNING, step=step, **values, origin=origin)
            found = result.origin.fields() if result.origin else {}
            self._writer.write("event", step, event="skipped", origin=origin, **found)
        self.nonfinite.observe(step, finite=result.finite, **values, origin=origin)

    def _note_spike(self, step: int, result: StepResult) -> bool:
        action = self._config.spike_action
        values: dict[str, Any] = {"loss": result.loss, "limit": self.judge.limit, "action": action}
        event(logger, "loss spike", level=logging.WARNING, step=step, **values)
        self._writer.write("event", step, event="spike", **values)
        if not result.taken and action != "rewind":
            self.judge.refuse(step, result.loss, self._config)
        return action == "rewind"
