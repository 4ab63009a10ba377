"""Tasks on a Ray cluster, or on a Ray of this machine alone: Ray places them, retries and records are ours."""

from __future__ import annotations

import os
import socket
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray

from megafp8.core.errors import ResourceError, is_fault
from megafp8.corpus.config import CorpusConfig
from megafp8.corpus.executors.interface import Attempts, Listener
from megafp8.corpus.executors.local import describe
from megafp8.corpus.tasks import Task, run_task

_AHEAD = 2  # tasks given to Ray for each CPU, so that none waits for this process
_PACKAGE = Path(__file__).resolve().parents[3]


class OnRay:
    """Each task is a Ray task of one CPU; `executor.address` names the cluster, without it Ray starts here."""

    def __init__(self, config: CorpusConfig) -> None:
        self._retries = config.executor.retries
        address = config.executor.address
        _check(address)
        path = os.pathsep.join(filter(None, [str(_PACKAGE), os.environ.get("PYTHONPATH", "")]))
        try:
            ray.init(
                address=address or "local",
                num_cpus=None if address else config.output.workers or os.cpu_count(),
                include_dashboard=False if not address else None,
                runtime_env={"env_vars": {"PYTHONPATH": path}},
                log_to_driver=False,
                logging_level="WARNING",
            )
        except (ConnectionError, RuntimeError, ValueError) as error:
            where = f"no Ray at executor.address {address!r}" if address else "Ray does not start here"
            raise ResourceError(f"{where}: {str(error).strip().splitlines()[0]}") from None
        self._remote = ray.remote(num_cpus=1, max_retries=0)(attempt)

    def run(self, root: Path, tasks: Sequence[Task], listener: Listener) -> None:
        attempts, waiting = Attempts(root, self._retries), deque(tasks)
        place = (str(root.absolute()), os.getcwd())
        running: dict[Any, Task] = {}
        while waiting or running:
            ahead = _AHEAD * max(1, int(ray.cluster_resources().get("CPU", 1)))
            while waiting and len(running) < ahead:
                task = waiting.popleft()
                running[self._remote.remote(*place, task)] = task
            ready, _ = ray.wait(list(running), timeout=10)
            for reference in ready:
                task = running.pop(reference)
                kind, *what = _result(reference)
                if kind == "done":
                    listener.done(task, what[0])
                    continue
                if what[0] == "ResourceError":
                    raise ResourceError(what[1])
                failure = attempts.failure(task, *what)
                listener.failed(failure)
                if not failure.is_final:
                    waiting.append(task)

    def close(self) -> None:
        ray.shutdown()


def _check(address: str) -> None:
    """Ray itself asks an address where nobody listens for minutes."""
    host, _, port = address.rpartition(":")
    if host and port.isdigit():
        try:
            socket.create_connection((host, int(port)), timeout=10).close()
        except OSError as error:
            why = error.strerror or str(error)
            raise ResourceError(f"no Ray at executor.address {address!r}: {why}; start it, or correct it") from None


def attempt(root: str, folder: str, task: Task) -> tuple[Any, ...]:
    """Runs in a Ray worker, in the folder of the run, from which the user's paths count."""
    try:
        os.chdir(folder)
        return ("done", run_task(Path(root), task))
    except BaseException as error:
        if not is_fault(error):
            raise
        return ("failed", *describe(error))


def _result(reference: Any) -> tuple[Any, ...]:
    try:
        result: tuple[Any, ...] = ray.get(reference)
        return result
    except ray.exceptions.RayError as error:  # its worker, or its node, is gone
        message = f"its Ray worker did not come back: {str(error).strip().splitlines()[0]}"
        return ("failed", "died", message, str(error))


EXECUTOR = OnRay
