"""Text files: one document each, decoded as told; nothing is guessed."""

from __future__ import annotations

from collections.abc import Iterator

from megafp8.corpus.compressed import DamagedError, InputStream
from megafp8.corpus.config import SourceConfig
from megafp8.corpus.documents import Bad, Document, Record, excerpt, too_long


def records(path: str, stream: InputStream, config: SourceConfig, first_line: int = 1) -> Iterator[Record]:
    """One record: the whole file."""
    try:
        data = stream.reader.read(config.max_record_bytes + 1)
    except DamagedError as error:
        yield Record(path, 1, Bad(path, 1, str(error), damaged=True))
        return
    yield too_long(path, 1, data, config) if len(data) > config.max_record_bytes else decoded(path, data, config)


def decoded(path: str, data: bytes, config: SourceConfig) -> Record:
    """The document of a file's bytes, or why they are none."""
    try:
        text = data.decode(config.encoding).removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        reason = f"not {config.encoding} at byte {error.start}; see source.encoding"
        return Record(path, line, Bad(path, line, reason, excerpt(data)))
    return Record(path, 1, Document(path, text, config.language, path))
