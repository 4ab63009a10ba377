"""Records, documents, and what is wrong with a bad one: the pure part of reading, without files.

A record is either turned into a document or into a `Bad` with a reason; nothing is dropped in between. Of a key that
a JSON object repeats, the last one counts (as in Python's json).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import xxhash

from megafp8.corpus.config import SourceConfig, SplitConfig

SPLITS = ("train", "valid")
_INVISIBLE = "\u200b\u200c\u200d\u2060\ufeff"  # zero-width characters: a text of these alone has no content
_SHOWN_KEYS = 8
_EXCERPT_CHARACTERS = 120


@dataclass(frozen=True)
class Document:
    """A text and where it came from.

    Attributes:
        metadata: JSON values that readers and steps add. A number under a key that begins with "count:" is added up
            over the corpus and not kept with the document (`{"count:email": 2}`: two addresses were masked).
    """

    id: str
    text: str
    language: str
    source: str
    metadata: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @cached_property
    def utf8(self) -> bytes:
        """The text's bytes; kept, since sizes, hashes and files ask for them again and again."""
        return self.text.encode("utf-8")

    @property
    def num_bytes(self) -> int:
        """Bytes of the text as UTF-8."""
        return len(self.text) if self.text.isascii() else len(self.utf8)

    @property
    def is_empty(self) -> bool:
        """True if there is nothing but white space and zero-width characters."""
        return not self.text.strip().strip(_INVISIBLE).strip()


@dataclass(frozen=True)
class Dropped:
    """What a step returns instead of a document that it does not keep.

    Attributes:
        reason: one of a few words or numbers of a rule, by which dropped documents are counted.
        detail: what it met in this document, for the sample that is kept.
    """

    reason: str
    detail: str = ""


@dataclass(frozen=True)
class Bad:
    """Why a record, or (`damaged`) the rest of a file, could not be taken."""

    file: str
    line: int
    reason: str
    excerpt: str = ""
    damaged: bool = False

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.reason}"


@dataclass(frozen=True)
class Skipped:
    """What a reader knows to be no text of the corpus, such as an image in a web archive; counted as dropped."""

    document: Document
    why: Dropped


@dataclass(frozen=True)
class Record:
    """What a reader yields: a raw line, a ready document, or a problem; `held_out` if its file is for validation."""

    file: str
    line: int
    data: bytes | Document | Bad | Skipped
    held_out: bool = False

    @property
    def num_bytes(self) -> int:
        """Bytes it carries, for cutting batches."""
        if isinstance(self.data, bytes):
            return len(self.data)
        return len(self.data.text) if isinstance(self.data, Document) else 0


def parse(record: Record, config: SourceConfig) -> Document | Bad | Skipped | None:
    """The document of a record, its problem, or None for a blank line."""
    data = record.data
    if not isinstance(data, bytes):
        return data
    line = data.strip(b" \t\r\n")
    if not line:
        return None
    try:
        value = json.loads(line.decode("utf-8"))
        return _document(value, record, config)
    except UnicodeDecodeError as error:
        reason = f"not UTF-8 at byte {error.start} of the line"
    except RecursionError:
        reason = "JSON nested too deeply"
    except ValueError as error:
        reason = str(error) if isinstance(error, _Refused) else f"not JSON: {error}"
    return Bad(record.file, record.line, reason, excerpt(line))


def document_of(value: Any, file: str, line: int, config: SourceConfig) -> Document | Bad:
    """The document of a JSON value or of a row of a table, or why it is none."""
    try:
        return _document(value, Record(file, line, b""), config)
    except _Refused as error:
        return Bad(file, line, str(error))


def too_long(path: str, line: int, data: bytes, config: SourceConfig) -> Record:
    """A record that is longer than it may be, by its beginning."""
    reason = f"longer than {config.max_record_bytes} bytes; see source.max_record_bytes"
    return Record(path, line, Bad(path, line, reason, excerpt(data)))


class _Refused(ValueError):
    """A record that is JSON, but no document."""


def _document(value: Any, record: Record, config: SourceConfig) -> Document:
    if not isinstance(value, dict):
        raise _Refused(f"a JSON {type(value).__name__}, not an object")
    if config.text_key not in value:
        keys = printable(", ".join(list(value)[:_SHOWN_KEYS])) or "nothing"
        raise _Refused(f"no key {config.text_key!r} (it has: {keys}); see source.text_key")
    text = value[config.text_key]
    if not isinstance(text, str):
        raise _Refused(f"{config.text_key!r} is {type(text).__name__}, not a string")
    number = value.get(config.id_key)
    name = str(number) if isinstance(number, (str, int)) else f"{record.file}:{record.line}"
    language, source = value.get(config.language_key), value.get(config.source_key)
    document = Document(
        name,
        text,
        language if isinstance(language, str) else config.language,
        source if isinstance(source, str) else record.file,
        {key: value[key] for key in config.metadata_keys if key in value},
    )
    if reason := unwritable(document):
        raise _Refused(reason)
    return document


def unwritable(document: Document) -> str:
    """Why a document cannot be written as a line of JSON in UTF-8, or "" if it can.

    Half of a surrogate pair is what JSON's escapes allow and no encoding does; metadata may hold anything.
    """
    try:
        name = "text"
        _ = document.utf8
        for name in ("id", "language", "source"):
            getattr(document, name).encode("utf-8")
        name = "metadata"
        if document.metadata:
            json.dumps(dict(document.metadata), ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        where = f" at character {error.start}" if name == "text" else ""
        return f"half of a surrogate pair in its {name}{where}; no text holds one"
    except TypeError as error:
        return f"{name} that JSON does not know: {error}"
    return ""


def printable(text: str) -> str:
    """A text that can be written: halves of surrogate pairs as escapes."""
    return text.encode("utf-8", errors="backslashreplace").decode("utf-8")


def excerpt(data: bytes) -> str:
    """The beginning of a bad record, printable."""
    return data[: 4 * _EXCERPT_CHARACTERS].decode("utf-8", errors="backslashreplace")[:_EXCERPT_CHARACTERS]


def text_hash(text: str | bytes, seed: int) -> int:
    """64-bit hash of a text (xxh3 of its UTF-8)."""
    return xxhash.xxh3_64_intdigest(text.encode("utf-8") if isinstance(text, str) else text, seed=seed)


def is_wanted(document: Document, config: SourceConfig) -> bool:
    """Whether a document is in one of the languages asked for."""
    return not config.languages or document.language in config.languages


def split_of(text: str | bytes, config: SplitConfig) -> str:
    """ "train" or "valid": equal texts go together, and a growing corpus moves none."""
    return "valid" if text_hash(text, config.seed) < config.valid_share * 2.0**64 else "train"
