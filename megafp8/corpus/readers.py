"""From files to records: JSON lines and text files. Python's own documentation is in `stdlib_docs`.

Lines end at "\\n" and nowhere else (str.splitlines would also cut at U+2028, U+0085, form feeds, which are text).
Errors are of a record, or of the rest of a file; they are yielded as `Bad`, never raised and never swallowed.
"""

from __future__ import annotations

import codecs
import glob
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from megafp8.core.errors import DataError
from megafp8.corpus.compressed import UTF16_MARKS, DamagedError, InputStream
from megafp8.corpus.config import SourceConfig
from megafp8.corpus.documents import Bad, Document, Record, excerpt


@dataclass(frozen=True)
class InputFile:
    """An input as it was when the run began."""

    path: str
    num_bytes: int
    mtime_ns: int


class Source(Protocol):
    """What the run asks of a kind of source.

    Attributes:
        files: all inputs, in the order in which they are read.
        checksums: {path: xxh3_128 of the file}, filled as each has been read.
        position: bytes of the inputs read so far.
    """

    files: list[InputFile]
    checksums: dict[str, str]
    position: int

    def records(self) -> Iterator[Record]:
        """All records, always the same ones in the same order."""
        ...


def input_file(path: str) -> InputFile:
    """Size and time of one input.

    Raises:
        DataError: it cannot be read.
    """
    try:
        status = os.stat(path)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    return InputFile(path, status.st_size, status.st_mtime_ns)


def find_files(patterns: tuple[str, ...]) -> list[InputFile]:
    """The files that paths and globs name, sorted, each once.

    Raises:
        DataError: a pattern that matches no file.
    """
    found: set[str] = set()
    for pattern in patterns:
        expanded = os.path.expanduser(pattern)
        matches = [expanded] if os.path.isfile(expanded) else glob.glob(expanded, recursive=True)
        files = [path for path in matches if os.path.isfile(path)]
        if not files:
            where = f"(looked from {Path.cwd()}); correct source.files or source.valid_files"
            raise DataError(f"{pattern!r} matches no file {where}")
        found.update(files)
    return [input_file(path) for path in sorted(found)]


class FileSource:
    """Documents in files that a user names."""

    def __init__(self, config: SourceConfig) -> None:
        self.config = config
        self.held_out = {file.path for file in find_files(config.valid_files)}
        self.files = find_files(config.files + config.valid_files)
        self.checksums: dict[str, str] = {}
        self.position = 0

    def records(self) -> Iterator[Record]:
        done = 0
        for file in self.files:
            try:
                with InputStream(file.path) as stream:
                    for record in stream_records(file.path, stream, self.config):
                        self.position = done + stream.position
                        yield replace(record, held_out=True) if file.path in self.held_out else record
                    self.checksums[file.path] = stream.checksum()
            except OSError as error:
                raise DataError(f"{file.path}: cannot be read: {error.strerror}") from error
            done += file.num_bytes
            self.position = done


def stream_records(path: str, stream: InputStream, config: SourceConfig, first_line: int = 1) -> Iterator[Record]:
    """The records of an opened file, or of a range of a JSON lines file that begins with line `first_line`."""
    return (
        jsonl_records(path, stream, config, first_line)
        if config.kind == "jsonl"
        else text_records(path, stream, config)
    )


def jsonl_records(path: str, stream: InputStream, config: SourceConfig, first_line: int = 1) -> Iterator[Record]:
    """A record for each line; what ends the file early is its last record."""
    line, first = first_line - 1, first_line == 1
    reader = stream.reader
    try:
        while data := reader.readline(config.max_record_bytes + 1):
            line += 1
            if line == 1:
                data = data.removeprefix(codecs.BOM_UTF8)
            if len(data) > config.max_record_bytes and not data.endswith(b"\n"):
                yield _too_long(path, line, data, config)
                while data and not data.endswith(b"\n"):
                    data = reader.readline(1 << 20)
                continue
            if first and data.strip():
                first = False
                if reason := _foreign(data):
                    yield Record(path, line, Bad(path, line, reason, excerpt(data), damaged=True))
                    return
            yield Record(path, line, data)
    except DamagedError as error:
        yield Record(path, line + 1, Bad(path, line + 1, str(error), damaged=True))


def _foreign(first: bytes) -> str:
    """Why a file that begins like this is not JSON lines at all, or "" if it may be."""
    if first[:2] in UTF16_MARKS:
        return "UTF-16 text, not UTF-8; convert it: iconv -f UTF-16 -t UTF-8"
    if first.lstrip().startswith(b"["):
        return "a JSON array, not JSON lines with one object each; convert it: jq -c '.[]'"
    return ""


def _too_long(path: str, line: int, data: bytes, config: SourceConfig) -> Record:
    reason = f"longer than {config.max_record_bytes} bytes; see source.max_record_bytes"
    return Record(path, line, Bad(path, line, reason, excerpt(data)))


def text_records(path: str, stream: InputStream, config: SourceConfig) -> Iterator[Record]:
    """One document: the whole file, decoded as told."""
    try:
        data = stream.reader.read(config.max_record_bytes + 1)
    except DamagedError as error:
        yield Record(path, 1, Bad(path, 1, str(error), damaged=True))
        return
    if len(data) > config.max_record_bytes:
        yield _too_long(path, 1, data, config)
        return
    try:
        text = data.decode(config.encoding).removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        reason = f"not {config.encoding} at byte {error.start}; see source.encoding"
        yield Record(path, line, Bad(path, line, reason, excerpt(data)))
        return
    yield Record(path, 1, Document(path, text, config.language, path))
