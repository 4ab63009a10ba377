"""Tasks in processes of this machine. A process that dies fails its task, is replaced, and stops nothing else."""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
import time
import traceback
from collections import deque
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from megafp8.core.errors import MegaError, ResourceError, is_fault, one_line
from megafp8.corpus.config import CorpusConfig
from megafp8.corpus.executors.interface import Attempts, Listener
from megafp8.corpus.tasks import Task, run_task

_REPORT_SECONDS = 0.5


class Local:
    """`output.workers` processes, started when there is more than one task; a single task or worker runs right here."""

    def __init__(self, config: CorpusConfig) -> None:
        self._num_workers = config.output.workers or os.cpu_count() or 1
        self._retries = config.executor.retries
        self._workers: list[_Worker] = []

    def run(self, root: Path, tasks: Sequence[Task], listener: Listener) -> None:
        attempts = Attempts(root, self._retries)
        if self._num_workers == 1 or len(tasks) == 1:
            for task in tasks:
                while not _run_here(root, task, listener, attempts):
                    pass
            return
        waiting = deque(sorted(tasks, key=lambda task: -task.num_bytes))  # one that begins last must not be the longest
        running = 0
        while waiting or running:
            self._start(min(self._num_workers, len(waiting) + running))
            for worker in self._workers:
                if worker.task is None and waiting:
                    worker.give(root, waiting.popleft())
                    running += 1
            busy = {handle: w for w in self._workers if w.task for handle in (w.connection, w.process.sentinel)}
            assert busy, "a task is neither waiting nor with a worker"
            ready = multiprocessing.connection.wait(list(busy))
            for worker in {id(busy[handle]): busy[handle] for handle in ready}.values():  # type: ignore[index]
                again = self._hear(worker, listener, attempts)
                running -= worker.task is None
                if again is not None:
                    waiting.append(again)

    def _start(self, count: int) -> None:
        # one that died at work is heard first: its task must not go with it
        self._workers = [worker for worker in self._workers if worker.task is not None or worker.process.is_alive()]
        while len(self._workers) < count:
            self._workers.append(_Worker())

    def _hear(self, worker: _Worker, listener: Listener, attempts: Attempts) -> Task | None:
        """Take one message of a worker, or its death; returns a task that has to be tried again."""
        task = worker.task
        assert task is not None
        try:
            kind, *what = worker.connection.recv()
        except (EOFError, OSError):
            worker.process.join()
            code = worker.process.exitcode or 0
            how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
            message = (
                f"its worker process died {how} (out of memory, or killed); lower --output.workers if memory is short"
            )
            kind, what = "failed", ["died", message, ""]
        if kind == "progress":
            listener.progress(task, what[0])
            return None
        worker.task = None
        if kind == "done":
            listener.done(task, what[0])
            return None
        if what[0] == "ResourceError":
            raise ResourceError(what[1])
        failure = attempts.failure(task, *what)
        listener.failed(failure)
        return None if failure.is_final else task

    def close(self) -> None:
        for worker in self._workers:
            worker.connection.close()
            worker.process.terminate()
        for worker in self._workers:
            worker.process.join()
        self._workers = []


class _Worker:
    """One process, and what it works on."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()
        self.task: Task | None = None

    def give(self, root: Path, task: Task) -> None:
        self.task = task
        with contextlib.suppress(OSError):  # it died while it had nothing to do; its sentinel tells
            self.connection.send((root, task))


def _run_here(root: Path, task: Task, listener: Listener, attempts: Attempts) -> bool:
    """One attempt in this process; True if the task has come to its end."""
    try:
        record = run_task(root, task, lambda counts: listener.progress(task, counts))
    except ResourceError:
        raise
    except BaseException as error:
        if not is_fault(error):
            raise
        failure = attempts.failure(task, *describe(error))
        listener.failed(failure)
        return failure.is_final
    listener.done(task, record)
    return True


def describe(error: BaseException) -> tuple[str, str, str]:
    """(kind, one line, traceback) of a task's error."""
    message = str(error) if isinstance(error, MegaError) else f"{type(error).__name__}: {one_line(error)}"
    return type(error).__name__, message, traceback.format_exc()


def _serve(connection: Connection) -> None:
    """A worker process: tasks in, results out, until the parent closes the pipe."""
    start_worker()
    while True:
        try:
            root, task = connection.recv()
        except EOFError:
            return
        connection.send(_attempt(root, task, connection))


def _attempt(root: Path, task: Task, connection: Connection) -> tuple[Any, ...]:
    last = time.monotonic()

    def report(counts: dict[str, int]) -> None:
        nonlocal last
        if time.monotonic() - last >= _REPORT_SECONDS:
            last = time.monotonic()
            connection.send(("progress", counts))

    try:
        return ("done", run_task(root, task, report))
    except BaseException as error:
        if not is_fault(error):
            raise
        return ("failed", *describe(error))


def start_worker() -> None:
    """Ctrl-C is the parent's business; a parent that was killed must not leave workers waiting for ever."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=_exit_with, args=(parent.sentinel,), daemon=True).start()


def _exit_with(sentinel: int) -> None:
    multiprocessing.connection.wait([sentinel])
    os._exit(1)


EXECUTOR = Local
