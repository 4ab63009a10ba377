"""Signals: a flag that all ranks agree on at the end of a step; the second signal stops at once."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

from megafp8.core.errors import EXIT_INTERRUPTED

_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class StopRequest:
    """Set by SIGTERM, SIGUSR1 (Slurm's --signal) or SIGINT; read once a step."""

    def __init__(self) -> None:
        self.received: str = ""

    def install(self) -> None:
        """Take the handlers over; call it on the main thread."""
        for number in _SIGNALS:
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received and number != signal.SIGUSR1:
            # The user insists. A checkpoint commits by one rename, so leaving here damages none.
            os.write(2, b"megafp8: second signal, stopping at once; the last checkpoint is intact\n")
            sys.stderr.flush()
            os._exit(EXIT_INTERRUPTED)
        self.received = signal.Signals(number).name
