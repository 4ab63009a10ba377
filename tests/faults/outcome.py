"""What came of a run: its loss curve, how far it is, which samples its steps took."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

_TAIL_BYTES = 1 << 16


def last_step(run: Path) -> int:
    """The newest step in a run's metrics, without reading them all; 0: none."""
    try:
        with open(run / "metrics.jsonl", "rb") as file:
            file.seek(max(0, file.seek(0, 2) - _TAIL_BYTES))
            lines = file.read().split(b"\n")[:-1]
    except OSError:
        return 0
    steps = [json.loads(line)["step"] for line in lines if line.startswith(b"{") and b'"kind": "train"' in line]
    return max(steps, default=0)


def curve(run: Path) -> list[float]:
    """Training losses by step; each step is there once."""
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in found if record["kind"] == "train"]
    assert [record["step"] for record in steps] == list(range(1, len(steps) + 1)), "a step is missing or there twice"
    return [record["loss"] for record in steps]


def taken_samples(folder: Path, world: int) -> dict[int, dict[int, list[int]]]:
    """step -> rank -> ids, as each rank's last attempt at the step noted them."""
    found: dict[int, dict[int, list[int]]] = defaultdict(dict)
    for rank in range(world):
        attempt = None
        for line in (folder / f"samples-{rank}.jsonl").read_text().splitlines():
            try:
                record = json.loads(line)
            except ValueError:  # the rank was killed while it wrote
                continue
            if (record["pid"], record["step"]) != attempt:
                attempt = record["pid"], record["step"]
                found[record["step"]][rank] = []
            found[record["step"]][rank] += record["ids"]
    return found


def compare_samples(folder: Path, other: Path, world: int, steps: int, batch: int) -> str:
    """What is wrong with the samples of steps 1 to `steps`; empty: each id once, in the order of the other run."""
    here, there = taken_samples(folder, world), taken_samples(other, world)
    for step in range(1, steps + 1):
        ids = [number for rank in range(world) for number in here[step].get(rank, [])]
        if sorted(ids) != list(range((step - 1) * batch, step * batch)):
            return f"step {step} took {sorted(ids)}"
        if here[step] != there[step]:
            return f"step {step} gave ranks other samples than without faults"
    return ""
