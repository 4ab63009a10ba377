"""Signals of a rank: counted in the heartbeat; all ranks agree on them at the end of a step."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from types import FrameType
from typing import Any

from megafp8.core.errors import EXIT_INTERRUPTED
from megafp8.core.heartbeat import Heartbeat

STOP_SIGNALS = ("SIGTERM", "SIGUSR1", "SIGINT")


class StopRequest:
    """Set by SIGTERM, SIGUSR1 (Slurm's --signal) or SIGINT, of this process or of its keeper; read once a step."""

    def __init__(self, heart: Heartbeat) -> None:
        self._heart = heart
        self._old: dict[int, Any] = {}

    @property
    def received(self) -> str:
        """The name of the signal, empty if there was none."""
        heart = self._heart
        return signal.Signals(heart.stop_signal).name if heart.stops else ""

    def install(self, names: Sequence[str] = STOP_SIGNALS) -> None:
        """Take the handlers of these signals over and let others have their default; call it on the main thread."""
        for name in STOP_SIGNALS:
            number = getattr(signal, name)
            self._old[number] = signal.signal(number, self._handle if name in names else signal.SIG_DFL)
        # whoever started this process may have held them back until now
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [getattr(signal, name) for name in STOP_SIGNALS])

    def uninstall(self) -> None:
        """Give the handlers back to the program that a run was a part of."""
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # USR1 is a warning before the end that TERM announces: it never counts as the user insisting
        if self._heart.stops and number == signal.SIGUSR1:
            return
        self._heart.ask_to_stop(number, own=True)
        if self._heart.stops > 1 and not self._heart.kept:
            # The user insists. A checkpoint commits by one rename, so leaving here damages none.
            os.write(2, b"megafp8: second signal, stopping at once; the last checkpoint is intact\n")
            os._exit(EXIT_INTERRUPTED)
