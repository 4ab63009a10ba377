"""A command as a whole process: CPU-seconds and wall time of it and all it started, and the memory of the tree."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_SAMPLE_SECONDS = 0.1


@dataclass(frozen=True)
class Usage:
    """What a command took.

    Attributes:
        cpu_seconds: user and system, of the process and those of its children that it waited for.
        peak_bytes: largest sum over the tree of proportional set sizes (a shared page counts once), ten looks a second.
        held_bytes: the same without pages of files, which the system drops when it wants their memory.
    """

    seconds: float
    cpu_seconds: float
    peak_bytes: int
    held_bytes: int


def run(words: Sequence[str], log: Path, *, environment: Mapping[str, str] | None = None) -> Usage:
    """Run a command to its end.

    Raises:
        SystemExit: it failed; its last lines are in the message.
    """
    start = time.perf_counter()
    with open(log, "wb") as out:
        process = subprocess.Popen(
            list(words), stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
            env={**os.environ, **(environment or {})},
        )  # fmt: skip
    with _Memory(process.pid) as memory:
        _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        last = "\n".join(log.read_text(errors="replace").splitlines()[-12:])
        raise SystemExit(f"{' '.join(words)}: exit code {process.returncode}\n{last}")
    return Usage(time.perf_counter() - start, usage.ru_utime + usage.ru_stime, *memory.peaks)


def python(*words: str) -> list[str]:
    """A command of this interpreter."""
    return [sys.executable, *words]


class _Memory:
    """Looks at a process tree until told to stop; the system keeps a peak for each process, not for a tree."""

    def __init__(self, pid: int) -> None:
        self._pid, self.peaks = pid, [0, 0]
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        while True:
            looks = [_proportional(pid) for pid in _tree(self._pid)]
            self.peaks = [max(peak, sum(found)) for peak, found in zip(self.peaks, zip(*looks))]
            if self._over.wait(_SAMPLE_SECONDS):
                return

    def __enter__(self) -> _Memory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


def _tree(pid: int) -> Iterator[int]:
    yield pid
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:  # it has ended
        return
    for child in children:
        yield from _tree(int(child))


def _proportional(pid: int) -> tuple[int, int]:
    """(all, without pages of files) of a process; zeros of one that has ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    except OSError:
        return 0, 0
    found = {name: 1024 * int(value.split()[0]) for name, value in (line.split(":") for line in lines)}
    return found.get("Pss", 0), found.get("Pss_Anon", 0) + found.get("Pss_Shmem", 0)
