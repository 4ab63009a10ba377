"""Wikipedia's XML dumps (MediaWiki's export format 0.10 and 0.11): a document of each article, as prose.

The dump is cut at `<page>` and `</page>`, which cannot stand in a page (its `<` is written `&lt;`), and each page is
parsed by itself: one that is no XML costs that page only, and no declaration outside of it has any effect. Redirects,
other namespaces than 0 and models other than wikitext are skipped, counted by reason. Of several revisions the last one
counts. A dump has to end with `</mediawiki>`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from urllib.parse import quote
from xml.parsers import expat

from megafp8.corpus.compressed import DamagedError, InputStream
from megafp8.corpus.config import SourceConfig
from megafp8.corpus.documents import Bad, Document, Dropped, Record, Skipped, excerpt
from megafp8.corpus.wikitext import prose

_BEGIN, _END, _LAST = b"<page>", b"</page>", b"</mediawiki>"
_FIELDS = {("title",), ("ns",), ("id",), *(("revision", name) for name in ("timestamp", "model", "text"))}
_CHUNK = 1 << 20
_HEAD = 1 << 16  # bytes before the first page that say which wiki it is


def records(path: str, stream: InputStream, config: SourceConfig, first_line: int = 1) -> Iterator[Record]:
    """A record for each page, numbered by its place in the dump."""
    pages = _Pages(stream, config.max_record_bytes)
    number, damage = 0, ""
    try:
        for data in pages:
            number += 1
            yield Record(path, number, _taken(data, pages, path, number, config))
        damage = pages.missing
    except DamagedError as error:
        damage = str(error)
    if damage:
        yield Record(path, number + 1, Bad(path, number + 1, damage, damaged=True))


class _Pages:
    """Cuts a dump into pages; an empty one stands for a page that is too long.

    Attributes:
        head: what stands before the first page, at most 64 KiB of it.
        missing: what was not there when the dump ended.
    """

    def __init__(self, stream: InputStream, max_bytes: int) -> None:
        self._reader, self._max_bytes = stream.reader, max_bytes
        self.head, self.missing = b"", ""

    def __iter__(self) -> Iterator[bytes]:
        data, start = b"", 0  # `start`: of the page that is open in `data`, or of what is behind the last one
        inside = too_long = begun = ended = False
        while chunk := self._reader.read1(_CHUNK):
            searched = max(start, len(data) - len(_LAST)) - start
            data, start = data[start:] + chunk, 0
            while (at := data.find(_END if inside else _BEGIN, searched)) >= 0:
                if inside:
                    searched = at + len(_END)
                    yield b"" if too_long or searched - start > self._max_bytes else data[start:searched]
                    start, inside, too_long = searched, False, False
                else:
                    self._add_head(b"" if begun else data[start:at])
                    start = searched = at
                    inside = begun = True
            if inside and len(data) - start > self._max_bytes:
                too_long, start = True, len(data) - len(_END)
            elif not inside:
                ended = ended or data.find(_LAST, start) >= 0
                kept = max(start, len(data) - len(_LAST))
                self._add_head(b"" if begun else data[start:kept])
                start = kept
        if inside or not ended:
            self._add_head(b"" if begun else data[start:])
            is_dump = begun or b"<mediawiki" in self.head
            self.missing = "the dump is cut short" if is_dump else "no MediaWiki dump (no <mediawiki>, no <page>)"

    def _add_head(self, data: bytes) -> None:
        self.head += data[: _HEAD - len(self.head)]


def _taken(data: bytes, pages: _Pages, path: str, number: int, config: SourceConfig) -> Document | Bad | Skipped:
    if not data:
        return Bad(path, number, f"longer than {config.max_record_bytes} bytes; see source.max_record_bytes")
    try:
        found = _fields(data)
    except expat.ExpatError as error:
        return Bad(path, number, f"page is no XML ({error})", excerpt(data))
    wiki = _first(pages.head, rb"<dbname>([^<]+)</dbname>")
    base = _first(pages.head, rb"<base>(https?://[^/<]+/[^/<]+/)[^<]*</base>")
    title = found.get("title", "")
    metadata = {"title": title, "date": found.get("timestamp", "")}
    if base:
        metadata["url"] = base + quote(title.replace(" ", "_"), safe="/:(),")
    language = config.language or _first(pages.head, rb"<mediawiki\b[^>]*\bxml:lang=\"([^\"]+)\"")
    name = f"{wiki}/{found.get('id', number)}" if wiki else f"{path}:{found.get('id', number)}"
    why = _no_article(found)
    if why:
        return Skipped(Document(name, "", language, wiki or path, metadata), Dropped(why, title))
    return Document(name, prose(found.get("text", "")), language, wiki or path, metadata)


def _no_article(found: dict[str, str]) -> str:
    if "redirect" in found:
        return "redirect"
    if (space := found.get("ns", "0").strip()) != "0":
        return f"namespace {space}"
    if (model := found.get("model", "wikitext").strip()) != "wikitext":
        return f"model {model}"
    return ""


def _first(head: bytes, pattern: bytes) -> str:
    found = re.search(pattern, head)
    return found[1].decode("utf-8", errors="replace").strip() if found else ""


def _fields(page: bytes) -> dict[str, str]:
    """title, ns, id, redirect of a page; timestamp, model, text of its last revision.

    Raises:
        ExpatError: no XML.
    """
    found: dict[str, str] = {}
    path: list[str] = []
    parser = expat.ParserCreate("utf-8")
    parser.buffer_text = True
    words: list[str] = []

    def begin(name: str, _: dict[str, str]) -> None:
        path.append(name)
        words.clear()
        if path[1:] == ["redirect"]:
            found["redirect"] = ""

    def end(name: str) -> None:
        if tuple(path[1:]) in _FIELDS:
            found[name] = "".join(words)
        path.pop()
        words.clear()

    parser.StartElementHandler, parser.EndElementHandler = begin, end
    parser.CharacterDataHandler = words.append
    parser.Parse(page, True)
    return found
