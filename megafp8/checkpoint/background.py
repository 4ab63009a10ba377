"""The process that writes what a trainer has staged: `python -m megafp8.checkpoint.background FD`.

It imports no torch, shares one piece of memory with its trainer (the staged bytes, after a header in which it counts
what it has written), takes a job a line on stdin and answers each with a line on stdout. It ends when stdin does, in
the middle of a write too, so that it never outlives its trainer: a checkpoint is committed by one rename.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from megafp8.checkpoint.commit import begin_folder, commit, discard, space_for
from megafp8.checkpoint.config import CheckpointConfig
from megafp8.checkpoint.manifest import Piece, PieceFile, gathered
from megafp8.checkpoint.piece_output import Box, Written, write_piece_file, write_piece_files
from megafp8.checkpoint.retention import prune_or_warn
from megafp8.core.config import build
from megafp8.core.errors import CheckpointError, MegaError
from megafp8.core.jsonio import resource_error, write_atomic

HEADER_BYTES = 4096  # of the shared memory: bytes written of the present job, little-endian; a page, so that data align
NICENESS = 15  # weight 36 beside the 1024 of training where that fills all cores; 19 is 15, and trebles a save there
_PR_SET_PDEATHSIG = 1  # prctl(2): a signal for us when the thread that started us ends; trainers do so in the main one

Job = Mapping[str, Any]


class Writer:
    """What the process knows between jobs: the shared memory, mapped anew when it has grown."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._memory = mmap.mmap(fd, HEADER_BYTES)
        self._lock = threading.Lock()
        self._done = 0

    def do(self, job: Job) -> dict[str, Any]:
        """One job: `write` a rank's share of a checkpoint, `commit` the shares of all, `alone`: both of its own."""
        return {"write": self._write, "commit": self._commit, "alone": self._alone}[job["do"]](job)

    def _write(self, job: Job) -> dict[str, Any]:
        """Write the files of a rank and, when they are durable, its part of the manifest."""
        folder = Path(job["folder"])
        if not folder.is_dir():
            raise CheckpointError(f"{folder}: not seen by every rank; put checkpoints on a file system shared by all")
        files, pieces = self._pieces(folder, job)
        part = {"files": {k: asdict(v) for k, v in files.items()}, "pieces": pieces}
        write_atomic(folder / job["part"], json.dumps(part, default=asdict).encode())
        return {}

    def _commit(self, job: Job) -> dict[str, Any]:
        """Put the parts of all ranks together, rename the folder, then remove what retention does not keep."""
        folder = Path(job["folder"])
        files: dict[str, PieceFile] = {}
        pieces: dict[str, list[Piece]] = {}
        for name in job["parts"]:
            part = json.loads((folder / name).read_bytes())
            files |= {file: PieceFile(**entry) for file, entry in part["files"].items()}
            for tensor, entries in part["pieces"].items():
                pieces.setdefault(tensor, []).extend(Piece(**entry) for entry in entries)
        for name in job["parts"]:  # only now: a part that cannot be read must leave the others to be looked at
            (folder / name).unlink()
        kinds = {name: (dtype, tuple(shape)) for name, (dtype, shape) in job["kinds"].items()}
        commit(folder, gathered(job["step"], job["meta"], files, pieces, kinds))
        gone = prune_or_warn(folder.parent, build(CheckpointConfig, job["retention"]))
        return {"pruned": [str(path) for path in gone]}

    def _alone(self, job: Job) -> dict[str, Any]:
        """A whole checkpoint of this rank's own."""
        kinds = {name: (dtype, tuple(shape)) for name, (dtype, shape) in job["kinds"].items()}
        root, step, meta = Path(job["root"]), job["step"], job["meta"]
        folder = begin_folder(root, step, space_for(job["bytes"], len(kinds), len(str(meta))))
        try:
            commit(folder, gathered(step, meta, *self._pieces(folder, job), kinds))
        except BaseException:
            discard(folder)
            raise
        prune_or_warn(root, build(CheckpointConfig, job["retention"]))
        return {}

    def _pieces(self, folder: Path, job: Job) -> tuple[dict[str, PieceFile], dict[str, list[Piece]]]:
        """Write the staged files of a job; the pieces by the name of their tensor."""
        self._grow(job["memory_bytes"])
        self._done = 0
        view = memoryview(self._memory)
        names = [entry["name"] for entry in job["files"]]
        files = [(folder / e["name"], [_box(b, view) for b in e["boxes"]]) for e in job["files"]]
        done = write_piece_files(files, job["threads"], partial(_written, self._advance))
        pieces: dict[str, list[Piece]] = {}
        for entry, (_, made) in zip(job["files"], done, strict=True):
            for box, piece in zip(entry["boxes"], made, strict=True):
                pieces.setdefault(box["tensor"], []).append(piece)
        return {name: file for name, (file, _) in zip(names, done, strict=True)}, pieces

    def _grow(self, size: int) -> None:
        if size > len(self._memory):
            self._memory = mmap.mmap(self._fd, size)

    def _advance(self, count: int) -> None:
        with self._lock:
            self._done += count
            self._memory[:8] = self._done.to_bytes(8, "little")


def _written(advance: Any, path: Path, boxes: Sequence[Box]) -> Written:
    return write_piece_file(path, boxes, advance)


def _box(entry: Mapping[str, Any], view: memoryview) -> Box:
    start, offsets, sizes = entry["start"], tuple(entry["offsets"]), tuple(entry["sizes"])
    box = Box(entry["key"], entry["dtype"], offsets, sizes, lambda: view[start : start + box.bytes])
    return box


def answer(writer: Writer, job: Job) -> dict[str, Any]:
    """Do a job; a failure is part of the answer, since the trainer decides what becomes of it."""
    start = time.monotonic()
    try:
        done = writer.do(job)
    except MegaError as error:
        return {"error": str(error), "exit_code": error.exit_code}
    except OSError as error:
        path = Path(error.filename) if isinstance(error.filename, str) else Path(job.get("folder") or job["root"])
        found = resource_error(error, path)
        return {"error": str(found), "exit_code": found.exit_code}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}", "exit_code": CheckpointError.exit_code}
    return {**done, "seconds": time.monotonic() - start}


def _listen(jobs: queue.Queue[Job]) -> None:
    for line in sys.stdin.buffer:
        jobs.put(json.loads(line))
    os._exit(0)  # the trainer is gone


def _stand_back() -> None:
    """Leave the processors to training, which may use them all; what it does not use is enough."""
    os.nice(NICENESS)
    # Linux shares processors out between sessions first, and we are one of our own: niceness counts within it only
    with contextlib.suppress(OSError):
        Path("/proc/self/autogroup").write_text(str(NICENESS))


def main() -> None:
    """Serve jobs until stdin ends."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        # a terminal's or a scheduler's signal to all processes is the trainer's to answer: it may want one more save
        signal.signal(number, signal.SIG_IGN)
    _stand_back()
    if sys.platform.startswith("linux"):  # the end of stdin is not seen by a process that is stopped
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    writer = Writer(int(sys.argv[1]))
    jobs: queue.Queue[Job] = queue.Queue()
    threading.Thread(target=_listen, args=(jobs,), daemon=True).start()
    while True:
        line = json.dumps(answer(writer, jobs.get()))
        try:
            os.write(1, line.encode() + b"\n")
        except BrokenPipeError:  # the trainer is gone; no clean-up that could wait for the listening thread
            os._exit(0)


if __name__ == "__main__":
    main()
