"""How far a long step is: a bar with rates and ETA on a terminal, a quiet line now and then anywhere else."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    SpinnerColumn,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Bar

from megafp8.core.log import event, get_logger

_LINE_SECONDS = 15.0  # between lines when there is no terminal
_REFRESH_SECONDS = 0.1
_log = get_logger(__name__)


class Progress:
    """A context manager around one step.

    Args:
        label: what is going on, a verb.
        total_bytes: input bytes of the whole step; 0: not known, a spinner is shown.
    """

    def __init__(self, label: str, total_bytes: int = 0) -> None:
        self.label, self.total_bytes = label, total_bytes
        self._start = self._last = time.monotonic()
        self._state: dict[str, int] = {}
        self._first: dict[str, int] = {}  # what a resumed run had already done: not part of its rate
        self._done_bytes = 0
        self._bar: Bar | None = None
        if sys.stderr.isatty():
            # what fits 80 columns: how far, until when, how fast
            known = [BarColumn(bar_width=16), TaskProgressColumn(), TimeRemainingColumn(compact=True)]
            kind = known if total_bytes else [SpinnerColumn(), TimeElapsedColumn()]
            self._bar = Bar(
                TextColumn("{task.description}"),
                *kind,
                TextColumn("{task.fields[rates]}"),
                console=Console(stderr=True),
                transient=True,
            )
            self._task = self._bar.add_task(label, total=total_bytes or None, rates="")

    def begin(self, **counts: int) -> None:
        """Set the counts that were there before (documents=, text_bytes=, tokens=); the clock starts."""
        self._first = counts
        self._start = self._last = time.monotonic()

    def update(self, done_bytes: int, **counts: int) -> None:
        """Tell the input bytes done and the counts so far; cheap enough to be called for each document."""
        self._done_bytes, self._state = done_bytes, counts
        now = time.monotonic()
        if self._bar is not None:
            if now - self._last >= _REFRESH_SECONDS:
                self._last = now
                self._bar.update(self._task, completed=done_bytes, rates="  ".join(self._rates(now)))
        elif now - self._last >= _LINE_SECONDS:
            self._last = now
            self._line(now)

    def _rates(self, now: float) -> list[str]:
        seconds = max(now - self._start, 1e-9)
        gained = {key: value - self._first.get(key, 0) for key, value in self._state.items()}
        shown = []
        if "documents" in gained:
            shown.append(f"{gained['documents'] / seconds:,.0f} docs/s")
        if "text_bytes" in gained:
            shown.append(f"{gained['text_bytes'] / seconds / 1e6:.2f} MB/s")
        if "tokens" in gained:
            shown.append(f"{gained['tokens'] / seconds:,.0f} tokens/s")
        if dropped := self._state.get("dropped"):
            shown.append(f"{100 * (1 - dropped / max(self._state.get('documents', 0), dropped)):.1f}% kept")
        return shown

    def _line(self, now: float) -> None:
        seconds = now - self._start
        fields: dict[str, Any] = {key.replace("tokens", "num_tokens"): n for key, n in self._state.items()}
        if self.total_bytes and self._done_bytes:
            fields["done"] = f"{100 * self._done_bytes / self.total_bytes:.0f}%"
            fields["eta_seconds"] = round(seconds * (self.total_bytes / self._done_bytes - 1))
        event(_log, self.label, rate=", ".join(self._rates(now)), **fields)

    def __enter__(self) -> Progress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        now = time.monotonic()
        if self._bar is not None:
            self._bar.stop()
        if kind is None:
            rates: dict[str, Any] = {"rate": ", ".join(self._rates(now))} if self._state else {}
            event(_log, f"{self.label}: done", seconds=round(now - self._start, 1), **rates)
