"""One part's figures as a JSON file that is whole at any moment: a part that is stopped leaves what it had."""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any


class Figures:
    """Values by name, written to `path` at every `put`."""

    def __init__(self, path: Path) -> None:
        self._path, self.values = path, dict[str, Any]()

    def put(self, **values: Any) -> None:
        """Add or replace values and write all of them."""
        self.values |= values
        part = self._path.with_suffix(".part")
        part.write_text(json.dumps(self.values, indent=1), encoding="utf-8")
        os.replace(part, self._path)


class Clock:
    """Seconds that are left of a budget, counted from the start of the process's work."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        return self._end - time.monotonic()


def part_arguments(description: str) -> argparse.ArgumentParser:
    """What every part takes."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--out", type=Path, required=True, help="JSON file of the figures")
    parser.add_argument("--seconds", type=float, required=True, help="this part's budget")
    parser.add_argument("--tiny", action="store_true", help="sizes for a dry run on a CPU")
    return parser
