"""When a run saves, how, and what becomes of a save that fails; what is logged about it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from megafp8.checkpoint.asynchronous import AsyncSaver, Saved
from megafp8.checkpoint.folders import step_of
from megafp8.checkpoint.local import LocalSaveError, forget_local, save_local
from megafp8.checkpoint.retention import prune_or_warn
from megafp8.checkpoint.staging import Staging
from megafp8.core.errors import CheckpointError, ResourceError
from megafp8.core.heartbeat import HEART
from megafp8.core.log import event, get_logger
from megafp8.train.folder import local_root
from megafp8.train.metrics import MetricsWriter
from megafp8.train.setup import Parts
from megafp8.train.state import save_run, with_state

logger = get_logger(__name__)
Result = TypeVar("Result")


class Saving:
    """The saves of one attempt at a run; all methods but `close` are collective.

    Attributes:
        newest: the newest durable checkpoint that is committed, None if there is none.
    """

    def __init__(self, parts: Parts, writer: MetricsWriter, newest: Path | None) -> None:
        config = parts.config.checkpoint
        self.parts, self.writer = parts, writer
        self._root, self._local = parts.config.dir / "checkpoints", local_root(parts.config)
        self.newest = newest if newest is not None and newest.parent == self._root else None
        self._staging = Staging(parts.config.train.timeout_seconds)
        self._saver = AsyncSaver(self._root, parts.mesh, config, self._staging) if config.asynchronous else None
        self._failed = 0  # saves in a row
        self._stall = 0.0

    def step_done(self, step: int, progress: dict[str, Any]) -> None:
        """After every step: note what has been committed meanwhile, and save if it is time to."""
        if self._saver is not None:
            self._note(self._attempt(step, self._saver.poll))
        config = self.parts.config.checkpoint
        if step == self.parts.config.train.steps:  # `last` does it
            return
        if config.interval and step % config.interval == 0:
            self._save(step, progress)
        elif self._local is not None and step % config.local_interval == 0:
            self._save_local(step, progress)

    def last(self, step: int, progress: dict[str, Any]) -> None:
        """Save the step that a run ends or stops with, if it is not; on return it is committed.

        Raises:
            MegaError: it is not; a run may not end as if it were.
        """
        self.settle()
        if self.newest is None or step_of(self.newest) != step:
            self._save(step, progress, must=True)
            self.settle(must=True)
        if self._local is not None:  # the durable one is newer than all of them
            forget_local(self._local, self.parts.mesh, above=-1)

    def settle(self, *, must: bool = False) -> None:
        """Wait for the save that is under way, so that what is on disk can be loaded."""
        if self._saver is not None and self._saver.busy:
            HEART.beat("save")
            self._note(self._attempt(0, self._saver.wait, must=must))

    def close(self) -> None:
        """End the process that writes; a save that is under way is given up."""
        self._staging.close()

    def _attempt(self, step: int, act: Callable[[], Result], *, must: bool = False) -> Result | None:
        """What `act` returns, or None if that save failed and may: the next one is a new attempt.

        Only what fails on all ranks alike stands in `act`: a rank that went on alone would wait for the others.
        """
        try:
            return act()
        except LocalSaveError as error:
            self.writer.write("event", step, event="local save failed", reason=str(error))
            event(logger, "a local save failed; the run goes on", level=logging.WARNING, step=step, reason=error)
        except (CheckpointError, ResourceError) as error:
            self._failed += 1
            limit = 0 if must else self.parts.config.checkpoint.max_failed_saves
            self.writer.write("event", step, event="save failed", reason=str(error), in_a_row=self._failed)
            if self._failed > limit:
                raise
            counts: dict[str, Any] = {"in_a_row": self._failed, "limit": limit}
            event(logger, "a save failed; the run goes on", level=logging.WARNING, step=step, reason=error, **counts)
        return None

    def _save(self, step: int, progress: dict[str, Any], *, must: bool = False) -> None:
        self.writer.flush()
        HEART.beat("save")
        start = time.perf_counter()
        if self._saver is not None:
            self.settle(must=must)
            self._attempt(step, partial(with_state, self.parts, step, progress, self._saver.begin), must=must)
            self._stall = time.perf_counter() - start
            return
        path = self._attempt(step, partial(save_run, self.parts, step, progress), must=must)
        if path is not None:
            seconds = time.perf_counter() - start
            self._committed(path, step, seconds=seconds, stall_seconds=seconds)
            if self.parts.mesh.rank == 0:
                prune_or_warn(self._root, self.parts.config.checkpoint)

    def _save_local(self, step: int, progress: dict[str, Any]) -> None:
        """A local checkpoint; left out where one would have to wait for the disk."""
        assert self._local is not None
        HEART.beat("save")
        saver, start = self._saver, time.perf_counter()
        if saver is None:
            how: dict[str, Any] = {"mesh": self.parts.mesh, "threads": self.parts.config.checkpoint.write_threads}
            take = partial(save_local, self._local, **how)
            if self._attempt(step, partial(with_state, self.parts, step, progress, take)) is not None:
                seconds = time.perf_counter() - start
                self.writer.write("event", step, event="saved locally", seconds=seconds, stall_seconds=seconds)
        elif saver.busy:
            event(logger, "no local checkpoint: the save before is still being written", step=step)
        else:
            with_state(self.parts, step, progress, partial(saver.begin_local, self._local))
            self._stall = time.perf_counter() - start

    def _note(self, saved: Saved | None) -> None:
        if saved is not None and saved.local:
            self.writer.write("event", saved.step, event="saved locally", **self._times(saved))
        elif saved is not None:
            self._committed(saved.path, saved.step, **self._times(saved))

    def _times(self, saved: Saved) -> dict[str, float]:
        return {"seconds": saved.seconds, "stall_seconds": self._stall, "delay_seconds": saved.delay}

    def _committed(self, path: Path, step: int, **seconds: float) -> None:
        self._failed, self.newest = 0, path
        self.writer.write("event", step, event="saved", **seconds)
