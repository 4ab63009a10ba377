"""Documents between stages: parts, zstd-compressed files whose rows are documents.

A row is a line of JSON with everything but the text and the text's size in bytes, then the text as it is and a
newline: to escape a text and to undo it would cost as much as to read the input.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import zstandard

from megafp8.corpus.compressed import InputStream
from megafp8.corpus.documents import Document
from megafp8.corpus.tasks import Input, Work

_LEVEL = 3
_PART_LEVEL = 1  # half the time of level 3 for 15 % more bytes, which the next stage reads once
_DOCUMENT_BYTES = 64  # what each document counts at least
EMPTY_LINES = zstandard.ZstdCompressor(level=_LEVEL).compress(b"")  # no line at all


@dataclass(frozen=True)
class View:
    """A part as a later stage sees it.

    Attributes:
        rows: documents in the part.
        text_bytes: of these.
        held_out: all of them are for validation, by their files; else none is.
    """

    part: Input
    rows: int
    text_bytes: int
    held_out: bool = False

    @property
    def inputs(self) -> tuple[Input, ...]:
        """As the inputs of a task that reads it with `read_view`."""
        return (self.part,)


class PartWriter:
    """Writes kept documents into parts of about `part_bytes` of text; `parts` says what each holds.

    Documents that are held out by their files have parts of their own.
    """

    def __init__(self, work: Work, part_bytes: int) -> None:
        self._work, self._part_bytes = work, part_bytes
        self.parts: list[dict[str, Any]] = []
        self._out: DocumentsWriter | None = None

    def add(self, document: Document, held_out: bool) -> None:
        """Append a document; `held_out`: it is for validation, whatever its text's hash says."""
        last = self.parts[-1] if self.parts else {}
        if self._out is None or self._is_full(last) or last["held_out"] != held_out:
            self.close()
            name = f"{len(self.parts):05d}.docs.zst"
            self._out = DocumentsWriter(self._work.output(name))
            self.parts.append({"name": name, "rows": 0, "text_bytes": 0, "held_out": held_out})
        assert self._out is not None
        self._out.add(document, held_out)
        self.parts[-1]["rows"] += 1
        self.parts[-1]["text_bytes"] += document.num_bytes

    def _is_full(self, part: dict[str, Any]) -> bool:
        """Of tiny documents it is the number that costs memory behind it: ids, lengths, records."""
        return bool(max(part["text_bytes"], part["rows"] * _DOCUMENT_BYTES) >= self._part_bytes)

    def close(self) -> None:
        """End the part that is being written."""
        if self._out is not None:
            self._out.close()
            self._out = None


class _Writer:
    """A zstd frame; nothing of the time or the machine is in the bytes."""

    def __init__(self, path: Path, level: int) -> None:
        self._file: IO[bytes] = open(path, "wb")  # noqa: SIM115 (closed by close)
        self._out = zstandard.ZstdCompressor(level=level).stream_writer(self._file, closefd=False)

    def close(self) -> None:
        """End the frame; without it readers take the file for cut."""
        self._out.close()
        self._file.close()


class LinesWriter(_Writer):
    """Compressed JSON lines."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, _LEVEL)

    def add(self, value: Any) -> None:
        """Append one value as a line."""
        self._out.write(json.dumps(value, ensure_ascii=False).encode("utf-8") + b"\n")


class DocumentsWriter(_Writer):
    """Rows of a part; `read_part` reads them."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, _PART_LEVEL)

    def add(self, document: Document, held_out: bool = False) -> None:
        """Append one document."""
        values: dict[str, Any] = {"id": document.id, "lang": document.language, "source": document.source}
        if document.metadata:
            values["meta"] = dict(document.metadata)
        if held_out:
            values["held_out"] = True
        values["bytes"] = len(document.utf8)
        head = json.dumps(values, ensure_ascii=False).encode("utf-8")
        self._out.write(b"".join((head, b"\n", document.utf8, b"\n")))


def read_lines(path: Path) -> Iterator[Any]:
    """The values of a file of `LinesWriter`."""
    with InputStream(path) as stream:
        while line := stream.reader.readline():
            yield json.loads(line)


def read_part(path: Path) -> Iterator[tuple[Document, bool]]:
    """(document, held out for validation) of each row."""
    for _, document, held_out in _rows(path, None):
        yield document, held_out


def _rows(path: Path, chosen: Callable[[int, bytes], bool] | None) -> Iterator[tuple[int, Document, bool]]:
    row = 0
    with InputStream(path) as stream:
        while line := stream.reader.readline():
            value = json.loads(line)
            text = stream.reader.read(value["bytes"] + 1)[:-1]
            if chosen is None or chosen(row, text):
                document = Document(value["id"], text.decode(), value["lang"], value["source"], value.get("meta", {}))
                vars(document)["utf8"] = text  # what it would compute
                yield row, document, value.get("held_out", False)
            row += 1


def read_view(work: Work, chosen: Callable[[int, bytes], bool] | None = None) -> Iterator[tuple[int, Document, bool]]:
    """(row, document, held out) of the part that is a task's first input, or of rows `chosen` by number and text.

    Raises:
        DataError: it changed since it was made.
    """
    yield from _rows(work.checked(0), chosen)
