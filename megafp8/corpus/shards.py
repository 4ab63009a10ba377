"""How inputs are dealt to tasks: small files together, a large plain JSON lines file in ranges that end at line ends.

Bounds depend on the files alone, not on workers, and a file that is added moves few of them: a group ends behind a
file by a hash of its name (content-defined chunking), or when it is full.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import xxhash

from megafp8.core.errors import DataError
from megafp8.corpus.compressed import InputStream, is_plain
from megafp8.corpus.config import SourceConfig
from megafp8.corpus.documents import Record
from megafp8.corpus.readers import InputFile, stream_records
from megafp8.corpus.stdlib_docs import StdlibSource
from megafp8.corpus.storage import input_file, is_url
from megafp8.corpus.tasks import Input, Work


@dataclass(frozen=True)
class Shard:
    """What one task reads: whole files, or the lines of one that begin in [start, stop).

    Attributes:
        first_line: number of the first of these lines.
    """

    files: tuple[InputFile, ...]
    start: int = 0
    stop: int = 0
    first_line: int = 1

    @property
    def num_bytes(self) -> int:
        """Bytes of it on disk."""
        return self.stop - self.start if self.stop else sum(file.num_bytes for file in self.files)

    @property
    def name(self) -> str:
        """For logs."""
        more = f" and {len(self.files) - 1} more" if len(self.files) > 1 else ""
        return f"{self.files[0].path}{f'[{self.start}:{self.stop}]' if self.stop else ''}{more}"

    @property
    def inputs(self) -> tuple[Input, ...]:
        """As a task's inputs."""
        return tuple(outside(file, self.start, self.stop) for file in self.files)


def outside(file: InputFile, start: int = 0, stop: int = 0) -> Input:
    """A user's file, or a range of it, as an input."""
    return Input(file.path, file.num_bytes, outside=True, mtime_ns=file.mtime_ns, start=start, stop=stop)


def is_large(file: InputFile, config: SourceConfig, shard_bytes: int) -> bool:
    """Whether a file is read by several tasks."""
    return config.kind == "jsonl" and file.num_bytes > shard_bytes and is_plain(file.path)


def is_table(file: InputFile, config: SourceConfig, shard_bytes: int) -> bool:
    """Whether a file is read by several tasks that need not look for bounds: a row group goes where it begins."""
    return config.kind == "parquet" and file.num_bytes > shard_bytes


def ranges(file: InputFile, shard_bytes: int) -> list[tuple[int, int]]:
    """A large file in pieces of equal size, wherever its lines end."""
    return [(at, min(at + shard_bytes, file.num_bytes)) for at in range(0, file.num_bytes, shard_bytes)]


def plan_shards(
    files: Sequence[InputFile], config: SourceConfig, shard_bytes: int, cuts: Mapping[str, Sequence[Mapping[str, int]]]
) -> list[Shard]:
    """All shards, in the order of the files.

    Args:
        cuts: for each large file what the stage `split` counted in its ranges: `lines`, `first_end`.
    """
    if config.kind == "python_stdlib":  # its documents depend on each other's files
        return [Shard(tuple(files))] if files else []
    shards: list[Shard] = []
    group: list[InputFile] = []
    size = 0
    for file in files:
        if file.path in cuts or is_table(file, config, shard_bytes):
            shards += [Shard(tuple(group))] if group else []
            group, size = [], 0
            if file.path in cuts:
                shards += _line_ranges(file, shard_bytes, cuts[file.path])
            else:
                shards += [Shard((file,), start, stop) for start, stop in ranges(file, shard_bytes)]
            continue
        group.append(file)
        size += file.num_bytes
        chance = xxhash.xxh3_64_intdigest(file.path.encode("utf-8", "surrogateescape")) / 2.0**64
        if size >= shard_bytes or chance < 2 * max(file.num_bytes, 1) / shard_bytes:
            shards.append(Shard(tuple(group)))
            group, size = [], 0
    return shards + ([Shard(tuple(group))] if group else [])


def _line_ranges(file: InputFile, shard_bytes: int, cuts: Sequence[Mapping[str, int]]) -> Iterator[Shard]:
    """Ranges moved to line ends; a range without one belongs to the line that runs through it."""
    begin, first_line, lines = 0, 1, 0
    for number, (start, _) in enumerate(ranges(file, shard_bytes)):
        end = cuts[number]["first_end"]  # behind the first newline of this range; 0: there is none
        if start and end and end < file.num_bytes:
            yield Shard((file,), begin, end, first_line)
            begin, first_line = end, lines + 2  # that newline is of this range, counted below
        lines += cuts[number]["lines"]
    yield Shard((file,), begin, file.num_bytes, first_line)


def shard_values(shard: Shard, config: Mapping[str, Any], held_out: set[str]) -> dict[str, Any]:
    """What decides the bytes of a task that reads a shard, besides its inputs."""
    source = {key: value for key, value in config.items() if key not in ("files", "valid_files")}
    return {
        "source": source,
        "first_line": shard.first_line,
        "held_out": [number for number, file in enumerate(shard.files) if file.path in held_out],
    }


def check_unchanged(one: Input) -> None:
    """Make sure that a user's file is still what it was when the run began.

    Raises:
        DataError: it was written to, so that what has been read may be half of this and half of that.
    """
    if is_url(one.path):  # objects are replaced as a whole
        return
    now = input_file(one.path)
    if (now.num_bytes, now.mtime_ns) != (one.num_bytes, one.mtime_ns):
        raise DataError(
            f"{one.path}: was written to while it was being read ({one.num_bytes} bytes before, {now.num_bytes} now); "
            "wait until it is complete, then run the same command again"
        )


def read_shard(work: Work, config: SourceConfig) -> Iterator[tuple[Record, int]]:
    """The records of a task's shard, each with the bytes read so far."""
    if config.kind == "python_stdlib":
        source = StdlibSource(config)
        for record in source.records():
            yield record, source.position
        for number, one in enumerate(work.inputs):
            work.set_checksum(number, source.checksums[one.path])
        return
    held_out, done = set(work.values["held_out"]), 0
    for number, one in enumerate(work.inputs):
        with InputStream(one.path, start=one.start, stop=one.stop) as stream:
            for record in stream_records(one.path, stream, config, work.values["first_line"]):
                yield (replace(record, held_out=True) if number in held_out else record), done + stream.position
            work.set_checksum(number, stream.checksum())
            check_unchanged(one)
        done += stream.position
