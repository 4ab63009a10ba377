"""Why a run should stop before its end: a signal, its time, a file. All ranks decide alike."""

from __future__ import annotations

import json
import time
from pathlib import Path

import torch

from megafp8.core.errors import EXIT_PREEMPTED, EXIT_STOP_FILE, NoProgressError
from megafp8.core.heartbeat import HEART
from megafp8.core.jsonio import write_json
from megafp8.parallel.collectives import all_reduce_
from megafp8.parallel.mesh import Mesh
from megafp8.parallel.mesh_config import RANK_ORDER
from megafp8.train.config import RunConfig
from megafp8.train.folder import STOP_FILE
from megafp8.train.lock import RunLock
from megafp8.train.signals import StopRequest

_REASONS = ("", "time", "signal", "file")  # where ranks see several, the last one counts
_LOOK_SECONDS = 1.0  # between looks for the file: it may lie on a network
_MAX_IDLE_STOPS = {"time": 2, "signal": 5}  # a machine that is taken away may be so early several times


class Stops:
    """What asks this run to stop."""

    def __init__(self, config: RunConfig, mesh: Mesh, request: StopRequest, lock: RunLock) -> None:
        self._config, self._mesh, self._request, self._lock = config, mesh, request, lock
        self._looked, self._there = -_LOOK_SECONDS, False

    def agreed(self) -> str:
        """The reason to stop now, equal on all ranks; empty: none. Collective.

        Raises:
            ResourceError: rank 0 no longer holds the run folder.
        """
        self._lock.check()
        flag = torch.tensor([float(_REASONS.index(self._own()))])
        all_reduce_(flag, self._mesh.group_of(RANK_ORDER), "max")
        return _REASONS[int(flag.item())]

    def describe(self, reason: str) -> str:
        """The reason in words, as this rank knows them."""
        if reason == "signal":
            return self._request.received or "a signal to another rank"
        if reason == "time":
            return f"train.exit_after_seconds = {self._config.train.exit_after_seconds:g}"
        return str(self._config.dir / STOP_FILE)

    def _own(self) -> str:
        if self._file_there():
            return "file"
        if self._request.received:
            return "signal"
        limit = self._config.train.exit_after_seconds
        return "time" if limit and HEART.seconds >= limit else ""

    def _file_there(self) -> bool:
        if self._mesh.rank == 0 and time.monotonic() - self._looked >= _LOOK_SECONDS:
            self._looked, self._there = time.monotonic(), (self._config.dir / STOP_FILE).exists()
        return self._there


def exit_code(reason: str) -> int:
    """Of a run that stopped for `reason`."""
    return EXIT_STOP_FILE if reason == "file" else EXIT_PREEMPTED


def stopped_before(folder: Path) -> int:
    """The code with which the same job's last attempt stopped, if it was told to; else 0. Rank 0 only.

    torchrun takes every exit code but 0 for a fault and starts the ranks again, which must not undo a stop.
    """
    facts = HEART.facts
    if not facts.get("restarts"):
        return 0
    try:
        record = json.loads((folder / "exit.json").read_bytes())
    except (OSError, ValueError):
        return 0
    same = record.get("job") == facts.get("job") and record.get("code") in (EXIT_PREEMPTED, EXIT_STOP_FILE)
    return int(record["code"]) if same else 0


def count_idle_stops(folder: Path, step: int, *, first_step: int, reason: str) -> None:
    """Note a stop at `step`, for `reason`, of an attempt that began at `first_step`; rank 0 only.

    Raises:
        NoProgressError: it is one of several in a row that came before a first step was taken. A chain of jobs that
            start each other would go on so for ever.
    """
    path = folder / "idle_stops.json"
    if step > first_step:
        path.unlink(missing_ok=True)
        return
    try:
        record = json.loads(path.read_bytes())
    except (OSError, ValueError):
        record = {}
    count = 1 + (int(record.get("count", 0)) if record.get("step") == step else 0)
    write_json(path, {"step": step, "count": count})
    if count >= _MAX_IDLE_STOPS[reason]:
        raise NoProgressError(
            f"{folder}: stopped {count} times in a row after step {step} before another step was taken; give it more "
            "time (train.exit_after_seconds, the job's time limit)"
        )
