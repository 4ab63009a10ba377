"""Articles out of a wiki's dump: which pages are documents, what is left of their mark-up, and what a cut dump says."""

from __future__ import annotations

import bz2
import gzip
import time
from collections.abc import Callable
from pathlib import Path
from xml.sax.saxutils import escape

import pytest

from megafp8.corpus.config import SourceConfig
from megafp8.corpus.documents import Bad, Document, Skipped
from megafp8.corpus.readers import FileSource
from megafp8.corpus.run import preprocess
from megafp8.corpus.wikitext import prose

HEAD = """<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.11/" version="0.11" xml:lang="de">
  <siteinfo><sitename>Wikipedia</sitename><dbname>dewiki</dbname>
    <base>https://de.wikipedia.org/wiki/Wikipedia:Hauptseite</base></siteinfo>
"""
FOOT = "</mediawiki>\n"


def page(number: int, text: str, *, title: str = "", ns: int = 0, more: str = "", model: str = "wikitext") -> str:
    return (
        f"  <page>\n    <title>{escape(title or f'Seite {number}')}</title><ns>{ns}</ns><id>{number}</id>{more}\n"
        f"    <revision><id>9{number}</id><timestamp>2026-01-0{number % 9 + 1}T00:00:00Z</timestamp>"
        f"<contributor><username>u</username><id>77</id></contributor><model>{model}</model>"
        f'<text bytes="1" xml:space="preserve">{escape(text)}</text></revision>\n  </page>\n'
    )


PAGES = [
    page(1, "'''Eins''' ist eine [[Zahl|natürliche Zahl]]. A < B & C.", title="Eins & mehr"),
    page(2, "#WEITERLEITUNG [[Eins]]", more='<redirect title="Eins" />'),
    page(3, "Diskussion", ns=1),
    page(4, "x = 1", model="Scratch"),
    page(5, "Zwei"),
]


def read(path: Path, **values: object) -> list[Document | Bad | Skipped]:
    config = SourceConfig(kind="wikipedia", files=(str(path),), **values)  # type: ignore[arg-type]
    return [record.data for record in FileSource(config).records()]  # type: ignore[misc]


def write(path: Path, data: str | bytes) -> Path:
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


def test_articles(tmp_path: Path) -> None:
    found = read(write(tmp_path / "a.xml", HEAD + "".join(PAGES) + FOOT))
    one, redirect, talk, code, two = found
    assert isinstance(one, Document) and isinstance(two, Document) and two.text == "Zwei"
    assert one.text == "Eins ist eine natürliche Zahl. A < B & C."
    assert (one.id, one.language, one.source) == ("dewiki/1", "de", "dewiki")
    assert one.metadata == {
        "title": "Eins & mehr", "date": "2026-01-02T00:00:00Z", "url": "https://de.wikipedia.org/wiki/Eins_%26_mehr",
    }  # fmt: skip
    skipped = [(one.why.reason, one.document.id) for one in (redirect, talk, code) if isinstance(one, Skipped)]
    assert skipped == [("redirect", "dewiki/2"), ("namespace 1", "dewiki/3"), ("model Scratch", "dewiki/4")]


def test_streams_of_bzip2_and_gzip(tmp_path: Path) -> None:
    """As Wikimedia makes them: one stream for the head, one for each hundred pages, one for the end."""
    whole = read(write(tmp_path / "a.xml", HEAD + "".join(PAGES) + FOOT))
    streams = [HEAD, "".join(PAGES[:2]), "".join(PAGES[2:]), FOOT]
    data = b"".join(bz2.compress(one.encode()) for one in streams)
    assert read(write(tmp_path / "b.xml.bz2", data)) == whole
    assert read(write(tmp_path / "named wrongly.gz", data)) == whole
    assert read(write(tmp_path / "c.xml.gz", gzip.compress((HEAD + "".join(PAGES) + FOOT).encode()))) == whole
    broken = bytearray(data)
    broken[len(bz2.compress(HEAD.encode())) + 60] ^= 1
    *_, last = read(write(tmp_path / "d.bz2", bytes(broken)))
    assert isinstance(last, Bad) and last.damaged and "damaged compressed stream" in last.reason


@pytest.mark.parametrize("packed", [False, True])
def test_every_cut_is_noticed(tmp_path: Path, packed: bool) -> None:
    text = (HEAD + PAGES[0] + PAGES[4] + FOOT).encode()
    data = bz2.compress(text) if packed else text
    for size in range(1, len(data) - (0 if packed else len(FOOT) - len("</mediawiki>") + 1), 1 if packed else 7):
        *_, last = read(write(tmp_path / "a", data[:size]))
        assert isinstance(last, Bad) and last.damaged, size
    for other in (b"", b"no dump at all", b"<rss>x</rss>" * 90_000):
        *_, last = read(write(tmp_path / "b", other))
        assert isinstance(last, Bad) and last.damaged and "no MediaWiki dump" in last.reason


def test_a_bad_page_costs_itself(tmp_path: Path) -> None:
    bad = "<page><title>x</title><revision><text>a </b> c</text></revision></page>"
    entity = '<page><title>&boom;</title><revision><text>x</text></revision></page>'
    latin = b"<page><title>x</title><revision><text>\xe4</text></revision></page>"
    long = page(6, "long " * 2000)
    dump = (HEAD + PAGES[0] + bad + entity).encode() + latin + (long + PAGES[4] + FOOT).encode()
    found = read(write(tmp_path / "a.xml", dump), max_record_bytes=3000)
    assert [type(one).__name__ for one in found] == ["Document", "Bad", "Bad", "Bad", "Bad", "Document"]
    reasons = [one.reason for one in found if isinstance(one, Bad)]
    assert "mismatched tag" in reasons[0] and "undefined entity" in reasons[1] and "invalid token" in reasons[2]
    assert "longer than 3000 bytes" in reasons[3] and not any(one.damaged for one in found if isinstance(one, Bad))


def test_pages_over_the_borders_of_chunks(tmp_path: Path) -> None:
    """Pages of all sizes around the 1 MiB that are read at once; the last of several revisions counts."""
    sizes = [10, 1 << 20, 3, (1 << 20) - 700, 5 << 20, 1, 1]
    pages = [page(i + 1, f"{i} " + "ab " * (size // 3)) for i, size in enumerate(sizes)]
    older = "<revision><timestamp>2001</timestamp><text>old</text></revision><revision>"
    pages[-1] = pages[-1].replace("<revision>", older)
    found = read(write(tmp_path / "a.xml", HEAD + "".join(pages) + FOOT))
    assert [one.text[:2].strip() for one in found if isinstance(one, Document)] == [str(i) for i in range(len(sizes))]


def test_corpus_of_a_dump(config: Callable, tmp_path: Path) -> None:
    pages = [page(i + 10, f"Die Seite {i} handelt von der Zahl {i * i} und ihren [[Teiler]]n.") for i in range(100)]
    write(tmp_path / "w.xml.bz2", bz2.compress((HEAD + "".join(PAGES + pages) + FOOT).encode()))
    source = {"kind": "wikipedia", "files": [str(tmp_path / "w.xml.bz2")]}
    counts = preprocess(config(source=source, tokenizer={"path": "bytes"})).manifest["counts"]
    assert counts["num_records"] == 105 and sum(one["documents"] for one in counts["splits"].values()) == 102
    assert counts["dropped"] == {"read": {"redirect": 1, "namespace 1": 1, "model Scratch": 1}}


@pytest.mark.parametrize(
    ("markup", "text"),
    [
        ("'''bold''' ''it''", "bold it"),
        ("[[Ziel]] [[Ziel|Wort]]e [[:Kategorie:X|k]] [[Foo (Bar)|]]", "Ziel Worte k Foo (Bar)"),
        ("a[[Datei:x.jpg|mini|Ein [[Bild]] von ''ihr'']]b[[Category:X]][[en:Y]]c", "abc"),
        ("{{Infobox|a={{b|c}}}}x {{lang|en|word}} {{nowrap|5 km}} {{!}}", "x word 5 km |"),
        ("x<ref name=a>{{c}} [[d]]</ref><ref name=b />y<!-- {{ [[ -->z", "xyz"),
        ("a <math>x^2</math> <span style='x'>b</span><br />c&nbsp;d &amp;amp;", "a b\n\nc\xa0d &amp;"),
        ("<nowiki>[[no]] ''x''</nowiki> {{t}}", "[[no]] ''x''"),
        ("== A ==\n=== B ===\nx\n== C ==\n== D ==\ny\n== E ==", "A\n\nB\n\nx\n\nD\n\ny"),
        ("* a\n** b\n# c\n: d\n----\ne", "- a\n- b\n- c\n\nd\n\ne"),
        ("x\n{| class=y\n! a\n|-\n| {{b}} || c\n{|\n| d\n|}\n|}\nz", "x\n\nz"),
        ("東京（{{読み仮名|とうきょう|x}}、{{IPA|y}}）は", "東京（とうきょう）は"),
        ("Ada ({{IPA|x}}; born 1815; {{y}}) and ( {{z}} ).", "Ada (born 1815) and."),
        ("[http://a.b Seite] [https://c.d] [//e f]", "Seite f"),
        ("open [[a and {{b and ''c", "open a and b and c"),
        ("close ]] and }} and |} __NOTOC__", "close and and |}"),
    ],
)  # fmt: skip
def test_prose(markup: str, text: str) -> None:
    assert prose(markup) == text


def test_time_grows_with_the_page_only() -> None:
    """200 kB of what is never closed, 0.1 s each; what is quadratic takes minutes."""
    marks = ("[[", "{{", "<ref>", "[http://", "= ", " ", "(", "(  ", "'", "{|\n", "<!--", "<", "[[a|", "((,", "\n=x=")
    for piece in marks:
        begun = time.process_time()
        prose(piece * (200_000 // len(piece)) + "x")
        assert time.process_time() - begun < 3, piece
