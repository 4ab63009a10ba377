"""The writer behind every converter: a plan of tensor groups, read, made and written one after another, side by side.

A group is what has to be in memory at once: the tensors read, and those made of them. Every file's layout is known
before its first tensor is made, so groups write straight to their places, whoever is done first. Memory is a budget
that groups take from; what a group wrote is noted in a journal with checksums, so that a run which was killed goes on
where it was, after it has looked whether the bytes are there.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megafp8 import __version__
from megafp8.checkpoint.manifest import checksum
from megafp8.convert.folder import JOURNAL
from megafp8.convert.source import Source
from megafp8.convert.tensor_files import Stored, bytes_of, make_header, write_at
from megafp8.core.errors import ResourceError
from megafp8.core.jsonio import resource_error

_SAY_SECONDS = 5.0
_SPARE_BYTES = 64 << 20  # for the tokenizer's files and the like
_READ_BACK = 4 << 20


@dataclass(frozen=True)
class Output:
    """A tensor to be written: in which file of the folder, under which name, dtype and shape."""

    file: str
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


class Made(NamedTuple):
    """What a group makes: a tensor for each of its outputs, in order; and a note (JSON) that outlives a restart."""

    tensors: Sequence[torch.Tensor]
    note: Any = None


@dataclass(frozen=True)
class Group:
    """Tensors that are made together.

    Attributes:
        name: of its own within the plan; our tensor's name, as a rule.
        reads: our names of the tensors that `make` gets, in order.
        outputs: what it makes; in one file or in several (the ranks of a foreign format).
        make: called in a thread; may return views, which are made contiguous one at a time.
        dtype: in which they are read (None: as stored, masters are fp32); rounded as bytes come in, never twice.
        memory: bytes that `make` needs beside what is read; None: as much as the outputs have.
    """

    name: str
    reads: tuple[str, ...]
    outputs: tuple[Output, ...]
    make: Callable[[Sequence[torch.Tensor]], Made]
    dtype: torch.dtype | None = None
    memory: int | None = None


@dataclass
class Written:
    """What is in the folder now.

    Attributes:
        files: {file: {tensor: where it lies}}.
        checksums: {(file, tensor): xxh3-128 of its bytes}.
        notes: {group: its note}, of those that made one.
    """

    files: dict[str, dict[str, Stored]]
    checksums: dict[tuple[str, str], str] = field(default_factory=dict)
    notes: dict[str, Any] = field(default_factory=dict)


def write_groups(
    folder: Path,
    source: Source,
    groups: Sequence[Group],
    *,
    options: Mapping[str, Any] | None = None,
    workers: int = 0,
    say: Callable[[str], Any] = lambda _: None,
) -> Written:
    """Make all groups and write them into safetensors files of `folder`, durably.

    What an earlier call wrote there for the same source, plan and options is kept, if its checksums hold.

    Args:
        options: JSON; all that decides the bytes beside the source and the outputs' names, dtypes and shapes.
        workers: threads; 0: as many as there are cores, at most 8. Memory does not grow with them: groups of more
            than twice the largest group together wait for each other.

    Raises:
        ResourceError: no space (told before anything is written), no permission.
        CheckpointError: the source is damaged.
    """
    writer = _Writer(folder, source, groups, options or {}, say)
    return writer.run(workers or min(8, os.cpu_count() or 1))


def memory_of(group: Group, source: Source) -> int:
    """Bytes of tensors that a group holds at its peak."""
    read = sum(source.memory(name, group.dtype) for name in group.reads)
    return read + (sum(output.bytes for output in group.outputs) if group.memory is None else group.memory)


def _size_of(group: Group, source: Source) -> int:
    """Bytes of a group as it is written, or as it is read where that is more (fp32 that becomes codes)."""
    read = sum(math.prod(source.shapes[n]) * (group.dtype or source.dtypes[n]).itemsize for n in group.reads)
    return max(read, sum(output.bytes for output in group.outputs))


class _Writer:
    def __init__(
        self,
        folder: Path,
        source: Source,
        groups: Sequence[Group],
        options: Mapping[str, Any],
        say: Callable[[str], Any],
    ) -> None:
        self.folder, self.source, self.groups, self.say = folder, source, groups, say
        assert len({group.name for group in groups}) == len(groups), "two groups of one name"
        headers = {name: make_header(tensors) for name, tensors in _by_file(groups).items()}
        self.headers = {name: header for name, (header, _) in headers.items()}
        self.written = Written({name: places for name, (_, places) in headers.items()})
        self.total = sum(output.bytes for group in groups for output in group.outputs)
        self.plan = _fingerprint(source, groups, self.headers, options)
        self.open_groups = {
            file: sum(file in {o.file for o in group.outputs} for group in groups) for file in self.headers
        }
        largest = max((_size_of(group, source) for group in groups), default=0)
        room = int(1.9 * largest)  # twice, less what is no tensor
        self.budget = _Budget(max(room, *(memory_of(group, source) for group in groups), 0))
        self.lock = threading.Lock()
        self.stop = threading.Event()
        self.done_bytes = self.kept_bytes = 0
        self.started = time.monotonic()

    def run(self, workers: int) -> Written:
        """Do all groups; see `write_groups`."""
        try:
            earlier = self._read_journal()
            self._check_space()
            self.fds = {name: os.open(self.folder / name, os.O_RDWR | os.O_CREAT, 0o640) for name in self.headers}
        except OSError as error:
            raise resource_error(error, self.folder) from error
        try:
            self._lay_out()
            with (
                open(self.folder / JOURNAL, "a", encoding="utf-8") as self.journal,
                ThreadPoolExecutor(workers, "convert", initializer=torch.set_num_threads, initargs=(1,)) as pool,
            ):
                futures = [pool.submit(self._do, group, earlier.get(group.name)) for group in self.groups]
                self._watch(futures)
        except OSError as error:
            raise resource_error(error, self.folder) from error
        finally:
            for fd in self.fds.values():
                os.close(fd)
        return self.written

    def _read_journal(self) -> dict[str, dict[str, Any]]:
        """{group: its line} of an earlier run of this plan; another plan's is thrown away."""
        path = self.folder / JOURNAL
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        entries = [entry for line in lines if (entry := _json_or_none(line)) is not None]
        if entries and entries[0].get("plan") == self.plan:
            self.say(f"goes on after an interrupted run: {len(entries) - 1} of {len(self.groups)} tensor groups")
            return {entry["group"]: entry for entry in entries[1:]}
        path.write_text(json.dumps({"plan": self.plan}) + "\n", encoding="utf-8")
        return {}

    def _check_space(self) -> None:
        sizes = {name: _size(header, self.written.files[name]) for name, header in self.headers.items()}
        here = sum(path.stat().st_blocks * 512 for name in sizes if (path := self.folder / name).exists())
        needed = max(0, sum(sizes.values()) - here) + _SPARE_BYTES
        free = shutil.disk_usage(self.folder).free
        if needed > free:
            raise ResourceError(f"{self.folder.parent}: the folder needs {needed} bytes, {free} are free; free some")

    def _lay_out(self) -> None:
        for name, fd in self.fds.items():
            header = self.headers[name]
            os.ftruncate(fd, _size(header, self.written.files[name]))
            write_at(fd, 0, memoryview(header))

    def _watch(self, futures: Sequence[Future[None]]) -> None:
        pending: set[Future[None]] = set(futures)
        try:
            while pending:
                done, pending = wait(pending, timeout=_SAY_SECONDS, return_when=FIRST_EXCEPTION)
                for future in done:
                    future.result()
                if pending:
                    self.say(self._progress())
        except BaseException:
            self.stop.set()
            for future in pending:
                future.cancel()
            raise
        self.say(self._progress())

    def _progress(self) -> str:
        seconds = max(time.monotonic() - self.started, 1e-3)
        with self.lock:
            done, kept = self.done_bytes, self.kept_bytes
        rate = (done - kept) / seconds
        left = f", {(self.total - done) / rate:.0f} s left" if rate and done < self.total else ""
        again = f" ({kept / 1e6:,.1f} from before)" if kept else ""
        return f"written {done / 1e6:,.1f} of {self.total / 1e6:,.1f} MB{again}, {rate / 1e6:,.0f} MB/s{left}"

    def _do(self, group: Group, earlier: Mapping[str, Any] | None) -> None:
        size = memory_of(group, self.source)
        self.budget.take(size)
        try:
            if self.stop.is_set():
                return
            kept = earlier is not None and self._is_there(group, earlier["checksums"])
            entry = earlier if kept else self._make(group)
            self._note(group, entry, kept=kept)
        except BaseException:
            self.stop.set()  # at once: the others need not finish what will be thrown away
            raise
        finally:
            self.budget.give(size)

    def _is_there(self, group: Group, checksums: Sequence[str]) -> bool:
        for output, wanted in zip(group.outputs, checksums, strict=True):
            place = self.written.files[output.file][output.name]
            found, at, end = checksum(), place.start, place.start + place.bytes
            while at < end and (data := os.pread(self.fds[output.file], min(_READ_BACK, end - at), at)):
                found.update(data)
                at += len(data)
            if found.hexdigest() != wanted:
                return False
        return True

    def _make(self, group: Group) -> dict[str, Any]:
        tensors, note = group.make([self.source.read(name, group.dtype) for name in group.reads])
        checksums = []
        for output, tensor in zip(group.outputs, tensors, strict=True):
            assert (tensor.dtype, tuple(tensor.shape)) == (output.dtype, output.shape), f"{output.name}: not as planned"
            data = bytes_of(tensor.contiguous())
            fd, start = self.fds[output.file], self.written.files[output.file][output.name].start
            write_at(fd, start, data)
            # to the disk while the next one is made, not all at once in the end; pages not yet there stay in the cache
            os.posix_fadvise(fd, start, len(data), os.POSIX_FADV_DONTNEED)
            checksums.append(checksum(data).hexdigest())
        return {"group": group.name, "checksums": checksums, "note": note}

    def _note(self, group: Group, entry: Any, *, kept: bool) -> None:
        """Count a group as done; the last one of a file makes the file durable, while others are still made."""
        size = sum(output.bytes for output in group.outputs)
        finished = []
        with self.lock:
            if not kept:
                self.journal.write(json.dumps(entry) + "\n")
                self.journal.flush()
            for output, found in zip(group.outputs, entry["checksums"], strict=True):
                self.written.checksums[output.file, output.name] = found
            if entry["note"] is not None:
                self.written.notes[group.name] = entry["note"]
            self.done_bytes += size
            self.kept_bytes += size if kept else 0
            for file in {output.file for output in group.outputs}:
                self.open_groups[file] -= 1
                if not self.open_groups[file]:
                    finished.append(file)
        for file in finished:
            os.fsync(self.fds[file])


class _Budget:
    """Bytes that groups in work may hold together."""

    def __init__(self, size: int) -> None:
        self._free = size
        self._changed = threading.Condition()

    def take(self, size: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._free >= size)
            self._free -= size

    def give(self, size: int) -> None:
        with self._changed:
            self._free += size
            self._changed.notify_all()


def _by_file(groups: Sequence[Group]) -> dict[str, list[tuple[str, torch.dtype, tuple[int, ...]]]]:
    """The tensors of each file, widest elements first, so that every one is aligned to its elements."""
    files: dict[str, list[tuple[str, torch.dtype, tuple[int, ...]]]] = {}
    for output in (output for group in groups for output in group.outputs):
        files.setdefault(output.file, []).append((output.name, output.dtype, output.shape))
    for file, tensors in files.items():
        assert len({name for name, *_ in tensors}) == len(tensors), f"{file}: two tensors of one name"
        tensors.sort(key=lambda tensor: -tensor[1].itemsize)
    return files


def _fingerprint(
    source: Source, groups: Sequence[Group], headers: Mapping[str, bytes], options: Mapping[str, Any]
) -> str:
    what = {
        "megafp8": __version__,
        "source": source.fingerprint,
        "options": dict(options),
        "files": {name: hashlib.sha256(header).hexdigest() for name, header in headers.items()},
        "groups": [[g.name, g.reads, str(g.dtype), [(o.file, o.name) for o in g.outputs]] for g in groups],
    }
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()


def _size(header: bytes, places: Mapping[str, Stored]) -> int:
    return max((place.start + place.bytes for place in places.values()), default=len(header))


def _json_or_none(line: str) -> Any:
    try:
        value = json.loads(line)
    except ValueError:  # the line that a kill cut
        return None
    return value if isinstance(value, dict) else None
