"""tools/debian_texts.py: pages and manual pages as plain text, translations on one side of the split."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from tools import debian_texts
from tools.debian_texts import HtmlText, Page, held_out, main, roff_text

HELP = """<html><head><title>T</title><script>var no = 1;</script></head><body><header><p>menu</p></header>
<div id="DisplayArea"><h1>Find  Bar</h1><p>Press <span><span class="MAC">Command</span><span>Ctrl</span></span>
+F &amp; go<br>on.<p>Not closed
<pre>a  b
  c</pre></div><footer>end</footer></body></html>"""

ROFF = r""".\" a comment
.TH sln 8 2022 "man-pages"
.SH NAME
sln \- create \fIsymbolic\fP links
.SH DESCRIPTION
Unlike the
.BR ln (1)
program, it is \[lq]static\[rq] \(em \[u00E4]\(:o.
.PP
.nf
  int  x;
.fi
.IP \(bu
one
.TS
l l.
Oct	Char
_
000	NUL \e0
10	20
.TE
"""


def test_html_keeps_the_text_of_the_area():
    reader = HtmlText("DisplayArea")
    reader.feed(HELP)
    assert reader.text == "Find Bar\nPress Ctrl +F & go\non.\nNot closed\na  b\n  c"


def test_roff_keeps_the_text_of_a_page():
    assert roff_text(ROFF).split("\n") == [
        "NAME", "sln - create symbolic links", "", "DESCRIPTION",
        "Unlike the ln(1) program, it is “static” — äö.", "", "  int  x;", "", "•", "one", "",
        "Oct\tChar", "000\tNUL \\0",
        "10\t20",
    ]  # fmt: skip


def test_a_translation_is_on_the_side_of_its_original():
    pages = [Page(f"{i}.html", "en", "manpages", "x") for i in range(4000)]
    sides = [held_out(page) for page in pages]
    assert sides == [held_out(page._replace(language="de", text="y")) for page in pages]
    assert 80 < sum(sides) < 160  # 3 % of 4,000 is 120, standard deviation 10.8


def unpacked(root: Path, pages: int) -> None:
    """Packages as `dpkg -x` leaves them, each page long enough to be one."""
    for language, words in (("en-US", "the words"), ("de", "die Wörter")):
        folder = root / "usr/share/libreoffice/help" / language / "text"
        folder.mkdir(parents=True)
        for i in range(pages):
            text = f"<div id='DisplayArea'><p>{words} {i} " + "abc " * 60 + "</p></div>"
            (folder / f"{i}.html").write_text(text, encoding="utf-8")
    for place, words in (("man/man5", "the words"), ("man/de/man5", "die Wörter")):
        folder = root / "usr/share" / place
        folder.mkdir(parents=True)
        for i in range(pages):
            (folder / f"{i}.5.gz").write_bytes(gzip.compress(f".SH NAME\n{words} {i} {'abc ' * 60}\n".encode()))
        (folder / "link.5.gz").write_bytes(gzip.compress(b'.\\" c\n.so man5/1.5\n'))
    for language, words in (("en-US", "the words"), ("de-DE", "die Wörter")):
        folder = root / "usr/share/doc/debian-handbook/html" / language
        folder.mkdir(parents=True)
        for i in range(pages):
            (folder / f"{i}.html").write_text(f"<body><p>{words} h {i} " + "abc " * 60, encoding="utf-8")
        (folder / "short.html").write_text("<body>menu", encoding="utf-8")


def test_packages_become_two_files(tmp_path, capsys):
    unpacked(tmp_path / "root", 60)
    (tmp_path / "out").mkdir()
    assert main(tmp_path / "root", tmp_path / "out") == 0
    sides = {}
    for side in ("train", "heldout"):
        sides[side] = [json.loads(line) for line in (tmp_path / "out" / f"{side}.jsonl").read_text().splitlines()]
    assert len(sides["train"]) + len(sides["heldout"]) == 360 and sides["heldout"]
    names = {side: {line["id"].partition("/")[2] for line in lines} for side, lines in sides.items()}
    assert not names["train"] & names["heldout"]
    assert {line["lang"] for line in sides["heldout"]} == {"en", "de"}
    assert "left out: 2 too short" in capsys.readouterr().out
    again = (tmp_path / "out" / "train.jsonl").read_bytes()
    assert main(tmp_path / "root", tmp_path / "out") == 0 and (tmp_path / "out" / "train.jsonl").read_bytes() == again


def test_what_is_missing_is_named(tmp_path, capsys, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(debian_texts, "MIN_CHARACTERS", 1)
    assert main(tmp_path, tmp_path) == 3
    assert "holds no libreoffice-help in en and de; run get_texts.sh" in capsys.readouterr().err
    assert not (tmp_path / "train.jsonl").exists()
