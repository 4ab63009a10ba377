"""Parquet tables: a document of each row, a row group at a time.

Of a range [start, stop) of a file those row groups are read that begin in it: every row group is in exactly one of
the ranges that cover a file, and nobody needs to look into it before.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import date, time, timedelta
from decimal import Decimal
from typing import Any

import pyarrow
import pyarrow.parquet

from megafp8.core.errors import one_line
from megafp8.corpus.compressed import InputStream
from megafp8.corpus.config import SourceConfig
from megafp8.corpus.documents import Bad, Document, Record, document_of
from megafp8.corpus.storage import UnreadableError, open_binary

_BATCH_ROWS = 256


def records(path: str, stream: InputStream, config: SourceConfig, first_line: int = 1) -> Iterator[Record]:
    """A record for each row, numbered from 1 through the file; a row group that cannot be read is one bad record."""
    try:
        with open_binary(path) as file, pyarrow.parquet.ParquetFile(file) as table:
            names = table.schema_arrow.names
            if config.text_key not in names:
                shown = ", ".join(names[:8]) or "nothing"
                reason = f"no column {config.text_key!r} (it has: {shown}); see source.text_key"
                yield Record(path, 1, Bad(path, 1, reason, damaged=True))
                return
            row = 1
            for number in range(table.num_row_groups):
                group = table.metadata.row_group(number)
                if stream.start <= _begin(group) < stream.stop:
                    yield from _group_records(path, table, number, row, config)
                row += group.num_rows
    except (pyarrow.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno:
            raise UnreadableError(f"{path}: cannot be read: {error.strerror}") from error
        yield Record(path, 1, Bad(path, 1, f"not a Parquet file: {one_line(error)}", damaged=True))


def _begin(group: Any) -> int:
    """The first byte of a row group."""
    columns = [group.column(i) for i in range(group.num_columns)]
    offsets = [(c.dictionary_page_offset or c.data_page_offset, c.data_page_offset) for c in columns]
    return min(min(pair) for pair in offsets)


def _group_records(path: str, table: Any, number: int, row: int, config: SourceConfig) -> Iterator[Record]:
    keys = (config.text_key, config.id_key, config.language_key, config.source_key, *config.metadata_keys)
    columns = [name for name in dict.fromkeys(keys) if name in table.schema_arrow.names]
    done = 0
    try:
        for batch in table.iter_batches(batch_size=_BATCH_ROWS, row_groups=[number], columns=columns):
            for values in batch.to_pylist():
                yield Record(path, row + done, _document(path, row + done, values, config))
                done += 1
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        if isinstance(error, OSError) and error.errno:
            raise UnreadableError(f"{path}: cannot be read: {error.strerror}") from error
        left = table.metadata.row_group(number).num_rows - done
        reason = f"{left} rows of row group {number} cannot be read: {one_line(error)}"
        yield Record(path, row + done, Bad(path, row + done, reason, damaged=True))


def _document(path: str, row: int, values: dict[str, Any], config: SourceConfig) -> Document | Bad:
    for key, value in values.items():
        if isinstance(value, bytes):  # a column without the mark that it is text
            try:
                values[key] = value.decode("utf-8")
            except UnicodeDecodeError as error:
                return Bad(path, row, f"{key!r} is not UTF-8 at byte {error.start}")
        elif key in config.metadata_keys:
            values[key] = _plain(value)
    size = len(values[config.text_key] or "")
    if size > config.max_record_bytes:
        return Bad(path, row, f"longer than {config.max_record_bytes} bytes; see source.max_record_bytes")
    return document_of(values, path, row, config)


def _plain(value: Any) -> Any:
    """A value of a table as JSON has it: dates, times and decimal numbers as text."""
    if isinstance(value, dict):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    return str(value) if isinstance(value, (date, time, timedelta, Decimal)) else value
