"""Source trees: a document of each text file in a folder whose name ends as asked for.

Hidden folders and files, links, and folders that hold other people's or generated files are not entered. A file that
is asked for and is no text (a NUL byte, or not UTF-8) is bad.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from megafp8.corpus.compressed import InputStream
from megafp8.corpus.config import SourceConfig
from megafp8.corpus.documents import Bad, Document, Record, excerpt, too_long
from megafp8.corpus.formats import text

_NOT_ENTERED = {"__pycache__", "node_modules", "site-packages", "dist-packages", "venv"}


def files_inside(folder: str, config: SourceConfig) -> list[str]:
    """The files below a folder that are read, sorted."""
    found = []
    for at, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in _NOT_ENTERED]
        names = [name for name in names if not name.startswith(".") and name.endswith(config.suffixes)]
        paths = [os.path.join(at, name) for name in names]
        found += [path for path in paths if os.path.isfile(path) and not os.path.islink(path)]
    return sorted(found)


def records(path: str, stream: InputStream, config: SourceConfig, first_line: int = 1) -> Iterator[Record]:
    """One record: the file as it lies there, not decompressed by its content."""
    data = stream.raw(config.max_record_bytes + 1)
    if len(data) > config.max_record_bytes:
        yield too_long(path, 1, data, config)
        return
    if (at := data.find(b"\0")) >= 0:
        line = data[:at].count(b"\n") + 1
        yield Record(path, line, Bad(path, line, f"binary: a NUL at byte {at}", excerpt(data)))
        return
    record = text.decoded(path, data, config)
    if isinstance(record.data, Document):
        record = replace(record, data=replace(record.data, metadata={"suffix": Path(path).suffix}))
    yield record
