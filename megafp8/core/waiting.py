"""How long this process has waited for its peers: what is left of a step is its own work."""

from __future__ import annotations

import time
from collections.abc import Callable


class Waiting:
    """A clock that runs while a `with` block of it is open; blocks may nest.

    Attributes:
        seconds: so far.
        fence: called at both ends of a block; where work is only queued (a GPU), it waits until that is done. None:
            blocks are as long as the calls in them.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.fence: Callable[[], None] | None = None
        self._depth, self._began = 0, 0.0

    def __enter__(self) -> None:
        self._depth += 1
        if self._depth == 1:
            if self.fence is not None:
                self.fence()
            self._began = time.perf_counter()

    def __exit__(self, *exc: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            if self.fence is not None:
                self.fence()
            self.seconds += time.perf_counter() - self._began


WAITING = Waiting()  # of this process
