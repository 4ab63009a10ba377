"""Starts a run again after a fault, as long as that brings it further. No torch."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

from megafp8.checkpoint.folders import latest, step_of
from megafp8.core.errors import (
    EXIT_CORRUPT,
    EXIT_HUNG,
    EXIT_INTERNAL,
    EXIT_INTERRUPTED,
    EXIT_NO_PROGRESS,
    EXIT_PEER_LOST,
    EXIT_PREEMPTED,
)
from megafp8.train.local_ranks import PASSED_ON

_BY_SIGNAL = 128  # codes above are of processes that were killed
_TOLD_TO_STOP = (EXIT_INTERRUPTED, _BY_SIGNAL + signal.SIGTERM)
_MAX_PAUSE_SECONDS = 30.0


def may_restart(code: int) -> bool:
    """Whether another start may help: not where a person, a limit or an input that stays the same ended the run."""
    faults = (EXIT_INTERNAL, EXIT_CORRUPT, EXIT_HUNG, EXIT_PEER_LOST)
    return code in faults or (code > _BY_SIGNAL and code not in _TOLD_TO_STOP)


def restart_loop(attempt: Callable[[], int], run: Path, limit: int, *, pause_seconds: float = 1.0) -> int:
    """Call `attempt` until it ends for good, or `limit` restarts in a row brought no new checkpoint.

    Args:
        attempt: runs the ranks to their end and returns the exit code.
        run: the run folder, whose newest complete checkpoint says how far the run has come.
        pause_seconds: before the first of restarts in a row; doubled for each more, up to 30 s.

    Returns:
        the last attempt's exit code, or EXIT_NO_PROGRESS.
    """
    stopped: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        stopped.append(number)

    idle = 0
    while True:
        before = _step(run)
        code = attempt()
        if not may_restart(code):
            return code
        after = _step(run)
        idle = idle + 1 if after == before else 0
        _say(f"ended with exit code {code}, newest checkpoint: {'none' if after < 0 else f'step {after}'}")
        if idle > limit:
            _say(f"{idle} starts in a row brought no new checkpoint (--restarts {limit}): giving up")
            return EXIT_NO_PROGRESS
        old = {number: signal.signal(number, note) for number in PASSED_ON}
        end = time.monotonic() + min(_MAX_PAUSE_SECONDS, pause_seconds * 2**idle)
        while time.monotonic() < end and not stopped:
            time.sleep(0.05)
        for number, handler in old.items():
            signal.signal(number, handler)
        if stopped:
            _say(f"stopped by {signal.Signals(stopped[0]).name} before it was started again")
            return EXIT_PREEMPTED
        _say(f"starting again{f', {idle} of {limit} without a new checkpoint' if idle else ''}")


def launch(command: Sequence[str], run: Path) -> int:
    """Run a launcher (srun, torchrun, …) to its end, signals passed on; returns the run's exit code.

    Launchers give back a code of their own; what counts is the one that rank 0's keeper left in the run folder.
    """
    path = run / "exit.json"
    path.unlink(missing_ok=True)
    process = subprocess.Popen(command, start_new_session=True)

    def forward(number: int, frame: FrameType | None) -> None:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM if number == signal.SIGHUP else number)

    old = {number: signal.signal(number, forward) for number in PASSED_ON}
    try:
        code = process.wait()
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
    code = _BY_SIGNAL - code if code < 0 else code
    try:
        return int(json.loads(path.read_bytes())["code"]) or code
    except (OSError, ValueError, KeyError):
        return code


def _step(run: Path) -> int:
    newest = latest(run / "checkpoints")
    return -1 if newest is None else step_of(newest)


def _say(text: str) -> None:
    sys.stderr.write(f"megafp8 pretrain: {text}\n")
    sys.stderr.flush()
