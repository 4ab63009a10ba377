"""How fast each stage was, from the log of its tasks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megafp8.corpus.stage_run import LOG


def stage_rates(root: Path) -> list[dict[str, Any]]:
    """A row a stage, in the order in which they began: what its tasks that are still there took when they were made.

    Args:
        root: the folder of stages.

    Returns:
        `stage`, `tasks`, `seconds` (of processes), `wall_seconds` (while at least one task ran), and sums of
        `documents`, `text_bytes`, `tokens` where tasks of that stage count them. [] if there is no log.
    """
    path = root / LOG
    if not path.is_file():
        return []
    last: dict[tuple[str, str], dict[str, Any]] = {}
    with open(path, encoding="utf-8", errors="replace") as lines:
        for line in lines:
            entry = _entry(line)
            if entry.get("event") == "done":
                last[entry["stage"], entry["task"]] = entry
    stages: dict[str, list[dict[str, Any]]] = {}
    for (stage, task), entry in last.items():
        if (root / stage / f"{task}.json").is_file():  # else of another configuration
            stages.setdefault(stage, []).append(entry)
    rows = [_row(stage, entries) for stage, entries in stages.items()]
    return sorted(rows, key=lambda row: row.pop("begin"))


def _entry(line: str) -> dict[str, Any]:
    """A line of the log; {} for one that a kill cut short."""
    try:
        value = json.loads(line)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _row(stage: str, entries: list[dict[str, Any]]) -> dict[str, Any]:
    spans = sorted((entry["time"] - entry["seconds"], entry["time"]) for entry in entries)
    wall, end = 0.0, spans[0][0]
    for start, stop in spans:
        wall += max(stop - max(start, end), 0.0)
        end = max(end, stop)
    sums = {name: sum(entry.get(name, 0) for entry in entries) for name in ("documents", "text_bytes", "tokens")}
    return {
        "stage": stage,
        "tasks": len(entries),
        "seconds": round(sum(entry["seconds"] for entry in entries), 3),
        "wall_seconds": round(wall, 3),
        "begin": spans[0][0],
        **{name: count for name, count in sums.items() if count},
    }
