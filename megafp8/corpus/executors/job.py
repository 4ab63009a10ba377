"""A stage's tasks as files, for workers that share nothing with the run but a file system.

Workers take tasks by leases: a file that is made once, and touched while its owner lives. A lease that nobody has
touched for a while is taken over. Two owners at once, as after a network failure, do no harm: tasks bear it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import shutil
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from megafp8.core.errors import DataError, is_fault
from megafp8.core.jsonio import read_json, write_json
from megafp8.core.log import event, get_logger, set_up
from megafp8.corpus.executors.interface import Attempts
from megafp8.corpus.executors.local import describe
from megafp8.corpus.tasks import Task, load_record, run_task

FOLDER = "jobs"
_log = get_logger(__name__)


class Job:
    """The tasks of one stage, in `jobs/ID/` below the folder of stages.

    Attributes:
        folder: holds `tasks.json`, leases, and `TASK.failed` for tasks that were set aside.
    """

    def __init__(self, root: Path, folder: Path, tasks: Sequence[Task], retries: int, lease_seconds: float) -> None:
        self.root, self.folder, self.tasks = root, folder, list(tasks)
        self.retries, self.lease_seconds = retries, lease_seconds

    @classmethod
    def at(cls, root: Path, tasks: Sequence[Task], retries: int, lease_seconds: float) -> Job:
        """The job of these tasks, written or not."""
        digest = hashlib.sha256(" ".join(task.id for task in tasks).encode()).hexdigest()[:16]
        return cls(root, root / FOLDER / digest, tasks, retries, lease_seconds)

    def write(self) -> None:
        """Make its folder anew: what was set aside is tried again."""
        shutil.rmtree(self.folder, ignore_errors=True)
        values = {
            "root": str(self.root),
            "retries": self.retries,
            "lease_seconds": self.lease_seconds,
            "tasks": [task.to_json() for task in self.tasks],
        }
        write_json(self.folder / "tasks.json", values)

    @classmethod
    def load(cls, folder: Path) -> Job:
        """The job that `write` wrote."""
        values = read_json(folder / "tasks.json")
        tasks = [Task.from_json(one) for one in values["tasks"]]
        return cls(Path(values["root"]), folder, tasks, values["retries"], values["lease_seconds"])

    def failure(self, task: Task) -> Mapping[str, Any]:
        """`kind` and `message` of a task that was set aside, else {}."""
        path = self.folder / f"{task.id}.failed"
        return read_json(path) if path.is_file() else {}

    def set_aside(self, task: Task, kind: str, message: str) -> None:
        """Give up a task."""
        write_json(self.folder / f"{task.id}.failed", {"kind": kind, "message": message})

    def acquire(self, task: Task) -> int:
        """Take a task: the number of this attempt, or 0 if someone else has it."""
        path = self.folder / f"{task.id}.lease"
        try:
            with open(path, "x", encoding="utf-8") as file:
                file.write("1")
            return 1
        except FileExistsError:
            pass
        with contextlib.suppress(OSError, ValueError):  # it was released, or is being written, in this moment
            if time.time() + self._clock_offset - path.stat().st_mtime < self.lease_seconds:
                return 0
            attempt = int(path.read_text() or "1") + 1
            path.write_text(str(attempt))
            return attempt
        return 0

    @cached_property
    def _clock_offset(self) -> float:
        """By how much the file system's clock is ahead of this machine's."""
        probe = self.folder / f".clock.{secrets.token_hex(4)}"
        probe.touch()
        now = probe.stat().st_mtime
        probe.unlink()
        return now - time.time()

    @contextlib.contextmanager
    def held(self, task: Task) -> Iterator[None]:
        """Keep a lease alive."""
        path, over = self.folder / f"{task.id}.lease", threading.Event()

        def touch() -> None:
            while not over.wait(self.lease_seconds / 5):
                with contextlib.suppress(OSError):
                    os.utime(path)

        thread = threading.Thread(target=touch, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


def work(folder: Path, element: int, elements: int) -> None:
    """A worker's life: takes tasks until none is left, and waits a while for those of workers that may be dead."""
    job = Job.load(folder)
    start = len(job.tasks) * element // elements  # workers begin at different tasks, and then help each other
    order = [*job.tasks[start:], *job.tasks[:start]]
    last = time.monotonic()
    while True:
        left = [task for task in order if not job.failure(task) and not load_record(job.root, task)]
        if not left or time.monotonic() - last > 2 * job.lease_seconds:
            return
        for task in left:
            if attempt := job.acquire(task):
                with job.held(task):
                    _bring_to_end(job, task, attempt)
                last = time.monotonic()
        time.sleep(job.lease_seconds / 4)


def _bring_to_end(job: Job, task: Task, attempt: int) -> None:
    """Attempts until the task is done or set aside."""
    attempts = Attempts(job.root, job.retries, {task.id: attempt - 1})
    if attempt > job.retries + 1:
        message = f"{attempt - 1} workers that had it did not come back (out of memory, or killed)"
        attempts.failure(task, "died", message, "")
        job.set_aside(task, "died", message)
        return
    while True:
        try:
            run_task(job.root, task)
            return
        except BaseException as error:
            if not is_fault(error):
                raise
            kind, message, detail = describe(error)
            event(_log, "task failed", task=f"{task.stage} {task.name}", because=message)
            if load_record(job.root, task):  # another copy has made it
                return
            if attempts.failure(task, kind, message, detail).is_final:
                job.set_aside(task, kind, message)
                return


def main(words: Sequence[str]) -> int:
    """`python -m megafp8.corpus.executors.job FOLDER ELEMENT ELEMENTS`."""
    set_up()
    try:
        work(Path(words[0]), int(words[1]), int(words[2]))
    except (DataError, FileNotFoundError) as error:  # the run has ended and taken its job away
        event(_log, "nothing to do", because=json.dumps(str(error)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
