"""Tasks: units of work that may be killed, repeated, or run twice at once, and give the same bytes.

A task is a stage (a file of `stages/`), values that decide its bytes, and inputs. Its id is a hash of these, and its
outputs lie under its id: another configuration is another task and touches none of the old files. Outputs are made
in a folder of their own, made durable, and given their names one by one; the record comes last. A task is done if
and only if its record is there and as it was written, its outputs have the recorded sizes, and the user's files it
read are still the same. Checksums are compared when a later task reads the output, or it gets its final name.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import secrets
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from megafp8.core.errors import DataError
from megafp8.core.jsonio import fsync_dir, read_json, resource_error, seal_holds, sealed, write_json
from megafp8.corpus.compressed import InputStream
from megafp8.data.indexed_writer import checksum_file

RECORD_KIND = "megafp8-task"
_ID_DIGITS = 24
Report = Callable[[dict[str, int]], None]


@dataclass(frozen=True)
class Input:
    """A file that a task reads.

    Attributes:
        path: from the folder of stages; `outside`: a user's file, as the user named it.
        checksum: known of our own files only; of a user's file the record of the task holds it.
        start, stop: bytes that the task is about; 0, 0: all.
    """

    path: str
    num_bytes: int
    checksum: str = ""
    outside: bool = False
    mtime_ns: int = 0
    start: int = 0
    stop: int = 0

    @property
    def identity(self) -> list[Any]:
        """What of it decides a task's id."""
        return [self.path, self.num_bytes, self.start, self.stop] if self.outside else [self.checksum]


@dataclass(frozen=True)
class Task:
    """One unit of work.

    Attributes:
        values: JSON values that, with the inputs, decide every byte of the outputs.
        hints: what a worker needs besides, such as paths; not part of the id.
        num_bytes: how much work it is, for progress and estimates.
    """

    stage: str
    name: str
    values: dict[str, Any]
    inputs: tuple[Input, ...]
    hints: dict[str, Any] = field(default_factory=dict)
    num_bytes: int = 0

    @cached_property
    def id(self) -> str:
        """Hash of stage, its version, values and inputs."""
        identity = {
            "stage": self.stage,
            "version": stage_module(self.stage).VERSION,
            "values": self.values,
            "inputs": [one.identity for one in self.inputs],
        }
        text = json.dumps(identity, sort_keys=True, ensure_ascii=False)
        return hashlib.sha256(text.encode()).hexdigest()[:_ID_DIGITS]

    def record_path(self, root: Path) -> Path:
        """Where its record lies."""
        return root / self.stage / f"{self.id}.json"

    def output(self, record: Mapping[str, Any], name: str) -> Input:
        """One of its outputs as the input of a later task."""
        facts = record["outputs"][name]
        return Input(f"{self.stage}/{self.id}.{name}", facts["num_bytes"], facts["checksum"])

    def to_json(self) -> dict[str, Any]:
        """As plain values; `from_json` gives an equal task."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Task:
        """The task that `to_json` wrote."""
        return cls(**{**values, "inputs": tuple(Input(**one) for one in values["inputs"])})


def stage_module(stage: str) -> Any:
    """The module of a stage."""
    return importlib.import_module(f"megafp8.corpus.stages.{stage}")


class Work:
    """What `run(work)` of a stage gets: its task, places for its outputs, and a way to tell how far it is."""

    def __init__(self, root: Path, task: Task, place: Path, report: Report | None = None) -> None:
        self.root, self.task, self._place, self._report = root, task, place, report
        self.values, self.hints, self.inputs = task.values, task.hints, task.inputs
        self.read_checksums: dict[int, str] = {}
        self._told: dict[str, int] = {}

    def output(self, name: str) -> Path:
        """Where to write an output; it gets its place when `run` has ended."""
        return self._place / name

    def path(self, number: int) -> Path:
        """Path of an input."""
        one = self.inputs[number]
        return Path(one.path) if one.outside else self.root / one.path

    def checked(self, number: int) -> Path:
        """Path of an input of ours, whose bytes have been compared with its record.

        Raises:
            DataError: they are others; the record of the task that made it is removed, so that it is made again.
        """
        return checked_file(self.path(number), self.inputs[number].checksum)

    def set_checksum(self, number: int, checksum: str) -> None:
        """Tell the checksum of a user's file that has been read."""
        self.read_checksums[number] = checksum

    def report(self, **counts: int) -> None:
        """Tell how far it is (`done_bytes`, and counts as in the record), as far as it has changed; cheap enough for
        each batch."""
        if self._report is not None:
            self._told |= counts
            self._report(dict(self._told))


def checked_file(path: Path, checksum: str) -> Path:
    """A task's output, whose bytes have been compared with its record.

    Raises:
        DataError: they are others; the record of the task that made it is removed, so that it is made again.
    """
    if not path.is_file() or checksum_file(path) != checksum:
        path.with_name(f"{path.name.partition('.')[0]}.json").unlink(missing_ok=True)
        raise DataError(f"{path}: changed since it was made; run the same command again, which makes it again")
    return path


def range_checksum(one: Input) -> str:
    """Checksum of a user's file as it is now, or of the bytes of it that a task is about."""
    with InputStream(one.path, start=one.start, stop=one.stop) as stream:
        return stream.checksum()


def load_record(root: Path, task: Task) -> dict[str, Any]:
    """The record of a task that is done, else {}."""
    path = task.record_path(root)
    try:
        record = read_json(path)
    except DataError:
        return {}
    if not isinstance(record, dict) or record.get("kind") != RECORD_KIND or record.get("id") != task.id:
        return {}
    if not seal_holds(record):
        return {}
    for name, facts in record["outputs"].items():
        try:
            found = os.stat(path.with_name(f"{task.id}.{name}")).st_size
        except OSError:
            return {}
        if found != facts["num_bytes"]:
            return {}
    return record if _same_inputs(task, record) else {}


def _same_inputs(task: Task, record: Mapping[str, Any]) -> bool:
    """Whether the user's files are those that were read: same time, or else the same bytes."""
    outside = [one for one in task.inputs if one.outside]
    if len(outside) != len(record["inputs"]):
        return False
    for one, then in zip(outside, record["inputs"]):
        if one.mtime_ns != then["mtime_ns"] and range_checksum(one) != then["checksum"]:
            return False
    return True


def run_task(root: Path, task: Task, report: Report | None = None) -> dict[str, Any]:
    """Make a task's outputs, unless they are there; returns its record.

    Raises:
        MegaError: what the stage refuses. ResourceError: disk full, no permission.
    """
    if record := load_record(root, task):
        return record
    folder = root / task.stage
    place = folder / f".{task.id}.{secrets.token_hex(4)}"
    start, cpu_start = time.monotonic(), time.process_time()
    try:
        place.mkdir(parents=True)
        work = Work(root, task, place, report)
        counts = stage_module(task.stage).run(work)
        outputs = {path.name: _publish(path, folder / f"{task.id}.{path.name}") for path in sorted(place.iterdir())}
        fsync_dir(folder)
        outside = [(i, one) for i, one in enumerate(task.inputs) if one.outside]
        record = {
            "kind": RECORD_KIND,
            "stage": task.stage,
            "id": task.id,
            "name": task.name,
            "inputs": [
                {"path": one.path, "mtime_ns": one.mtime_ns, "checksum": work.read_checksums.get(i, "")}
                for i, one in outside
            ],
            "outputs": outputs,
            "counts": counts,
            "num_bytes": task.num_bytes,
            "seconds": round(time.monotonic() - start, 3),
            "cpu_seconds": round(time.process_time() - cpu_start, 3),
        }
        record = sealed(record)
        write_json(task.record_path(root), record)
        return record
    except OSError as error:
        raise resource_error(error, Path(error.filename or folder)) from error
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _publish(path: Path, name: Path) -> dict[str, Any]:
    with open(path, "rb") as file:
        os.fsync(file.fileno())
    facts = {"num_bytes": path.stat().st_size, "checksum": checksum_file(path)}
    os.replace(path, name)
    return facts


def sweep(root: Path, tasks: Sequence[Task]) -> None:
    """Remove what belongs to none of these tasks: outputs of other configurations, of kills, logs of past failures."""
    kept = {(task.stage, task.id) for task in tasks}
    for folder in [path for path in root.iterdir() if path.is_dir()]:
        for path in folder.iterdir():
            name, *_ = path.name.split(".")
            if (folder.name, name) in kept and path.suffix != ".log":
                continue
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
