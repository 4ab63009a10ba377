"""A hang, told: every rank's stack in <run>/hangs, and in one line which rank is the one that the others wait for."""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megafp8.core.errors import MegaError
from megafp8.core.heartbeat import Beat
from megafp8.core.jsonio import write_atomic, write_json

FOLDER = "hangs"
_SAME_HANG_SECONDS = 60.0
_GATHER_SECONDS = 12.0  # after a rank has seen the hang, the others have seen it too
_STOPPED = ("stopped by a signal", "stopped by a debugger")
_STATES = {"T": _STOPPED[0], "t": _STOPPED[1], "D": "waits for a disk or device", "Z": "dead"}

# where a rank stands that waits for a peer: the innermost Python frame of its main thread
_WAITING = re.compile(r"/torch/distributed/|/megafp8/parallel/")


@dataclass(frozen=True)
class Hang:
    """A rank that gave no sign of life for longer than `limit` seconds."""

    rank: int
    pid: int
    beat: Beat
    limit: float


def report_hang(hang: Hang, facts: Mapping[str, Any], stacks: Callable[[], str], say: Callable[[str], None]) -> None:
    """Write this rank's stacks and state; rank 0 waits for the others' and names the guilty one.

    Args:
        facts: "folder" of the run and "world", as far as the rank got to tell them.
        stacks: gives this rank's stacks.
        say: writes a line.
    """
    beat, state = hang.beat, process_state(hang.pid)
    # A stopped rank has to be woken to show its stack, and then it goes on: only once all others have shown theirs.
    text = "" if state in _STOPPED else stacks()
    record = {
        "rank": hang.rank, "host": socket.gethostname(), "pid": hang.pid, "section": beat.section, "step": beat.step,
        "silent_seconds": round(beat.silent_seconds, 1), "state": state, "waits": waits_for_peer(text),
    }  # fmt: skip
    if "folder" not in facts:
        say(f"hung: {describe(record)}\n{text or stacks()}")
        return
    folder = Path(facts["folder"]) / FOLDER
    path = folder / f"rank-{hang.rank:05d}.txt"
    try:
        write_atomic(path, text.encode())
        write_json(path.with_suffix(".json"), record)
        if not record["waits"]:
            say(f"hung: {describe(record)}; stack in {folder}")
        _gather(hang.rank, int(facts.get("world", 1)), folder, say)
        if not text:
            write_atomic(path, stacks().encode())
    except MegaError as error:
        say(f"hung: {describe(record)}; its stack could not be written: {error}\n{text}")


def _gather(rank: int, world: int, folder: Path, say: Callable[[str], None]) -> None:
    """Rank 0 judges once all have reported; the others stay until then, as a launcher may end all when one ends."""
    end, verdict = time.monotonic() + _GATHER_SECONDS, folder / "verdict.txt"
    own = _written(folder / f"rank-{rank:05d}.json")
    while time.monotonic() < end:
        if rank == 0 and len(_records(folder, own)) >= world:
            break
        if rank != 0 and abs(_written(verdict) - own) < _SAME_HANG_SECONDS:
            return
        time.sleep(0.2)
    if rank == 0:
        text = judge(_records(folder, own), world)
        say(f"{text}; stacks in {folder}")
        write_atomic(verdict, f"{text}\n".encode())


def _records(folder: Path, own: float) -> list[dict[str, Any]]:
    """Reports of this hang, not of one before, by the file server's clock."""
    paths = sorted(folder.glob("rank-*.json"))
    return [json.loads(path.read_bytes()) for path in paths if abs(_written(path) - own) < _SAME_HANG_SECONDS]


def _written(path: Path) -> float:
    return path.stat().st_mtime if path.exists() else 0.0


def judge(records: list[dict[str, Any]], world: int) -> str:
    """Which rank the others wait for, from what each reported; ranks that did not report are suspects."""
    reported = {record["rank"] for record in records}
    missing = [rank for rank in range(world) if rank not in reported]
    guilty = [record for record in records if not record["waits"]]
    waiting = len(records) - len(guilty)
    parts = [describe(record) for record in guilty[:4]]
    if len(guilty) > 4:
        parts.append(f"{len(guilty) - 4} more ranks that wait for no peer")
    if missing:
        shown = ", ".join(map(str, missing[:8])) + (" …" if len(missing) > 8 else "")
        parts.append(f"no report of rank {shown}")
    if not parts:
        steps = {(record["section"], record["step"]) for record in records}
        where = " and ".join(f"{section} {step}" for section, step in sorted(steps))
        return f"hung: all {world} ranks wait for each other in {where}: unlike collectives, or a link is down"
    return f"hung: {'; '.join(parts)}; {waiting} of {world} ranks wait for it"


def describe(record: Mapping[str, Any]) -> str:
    """A rank's report in words."""
    doing = record["state"] or ("waits for a peer" if record["waits"] else "busy or blocked, waits for no peer")
    return (
        f"rank {record['rank']} (host {record['host']}, pid {record['pid']}): {doing}, silent for "
        f"{record['silent_seconds']:.0f} s in {record['section']}, step {record['step']}"
    )


def process_state(pid: int) -> str:
    """What holds a process up, as Linux sees it; empty where nothing does or that is not known."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return _STATES.get(text.rpartition(")")[2].split()[0], "")


def waits_for_peer(stacks: str) -> bool:
    """Whether the main thread's innermost frame is in a communication; faulthandler shows the main thread last."""
    threads = re.split(r"\n(?=Thread |Current thread )", stacks.strip())
    frames = [line for line in threads[-1].splitlines() if line.lstrip().startswith("File ")]
    return bool(frames) and bool(_WAITING.search(frames[0]))


def clear(folder: Path) -> None:
    """Keep what an earlier attempt's hang left under another name, so that this one's is not mixed up with it."""
    path = folder / FOLDER
    if path.exists():
        stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime(path.stat().st_mtime))
        path.rename(folder / f"{FOLDER}-{stamp}")
