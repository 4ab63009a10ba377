"""What the run asks of an executor, and what an executor tells the run.

An executor brings tasks to an end: done (its record is there, `run_task` wrote it) or set aside after its retries,
with a log beside the record's place. It trusts records, and nothing else, about what is done.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from megafp8.core.errors import ConfigError, DataError, ResourceError
from megafp8.corpus.tasks import Task

# the same bytes would be refused again: no retry
FINAL = ("DataError", "ConfigError")


@dataclass(frozen=True)
class Failure:
    """Why a task failed.

    Attributes:
        kind: name of the error's class; "died" if its process did not come back.
        is_final: it was set aside.
    """

    task: Task
    kind: str
    message: str
    log: Path
    is_final: bool

    @property
    def error(self) -> type[Exception]:
        """The house's error for it."""
        return {"DataError": DataError, "ConfigError": ConfigError}.get(self.kind, ResourceError)


class Listener(Protocol):
    """Hears what happens to tasks."""

    def progress(self, task: Task, counts: Mapping[str, int]) -> None:
        """How far a running task is."""
        ...

    def done(self, task: Task, record: Mapping[str, Any]) -> None:
        """A task is done."""
        ...

    def failed(self, failure: Failure) -> None:
        """A task failed; it is tried again, or was set aside."""
        ...


class Executor(Protocol):
    """Where tasks run."""

    def run(self, root: Path, tasks: Sequence[Task], listener: Listener) -> None:
        """Bring each of the tasks to an end; they are different ones, and none is done.

        Raises:
            ResourceError: nothing can run any more (disk full, no cluster).
        """
        ...

    def close(self) -> None:
        """Stop what still runs."""
        ...


@dataclass
class Attempts:
    """How often each task has been tried, with the log of its failures."""

    root: Path
    retries: int
    counts: dict[str, int] = field(default_factory=dict)

    def failure(self, task: Task, kind: str, message: str, detail: str) -> Failure:
        """Enter one more failure."""
        tried = self.counts[task.id] = self.counts.get(task.id, 0) + 1
        path = log_path(self.root, task)
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "a", encoding="utf-8") as log:
            log.write(f"--- {task.stage} {task.name}, attempt {tried}: {kind}: {message}\n{detail.rstrip()}\n")
        return Failure(task, kind, message, path, kind in FINAL or tried > self.retries)


def log_path(root: Path, task: Task) -> Path:
    """Where the log of a task's failures lies."""
    return root / task.stage / f"{task.id}.log"
