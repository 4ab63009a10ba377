"""What a rank tells the process that watches over it: where it is, since when, and whether it was told to stop.

The words lie in memory that both share after a fork, so neither side needs the other's interpreter to be awake.
"""

from __future__ import annotations

import json
import mmap
import time
from dataclasses import dataclass
from typing import Any

SECTIONS = ("start", "setup", "first step", "step", "evaluation", "save", "exit")

_BEAT, _STEP, _SECTION, _FINISHED, _OWN_STOPS, _STOPS, _SIGNAL, _BEGAN = range(0, 64, 8)
_LENGTH, _TEXT, _SIZE = 64, 72, 8192


@dataclass(frozen=True)
class Beat:
    """A rank's last sign of life: its section of `SECTIONS`, its step, and seconds since."""

    section: str
    step: int
    silent_seconds: float


class Heartbeat:
    """Shared words of one rank; a write is one aligned store.

    `kept`: whether a keeper reads them.
    """

    kept = False

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, _SIZE)
        self._words = memoryview(self._memory)[: _LENGTH + 8].cast("q")
        self.begin()

    def begin(self) -> None:
        """A run begins in this process: none of its time is over, and nobody has asked it to stop."""
        for place in (_OWN_STOPS, _STOPS, _SIGNAL, _FINISHED, _STEP):
            self._write(place, 0)
        self._write(_BEGAN, time.monotonic_ns())
        self.beat("start")

    def _read(self, place: int) -> int:
        return self._words[place // 8]

    def _write(self, place: int, value: int) -> None:
        self._words[place // 8] = value  # struct.pack_into would write zeros first, which a reader may see

    def beat(self, section: str | None = None, step: int | None = None) -> None:
        """A sign of life; costs less than a microsecond."""
        if section is not None:
            self._write(_SECTION, SECTIONS.index(section))
        if step is not None:
            self._write(_STEP, step)
        self._write(_BEAT, time.monotonic_ns())

    @property
    def last(self) -> Beat:
        """The last sign of life."""
        silent = (time.monotonic_ns() - self._read(_BEAT)) / 1e9
        return Beat(SECTIONS[self._read(_SECTION)], self._read(_STEP), silent)

    @property
    def seconds(self) -> float:
        """Since the rank's process began, or a run in it."""
        return (time.monotonic_ns() - self._read(_BEGAN)) / 1e9

    def finish(self, code: int) -> None:
        """The rank's work ended with this exit code; a process that ends without it has failed, whatever its own."""
        self.beat("exit")
        self._write(_FINISHED, code + 1)

    @property
    def finished(self) -> int | None:
        """What `finish` was called with; None: it was not."""
        return self._read(_FINISHED) - 1 if self._read(_FINISHED) else None

    def ask_to_stop(self, signal_number: int, *, own: bool) -> None:
        """Count a stop signal; `own`: the rank itself got it, not its watcher.

        A workload manager signals every process of a job, so the same request comes to both.
        """
        place = _OWN_STOPS if own else _STOPS
        self._write(place, self._read(place) + 1)
        self._write(_SIGNAL, signal_number)

    @property
    def stops(self) -> int:
        """How often the rank was asked to stop; what came to both processes counts once."""
        return max(self._read(_OWN_STOPS), self._read(_STOPS))

    @property
    def stop_signal(self) -> int:
        """The number of the last stop signal; 0: none."""
        return self._read(_SIGNAL)

    def tell(self, **facts: Any) -> None:
        """Leave small facts (JSON) for the watcher; they are laid over those told before."""
        text = json.dumps({**self.facts, **facts}).encode()
        assert len(text) <= _SIZE - _TEXT, "facts too long"
        self._write(_LENGTH, 0)  # a reader in between sees none, never half of them
        self._memory[_TEXT : _TEXT + len(text)] = text
        self._write(_LENGTH, len(text))

    @property
    def facts(self) -> dict[str, Any]:
        """What was told."""
        length = self._read(_LENGTH)
        return dict(json.loads(self._memory[_TEXT : _TEXT + length])) if length else {}


HEART = Heartbeat()  # of this process
