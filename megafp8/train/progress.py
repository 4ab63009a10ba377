"""The bar of a run on a terminal: steps, tokens/s, loss, ETA. Where stderr is no terminal, the log lines do."""

from __future__ import annotations

import sys
from datetime import timedelta
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


class StepBar:
    """A context manager; `advance` once a step."""

    def __init__(self, name: str, *, start: int, steps: int, enabled: bool) -> None:
        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeElapsedColumn(),
            TextColumn("eta {task.fields[eta]}"),
            console=Console(stderr=True),
            disable=not (enabled and sys.stderr.isatty()),
        )
        self._task = self._progress.add_task(name, total=steps, completed=start, rate="", eta="-:--:--")

    def __enter__(self) -> StepBar:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def advance(self, *, loss: float, tokens_per_second: float, eta_seconds: float) -> None:
        """Note a finished step."""
        rate, eta = f"loss {loss:.3f}  {tokens_per_second:,.0f} tokens/s", timedelta(seconds=int(eta_seconds))
        self._progress.update(self._task, advance=1, rate=rate, eta=str(eta))
