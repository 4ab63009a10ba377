"""JSON lines: an object a line.

Lines end at "\\n" and nowhere else (str.splitlines would also cut at U+2028, U+0085, form feeds, which are text).
"""

from __future__ import annotations

import codecs
from collections.abc import Iterator

from megafp8.corpus.compressed import UTF16_MARKS, DamagedError, InputStream
from megafp8.corpus.config import SourceConfig
from megafp8.corpus.documents import Bad, Record, excerpt, too_long


def records(path: str, stream: InputStream, config: SourceConfig, first_line: int = 1) -> Iterator[Record]:
    """A record for each line; what ends the file early is its last record."""
    line, first = first_line - 1, first_line == 1
    reader = stream.reader
    try:
        while data := reader.readline(config.max_record_bytes + 1):
            line += 1
            if line == 1:
                data = data.removeprefix(codecs.BOM_UTF8)
            if len(data) > config.max_record_bytes and not data.endswith(b"\n"):
                yield too_long(path, line, data, config)
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
