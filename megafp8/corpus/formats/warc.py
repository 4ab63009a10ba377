"""WARC and WET archives: web pages by their main content, converted texts as they are.

A page is a `response` with status 200 and HTML or plain text; its characters are decoded by what the page itself and
its bytes say (resiliparse, as browsers do it). Responses with another status or of another type are skipped, counted
by reason. Requests, metadata and revisits are no documents. ISO 28500.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

from fastwarc.warc import ArchiveIterator, WarcRecordType
from resiliparse.extract.html2text import extract_plain_text
from resiliparse.parse.encoding import bytes_to_str, detect_encoding

from megafp8.core.errors import is_fault, one_line
from megafp8.corpus.compressed import DamagedError, InputStream
from megafp8.corpus.config import SourceConfig
from megafp8.corpus.documents import Bad, Document, Dropped, Record, Skipped, excerpt

_ALL = WarcRecordType.any_type
_TAIL = 128
_HTML = ("text/html", "application/xhtml+xml")
_TEXTS = WarcRecordType.response | WarcRecordType.conversion | WarcRecordType.resource
_HEADER = (
    "WARC/1.1\r\nWARC-Type: response\r\nContent-Type: application/http; msgtype=response\r\nContent-Length: %d\r\n\r\n"
)


def records(path: str, stream: InputStream, config: SourceConfig, first_line: int = 1) -> Iterator[Record]:
    """A record for each page or text, numbered by its place among all records of the archive."""
    number, source, last = 0, _Watched(stream), b""
    archive: Any = source
    try:
        for one in ArchiveIterator(archive, parse_http=False, stream_detect=False, record_types=_ALL):
            number, last = number + 1, b""
            if not one.record_type & _TEXTS:
                continue
            if one.content_length > config.max_record_bytes:
                reason = f"longer than {config.max_record_bytes} bytes; see source.max_record_bytes"
                yield Record(path, number, Bad(path, number, reason))
                continue
            last = one.reader.read()
            yield Record(path, number, _taken(one, last, path, number, config))
            if source.damage:
                break
        source.check_end(last)
    except (OSError, ValueError, DamagedError) as error:
        source.damage = source.damage or str(error)
    if source.damage:
        yield Record(path, number + 1, Bad(path, number + 1, source.damage, damaged=True))


class _Watched:
    """What the archive's reader reads from; keeps what that reader would take for a good end: damage, a cut header."""

    def __init__(self, stream: InputStream) -> None:
        self._reader = stream.reader
        self._done = 0
        self._tail = b""
        self.damage = ""

    def read(self, size: int = -1) -> bytes:
        try:
            data = self._reader.read1(size)  # not `read`, which loses what it has when the stream turns out damaged
        except DamagedError as error:
            self.damage = str(error)
            return b""
        self._done += len(data)
        self._tail = (self._tail + data[-_TAIL:])[-_TAIL:]
        return data

    def tell(self) -> int:
        return self._done

    def check_end(self, last: bytes) -> None:
        """Note it if the archive ends neither in an empty line nor with the payload of its last record."""
        if self.damage or not self._done or self._tail.endswith(b"\r\n\r\n"):
            return
        ending = last[-_TAIL // 2 :].rstrip(b"\r\n")
        if not ending or not self._tail.rstrip(b"\r\n").endswith(ending):
            self.damage = "the archive is cut short in the header of a record"


def _taken(one: Any, data: bytes, path: str, number: int, config: SourceConfig) -> Document | Bad | Skipped:
    url, length = one.headers.get("WARC-Target-URI", ""), int(one.headers.get("Content-Length", "0"))
    if len(data) != length:
        return Bad(path, number, f"cut short: {len(data)} of {length} bytes of {url}", damaged=True)
    name = (one.headers.get("WARC-Record-ID") or f"{path}:{number}").removeprefix("<urn:uuid:").removesuffix(">")
    kind = one.headers.get("Content-Type", "")
    metadata = {"url": url, "date": one.headers.get("WARC-Date", "")}
    text: str | Dropped
    try:
        if one.record_type == WarcRecordType.response:
            text = _page(data)
        elif one.record_type == WarcRecordType.conversion or kind.startswith("text/plain"):
            text = data.decode("utf-8")
        else:
            text = Dropped("no text", kind)
    except UnicodeDecodeError as error:
        return Bad(path, number, f"not UTF-8 at byte {error.start} of {url}", excerpt(data))
    except BaseException as error:  # of one page in a million the extraction may fail in any way
        if not is_fault(error):
            raise
        return Bad(path, number, f"{url}: {type(error).__name__}: {one_line(error)}", excerpt(data))
    document = Document(name, "" if isinstance(text, Dropped) else text, config.language, path, metadata)
    return Skipped(document, text) if isinstance(text, Dropped) else document


def _page(data: bytes) -> str | Dropped:
    """The main content of an HTTP response, or why it has none."""
    record = (_HEADER % len(data)).encode() + data + b"\r\n\r\n"
    one = next(ArchiveIterator(io.BytesIO(record), parse_http=True, auto_decode="all", stream_detect=False))
    if one.http_headers is None or not one.http_headers.status_code:
        raise ValueError("no HTTP response")
    if one.http_headers.status_code != 200:
        return Dropped(f"HTTP status {one.http_headers.status_code}")
    kind = (one.http_content_type or "text/html").lower()
    if kind not in _HTML and kind != "text/plain":
        return Dropped("no text", kind)
    body = one.reader.read()
    found = detect_encoding(body) or "utf-8"
    try:
        text = bytes_to_str(body, one.http_charset or found, errors="replace")
    except LookupError:  # the server names no character set that there is: the page itself is asked, as browsers do
        text = bytes_to_str(body, found, errors="replace")
    return text if kind == "text/plain" else extract_plain_text(text, main_content=True)
