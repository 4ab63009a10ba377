"""From files to records; how each kind of file is read is a file of `formats/`.

Errors are of a record, or of the rest of a file; they are yielded as `Bad`, never raised and never swallowed.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Protocol

from megafp8.core.errors import ConfigError
from megafp8.corpus.compressed import InputStream
from megafp8.corpus.config import SourceConfig
from megafp8.corpus.documents import Record
from megafp8.corpus.storage import InputFile, find_files, input_file, place_of

__all__ = ["FileSource", "InputFile", "Source", "find_files", "input_file", "stream_records"]


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


def format_module(kind: str) -> Any:
    """The module that reads a kind of file.

    Raises:
        ConfigError: it needs a package that is not installed.
    """
    try:
        return importlib.import_module(f"megafp8.corpus.formats.{kind}")
    except ImportError as error:
        way = 'run `pip install "megafp8[corpus]"`'
        raise ConfigError(f'source.kind = "{kind}": needs a package that is not installed ({error}); {way}') from None


class FileSource:
    """Documents in files that a user names."""

    def __init__(self, config: SourceConfig) -> None:
        self.config = config
        inside = getattr(format_module(config.kind), "files_inside", None)
        entered = inside and (lambda folder: inside(folder, config))
        held_out = {place_of(file.path) for file in find_files(config.valid_files, entered)}
        self.files = find_files(config.files + config.valid_files, entered)
        self.held_out = {file.path for file in self.files if held_out and place_of(file.path) in held_out}
        self.checksums: dict[str, str] = {}
        self.position = 0

    def records(self) -> Iterator[Record]:
        done = 0
        for file in self.files:
            with InputStream(file.path) as stream:
                for record in stream_records(file.path, stream, self.config):
                    self.position = done + stream.position
                    yield replace(record, held_out=True) if file.path in self.held_out else record
                self.checksums[file.path] = stream.checksum()
            done += file.num_bytes
            self.position = done


def stream_records(path: str, stream: InputStream, config: SourceConfig, first_line: int = 1) -> Iterator[Record]:
    """The records of an opened file, or of a range of a JSON lines file that begins with line `first_line`."""
    records: Iterator[Record] = format_module(config.kind).records(path, stream, config, first_line)
    return records
