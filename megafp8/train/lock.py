"""One run a folder: the kernel's lock where the file system shares it, a heartbeat where it does not."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import secrets
import socket
import threading
import time
from pathlib import Path
from typing import IO, Any

from megafp8.core.errors import ResourceError
from megafp8.core.jsonio import resource_error
from megafp8.core.log import event, get_logger

logger = get_logger(__name__)
_PATIENCE_SECONDS = 2.0  # a run that was killed a moment ago may still be leaving
_BEAT_SECONDS = 5.0
_STALE_SECONDS = 4 * _BEAT_SECONDS
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)


class RunLock:
    """Keeps two jobs out of one run folder; the kernel lets go of it when the process ends, however it ends.

    Some network file systems give each host locks of its own. There the lock file's time tells: its holder renews it
    every 5 s, and a job on another host takes over only what has not been renewed for 20 s.
    """

    def __init__(self, folder: Path, *, beat_seconds: float = _BEAT_SECONDS, stale_seconds: float = _STALE_SECONDS):
        self._path = folder / "lock"
        self._beat, self._stale = beat_seconds, stale_seconds
        self._file: IO[str] | None = None
        self._own: dict[str, Any] = {}
        self._over = threading.Event()
        self.lost = False

    def acquire(self) -> None:
        """Take the lock; a stale one is taken over, which is said.

        Raises:
            ResourceError: another live process holds it (its host and pid are named), or no permission.
        """
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            file = open(self._path, "a+", encoding="utf-8")  # noqa: SIM115 - held as long as the lock
        except OSError as error:
            raise resource_error(error, self._path) from error
        try:
            self._wait_for_kernel(file)
            self._wait_for_other_host(file)
        except ResourceError:
            file.close()
            raise
        self._own = {
            "host": socket.gethostname(), "pid": os.getpid(), "since": int(time.time()), "token": secrets.token_hex(8)
        }  # fmt: skip
        self._write(file, self._own)
        self._file = file
        threading.Thread(target=self._keep_alive, name="run lock", daemon=True).start()

    def check(self) -> None:
        """Raise ResourceError if another job has taken this folder over."""
        if self.lost:
            raise ResourceError(
                f"{self._path}: is no longer this job's: it was removed, or taken over when nothing was heard for "
                f"{self._stale:g} s; stopping, so that two jobs do not write into one folder"
            )

    def release(self) -> None:
        """Let go; the file stays, since removing it would race with the next process."""
        self._over.set()
        if self._file is not None:
            if not self.lost:
                with contextlib.suppress(OSError):
                    self._write(self._file, {**self._own, "released": True})
            self._file.close()
            self._file = None

    def _wait_for_kernel(self, file: IO[str]) -> None:
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except OSError as error:
                if error.errno in _NO_LOCKS:
                    event(logger, "no locks on this file system: a heartbeat guards the run folder", path=self._path)
                    return
            if time.monotonic() >= deadline:
                raise self._in_use(_read(file))
            time.sleep(0.05)

    def _wait_for_other_host(self, file: IO[str]) -> None:
        holder = _read(file)
        if not holder or holder.get("released"):
            return
        who: dict[str, Any] = {"host": holder.get("host"), "pid": holder.get("pid")}
        if holder.get("host") != socket.gethostname():
            event(logger, "waiting to see whether the run folder's last job is alive", level=logging.WARNING, **who)
            seen, deadline = os.fstat(file.fileno()).st_mtime_ns, time.monotonic() + self._stale
            while time.monotonic() < deadline:
                time.sleep(min(1.0, self._beat / 2))
                if os.fstat(file.fileno()).st_mtime_ns != seen:  # by the file server's clock alone
                    raise self._in_use(_read(file) or holder)
        event(logger, "taking over the lock of a job that ended without letting go", level=logging.WARNING, **who)

    def _in_use(self, holder: dict[str, Any]) -> ResourceError:
        who = json.dumps({k: v for k, v in holder.items() if k != "token"}) if holder else "an unknown process"
        return ResourceError(
            f"{self._path.parent}: the run folder is in use by {who}; stop it or choose another run.dir"
        )

    @staticmethod
    def _write(file: IO[str], record: dict[str, Any]) -> None:
        file.seek(0)
        file.truncate(0)
        file.write(json.dumps(record))
        file.flush()

    def _keep_alive(self) -> None:
        while not self._over.wait(self._beat):
            file = self._file
            if file is None:
                return
            try:
                there = self._path.stat()
                same = there.st_ino == os.fstat(file.fileno()).st_ino
                if not same or json.loads(self._path.read_text()).get("token") != self._own["token"]:
                    self.lost = True
                    return
                os.utime(self._path)
            except FileNotFoundError:
                self.lost = True
                return
            except (OSError, ValueError):  # a network file system that does not answer now: the next beat
                continue


def _read(file: IO[str]) -> dict[str, Any]:
    file.seek(0)
    try:
        record = json.loads(file.read() or "{}")
    except ValueError:
        return {}
    return record if isinstance(record, dict) else {}
