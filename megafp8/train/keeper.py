"""A rank is two processes: this one, which keeps watch and never computes, and its child, which trains.

The keeper does not share the trainer's interpreter, so it sees a trainer that is stopped, that loops without giving the
interpreter up, or that waits in a library; it takes signals at any moment, and the exit code that a launcher gets is
the documented one however the trainer ended. No torch here.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import select
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import IO, Any

from megafp8.core.errors import EXIT_HUNG, EXIT_INTERNAL, EXIT_INTERRUPTED
from megafp8.core.heartbeat import HEART, Heartbeat
from megafp8.core.jsonio import write_json
from megafp8.train.hangs import Hang, report_hang
from megafp8.train.signals import STOP_SIGNALS, StopRequest

# The read end of a pipe whose write end only the launcher holds: it ends when the launcher does, however that ends.
LIFELINE = "MEGAFP8_LIFELINE_FD"

DUMP_SIGNAL = signal.SIGUSR2
_PULSE_SECONDS = 0.5
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def can_keep() -> bool:
    """Whether this process may fork: not within a program that has threads or torch already."""
    return threading.active_count() == 1 and "torch" not in sys.modules


def keep(train: Callable[[], int], env: Mapping[str, str]) -> int:
    """Run `train` in a child and watch over it; returns the rank's exit code. In the child, `train`'s own.

    Args:
        env: names the rank and, where `run_ranks` started it, the launcher's lifeline.
    """
    stacks = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the process
    ready, alive = os.pipe()
    keeper = os.getpid()
    signal.pthread_sigmask(signal.SIG_BLOCK, [getattr(signal, name) for name in STOP_SIGNALS])
    child = os.fork()
    if child == 0:
        HEART.kept = True
        StopRequest(HEART).install()
        os.close(alive)
        _leave_with(ready, keeper)
        faulthandler.register(DUMP_SIGNAL, file=stacks, all_threads=True)
        code = train()
        HEART.finish(code)
        return code
    os.close(ready)
    return Keeper(child, HEART, stacks, env).watch()


def _leave_with(pipe: int, keeper: int) -> None:
    """In the trainer: end when the keeper does. A checkpoint commits by one rename, so no moment damages one."""

    def wait() -> None:
        os.read(pipe, 1)  # nobody writes: this returns at the end of the pipe
        os._exit(EXIT_INTERRUPTED)

    threading.Thread(target=wait, name="lifeline", daemon=True).start()
    if sys.platform == "linux":  # the kernel sees to it even where no thread of this process gets to run
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != keeper:
            os._exit(EXIT_INTERRUPTED)


class Keeper:
    """Waits for the trainer `child`; kills it when it hangs, when the user insists, or when the launcher is gone."""

    def __init__(self, child: int, heart: Heartbeat, stacks: IO[bytes], env: Mapping[str, str]) -> None:
        self.child, self.heart, self.stacks = child, heart, stacks
        self.rank = int(env.get("RANK", env.get("SLURM_PROCID", "0")))
        self.lifeline = int(env[LIFELINE]) if LIFELINE in env else None
        self._oom_kills = oom_kills()
        self._woken, self._wake = os.pipe()

    def watch(self) -> int:
        """Until the trainer has ended; returns the rank's exit code."""
        os.set_blocking(self._woken, False)
        os.set_blocking(self._wake, False)
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        for name in STOP_SIGNALS:
            signal.signal(getattr(signal, name), self._take)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [getattr(signal, name) for name in STOP_SIGNALS])
        while (status := self._ended()) is None:
            self._sleep()
            if self.heart.stops > 1:
                self._say("second signal, stopping at once; the last checkpoint is intact")
                return self._end(EXIT_INTERRUPTED)
            silent = self.heart.last
            limit = float(self.heart.facts.get("limits", {}).get(silent.section, 0.0))
            if limit and silent.silent_seconds > limit:
                if self.heart.finished is not None:  # libraries that do not let it go
                    return self._end(self.heart.finished)
                report_hang(Hang(self.rank, self.child, silent, limit), self.heart.facts, self._stacks, self._say)
                return self._end(EXIT_HUNG)
        code = self._judge(status)
        self._note(code)
        return code

    def _take(self, number: int, frame: FrameType | None) -> None:
        names = self.heart.facts.get("stop_signals", STOP_SIGNALS)
        if signal.Signals(number).name not in names:  # this run wants to be ended by it
            self._kill()
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        elif not (self.heart.stops and number == signal.SIGUSR1):  # as in signals.py
            self.heart.ask_to_stop(number, own=False)

    def _sleep(self) -> None:
        watched = [self._woken] if self.lifeline is None else [self._woken, self.lifeline]
        ready = select.select(watched, [], [], _PULSE_SECONDS)[0]
        if self._woken in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self._woken, 512)
        if self.lifeline in ready:  # nobody writes: the launcher is gone
            self._kill()
            os._exit(EXIT_INTERRUPTED)

    def _ended(self) -> int | None:
        pid, status = os.waitpid(self.child, os.WNOHANG)
        return status if pid else None

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.child, signal.SIGKILL)

    def _end(self, code: int) -> int:
        self._kill()
        os.waitpid(self.child, 0)
        self._note(code)
        return code

    def _judge(self, status: int) -> int:
        code, beat = os.waitstatus_to_exitcode(status), self.heart.last
        where = f"{beat.section} {beat.step}" if beat.section == "step" else f"{beat.section} (step {beat.step})"
        if self.heart.finished is not None:  # what stops it on its way out changes nothing
            return self.heart.finished
        if code < 0:
            why = "the kernel's OOM killer, out of memory" if oom_kills() > self._oom_kills else self._guess(-code)
            self._say(f"killed by {signal.Signals(-code).name} in {where}: {why}")
            return 128 - code
        if code == 0:
            self._say(f"ended with exit code 0 in {where}, before its work was done")
            return EXIT_INTERNAL
        return code

    @staticmethod
    def _guess(number: int) -> str:
        if number == signal.SIGKILL:
            return "by a person, or out of memory: see the kernel's log"
        return "a crash in native code" if number in (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS) else "by a person"

    def _stacks(self) -> str:
        """The trainer's Python stacks of this moment, of all threads; a stopped one is woken for that."""
        self.stacks.seek(0, os.SEEK_END)
        before = self.stacks.tell()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.child, DUMP_SIGNAL)
            os.kill(self.child, signal.SIGCONT)
        end = time.monotonic() + 3.0
        text = b""
        while time.monotonic() < end and not (text and text.endswith(b"\n")):
            time.sleep(0.01)
            self.stacks.seek(before)
            text = self.stacks.read()
        return text.decode(errors="replace") or "(no stack: the process did not answer within 3 s)\n"

    def _note(self, code: int) -> None:
        """Rank 0: how the attempt ended, for whoever starts the next; launchers lose exit codes."""
        folder = self.heart.facts.get("folder")
        if self.rank != 0 or not folder or not self.heart.facts.get("holds_folder"):
            return
        record: dict[str, Any] = {"code": code, "step": self.heart.last.step, "job": self.heart.facts.get("job", "")}
        with contextlib.suppress(Exception):  # it tells, it decides nothing
            write_json(Path(folder) / "exit.json", record)

    def _say(self, text: str) -> None:
        with contextlib.suppress(OSError):
            os.write(2, f"megafp8 pretrain: rank {self.rank}: {text}\n".encode())


def oom_kills() -> int:
    """How many processes of this control group the kernel has killed for memory; 0 where that is not known."""
    try:
        own = Path("/proc/self/cgroup").read_text().splitlines()[-1].rpartition(":")[2]
        for line in Path(f"/sys/fs/cgroup{own}/memory.events").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    except (OSError, IndexError, ValueError):
        pass
    return 0
