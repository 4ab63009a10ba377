"""When a run saves, how, and what becomes of a save that fails; what is logged about it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

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
        """After every step: note what has been committed meanwhile, and save if `checkpoint.interval` says so."""
        self._guarded(step, self._poll)
        config = self.parts.config.checkpoint
        if step == self.parts.config.train.steps:  # `last` does it
            return
        if config.interval and step % config.interval == 0:
            self._guarded(step, lambda: self._save(step, progress))
        elif self._local is not None and step % config.local_interval == 0:
            self._guarded(step, lambda: self._save_local(step, progress))

    def last(self, step: int, progress: dict[str, Any]) -> None:
        """Save the step that a run ends or stops with, if it is not; on return it is committed.

        Raises:
            MegaError: it is not; a run may not end as if it were.
        """
        if self._saver is not None and self._saver.busy:
            self._guarded(step, self._wait)
        if self.newest is None or step_of(self.newest) != step:
            self._save(step, progress)
            self._wait()
        if self._local is not None:  # the durable one is newer than all of them
            forget_local(self._local, self.parts.mesh, above=-1)

    def settle(self) -> None:
        """Wait for the save that is under way, so that what is on disk can be loaded."""
        self._guarded(0, self._wait)

    def close(self) -> None:
        """End the process that writes; a save that is under way is given up."""
        self._staging.close()

    def _guarded(self, step: int, act: Callable[[], None]) -> None:
        """Let saves fail as often in a row as `checkpoint.max_failed_saves` allows; the next one is a new attempt."""
        limit = self.parts.config.checkpoint.max_failed_saves
        try:
            act()
        except LocalSaveError as error:
            self.writer.write("event", step, event="local save failed", reason=str(error))
            event(logger, "a local save failed; the run goes on", level=logging.WARNING, step=step, reason=error)
        except (CheckpointError, ResourceError) as error:
            self._failed += 1
            self.writer.write("event", step, event="save failed", reason=str(error), in_a_row=self._failed)
            if self._failed > limit:
                raise
            counts: dict[str, Any] = {"in_a_row": self._failed, "limit": limit}
            event(logger, "a save failed; the run goes on", level=logging.WARNING, step=step, reason=error, **counts)

    def _save(self, step: int, progress: dict[str, Any]) -> None:
        HEART.beat("save")
        self.writer.flush()
        if self._saver is None:
            self._save_now(step, progress)
            return
        began = time.perf_counter()
        self._wait()
        with_state(self.parts, step, progress, self._saver.begin)
        self._stall = time.perf_counter() - began

    def _save_now(self, step: int, progress: dict[str, Any]) -> None:
        start = time.perf_counter()
        path = save_run(self.parts, step, progress)
        seconds = time.perf_counter() - start
        self._committed(path, step, seconds=seconds, stall_seconds=seconds)
        if self.parts.mesh.rank == 0:
            prune_or_warn(self._root, self.parts.config.checkpoint)

    def _save_local(self, step: int, progress: dict[str, Any]) -> None:
        """A local checkpoint; left out where one would have to wait for the disk."""
        assert self._local is not None
        HEART.beat("save")
        config, saver, root = self.parts.config.checkpoint, self._saver, self._local
        if saver is None:
            start = time.perf_counter()
            how: dict[str, Any] = {"mesh": self.parts.mesh, "threads": config.write_threads}
            with_state(self.parts, step, progress, partial(save_local, root, **how))
            seconds = time.perf_counter() - start
            self.writer.write("event", step, event="saved locally", seconds=seconds, stall_seconds=seconds)
        elif saver.busy:
            event(logger, "no local checkpoint: the save before is still being written", step=step)
        else:
            self._stall = with_state(self.parts, step, progress, partial(saver.begin_local, root))

    def _poll(self) -> None:
        if self._saver is not None:
            self._note(self._saver.poll())

    def _wait(self) -> None:
        HEART.beat("save")
        if self._saver is not None:
            self._note(self._saver.wait())

    def _note(self, saved: Saved | None) -> None:
        if saved is not None and saved.local:
            times = {"seconds": saved.seconds, "stall_seconds": self._stall}
            self.writer.write("event", saved.step, event="saved locally", **times)
        elif saved is not None:
            self._committed(saved.path, saved.step, seconds=saved.seconds, stall_seconds=self._stall)

    def _committed(self, path: Path, step: int, **seconds: float) -> None:
        self._failed, self.newest = 0, path
        self.writer.write("event", step, event="saved", **seconds)
