"""What keeps a run safe: one process a run folder, and a limit on non-finite steps."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from pathlib import Path
from typing import IO

from megafp8.core.errors import NumericsError, ResourceError
from megafp8.core.jsonio import resource_error

_PATIENCE_SECONDS = 2.0  # a run that was killed a moment ago may still be leaving


def _locked(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


class RunLock:
    """An advisory lock on a run folder; the kernel lets go of it when the process ends, however it ends."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "lock"
        self._file: IO[str] | None = None

    def acquire(self) -> None:
        """Take the lock.

        Raises:
            ResourceError: another live process holds it (its host and pid are named), or no permission.
        """
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            file = open(self._path, "a+", encoding="utf-8")  # noqa: SIM115 - held as long as the lock
        except OSError as error:
            raise resource_error(error, self._path) from error
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while not _locked(file):
            if time.monotonic() < deadline:
                time.sleep(0.05)
                continue
            file.seek(0)
            holder = file.read().strip() or "an unknown process"
            file.close()
            raise ResourceError(
                f"{self._path.parent}: the run folder is in use by {holder}; stop it or choose another run.dir"
            )
        file.truncate(0)
        file.write(json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "since": int(time.time())}))
        file.flush()
        self._file = file

    def release(self) -> None:
        """Let go; the file stays, since removing it would race with the next process."""
        if self._file is not None:
            self._file.close()
            self._file = None


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
