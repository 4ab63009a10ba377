"""English and German documentation out of unpacked Debian packages, as JSON lines: tools/debian_texts.py ROOT OUT.

ROOT is where `dpkg -x` put the packages that examples/fp8_vs_bf16/get_texts.sh names. OUT gets train.jsonl,
heldout.jsonl and, last, texts.json with the counts. A page is held out by a hash of its name, which its translation
shares: no German page of the training text is the translation of a held-out English one. Standard library only.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import NamedTuple

HELD_OUT_SHARE = 0.03
MIN_CHARACTERS = 200  # shorter pages are menus and links
VOID = {"area", "base", "br", "col", "hr", "img", "input", "link", "meta", "source", "wbr"}
BLOCKS = {
    "p", "div", "h1", "h2", "h3", "h4", "h5", "h6", "li", "ul", "ol", "dl", "dt", "dd", "tr", "table", "pre", "body",
    "section", "blockquote", "br",
}  # fmt: skip
SKIPPED_TAGS = {"script", "style", "noscript", "nav", "head", "header", "footer", "aside", "button"}
SKIPPED_CLASSES = {"docnav", "toc", "MAC", "noteicon"}  # MAC: the same key's name on another system
SKIPPED_IDS = {"title", "banner"}


class Page(NamedTuple):
    """One page in one language; `name` is the same in both."""

    name: str
    language: str
    source: str
    text: str


class HtmlText(HTMLParser):
    """The text of a page, a line a block; inside an element of the id `area` only, if there is one."""

    def __init__(self, area: str = "") -> None:
        super().__init__()
        self.area = area
        self.stack: list[tuple[str, bool, bool]] = []  # tag, skipped, in the area
        self.lines: list[str] = [""]
        self.verbatim = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in BLOCKS:
            self._break()
        if tag in VOID:
            return
        named = dict(attrs)
        classes = set((named.get("class") or "").split())
        _, skipped, inside = self.stack[-1] if self.stack else ("", False, not self.area)
        skipped = skipped or tag in SKIPPED_TAGS or bool(classes & SKIPPED_CLASSES) or named.get("id") in SKIPPED_IDS
        self.stack.append((tag, skipped, inside or named.get("id") == self.area))
        self.verbatim += tag == "pre"

    def handle_endtag(self, tag: str) -> None:
        if tag in BLOCKS:
            self._break()
        if tag in {open_tag for open_tag, _, _ in self.stack}:  # what was left open ends with it
            while self.stack:
                ended = self.stack.pop()[0]
                self.verbatim -= ended == "pre"
                if ended == tag:
                    break

    def handle_data(self, data: str) -> None:
        if not self.stack or self.stack[-1][1] or not self.stack[-1][2]:
            return
        if self.verbatim:
            first, *rest = data.split("\n")
            self.lines[-1] += first
            self.lines += rest
            return
        line = self.lines[-1]
        data = re.sub(r"\s+", " ", data)
        self.lines[-1] = line + (data.lstrip() if line.endswith(" ") or not line else data)

    def _break(self) -> None:
        if self.lines[-1]:
            self.lines.append("")

    @property
    def text(self) -> str:
        """What was read, without trailing blanks and runs of empty lines."""
        return tidy("\n".join(self.lines))


def tidy(text: str) -> str:
    """No blanks at line ends, no more than one empty line in a row."""
    return re.sub(r"\n{3,}", "\n\n", re.sub(r"[ \t]+\n", "\n", text)).strip()


_GLYPHS = {
    "aq": "'", "cq": "’", "oq": "‘", "dq": '"', "lq": "“", "rq": "”", "ha": "^", "ti": "~", "em": "—", "en": "–",
    "bu": "•", "co": "©", "mu": "µ", "rs": "\\", "ga": "`", "<=": "≤", ">=": "≥", "!=": "≠", "->": "→", "+-": "±",
    "ss": "ß", ":a": "ä", ":o": "ö", ":u": "ü", ":A": "Ä", ":O": "Ö", ":U": "Ü", "Fo": "«", "Fc": "»", "or": "|",
    "mi": "−", "mc": "µ", "lB": "[", "rB": "]", "lC": "{", "rC": "}", "sl": "/", "at": "@", "sh": "#", "Do": "$",
}  # fmt: skip
_FONT = re.compile(r"\\f(?:\[[^\]]*\]|\(..|.)|\\s(?:[-+]?\d|\[[^\]]*\])|\\[&%:|^/,)]|\\c$|\\[dhuvw]'[^']*'")
_GLYPH = re.compile(r"\\\[([^\]]+)\]|\\\((..)|\\\*\[([^\]]+)\]|\\\*\((..)|\\\*(.)|\\(.)")


def unescape(line: str) -> str:
    """A line of roff with its escapes as characters."""

    def glyph(match: re.Match[str]) -> str:
        name = match[1] or match[2] or match[3] or match[4]
        if name:
            code = re.fullmatch(r"u([0-9A-F]{4,6})", name)
            return chr(int(code[1], 16)) if code else _GLYPHS.get(name, "")
        if match[5]:
            return ""
        return {"e": "\\", "-": "-", "~": " ", "0": " ", "'": "´", "`": "`", "t": "\t"}.get(match[6], match[6])

    return _GLYPH.sub(glyph, _FONT.sub("", re.sub(r'\\["#].*', "", line)))


_BREAKS = frozenset(
    ("PP", "P", "LP", "TP", "IP", "HP", "sp", "TQ", "RS", "RE", "br", "nf", "EX", "fi", "EE", "TS", "TE")
)


def arguments(rest: str) -> list[str]:
    """Words of a macro line; quotes hold blanks together."""
    return [a if a is not None else b for a, b in ((m[1], m[2]) for m in re.finditer(r'"([^"]*)"|(\S+)', rest))]


def roff_text(source: str) -> str:
    """The text of a manual page in the man macros: headings, paragraphs, lists, tables; no layout."""
    lines: list[str] = [""]
    verbatim = table = formats = False  # in a table, lines up to one that ends with a point describe its columns

    def add(text: str) -> None:
        if verbatim or table:
            lines.append(text)
        else:
            lines[-1] = f"{lines[-1]} {text}" if lines[-1] else text

    for raw in source.replace("\\\n", "").split("\n"):
        if re.match(r"[.'][ \t]*\\[\"#]|'\\\"", raw) or raw.strip() == "":
            if raw.strip() == "":
                lines.append("")
            continue
        if raw[0] not in ".'":
            if formats or (table and re.fullmatch(r"[_=]|T[{}].*", raw)):
                formats = formats and not raw.rstrip().endswith(".")
            else:
                add(unescape(raw))
            continue
        name, _, rest = raw[1:].lstrip().partition(" ")
        words = [unescape(word) for word in arguments(rest)]
        if name in ("SH", "SS"):
            lines += ["", " ".join(words), ""]
        elif name in _BREAKS:
            verbatim = name in ("nf", "EX") or (verbatim and name not in ("fi", "EE"))
            table = name == "TS" or (table and name != "TE")
            formats = name == "TS"
            lines += ["", *words[:1], ""] if name == "IP" else [""]
        elif name in ("B", "I", "SM", "SB", "UR", "MT", "ME", "UE", "SY", "OP"):
            add(" ".join(words))
        elif name in ("BR", "IR", "RB", "RI", "BI", "IB"):
            add("".join(words))
    return tidy("\n".join(lines))


def help_pages(root: Path) -> Iterator[Page]:
    """LibreOffice's help, by path."""
    for language, folder in (("en", "en-US"), ("de", "de")):
        top = root / "usr/share/libreoffice/help" / folder / "text"
        for path in sorted(top.rglob("*.html")):
            reader = HtmlText("DisplayArea")
            reader.feed(path.read_text(encoding="utf-8"))
            yield Page(path.relative_to(top).as_posix(), language, "libreoffice-help", reader.text)


def manual_pages(root: Path) -> Iterator[Page]:
    """Manual pages by section and name; a link to another page is no page."""
    for language, folder in (("en", "man"), ("de", "man/de")):
        top = root / "usr/share" / folder
        for path in sorted(top.glob("man[1-9]/*.gz")):
            if path.is_symlink():
                continue
            source = gzip.decompress(path.read_bytes()).decode("utf-8")
            if not re.match(r"(?:\.\\\".*\n|\s)*\.so ", source):
                yield Page(path.relative_to(top).as_posix(), language, "manpages", roff_text(source))


def handbook_pages(root: Path) -> Iterator[Page]:
    """The Debian administrator's handbook by section."""
    for language, folder in (("en", "en-US"), ("de", "de-DE")):
        for path in sorted((root / "usr/share/doc/debian-handbook/html" / folder).glob("*.html")):
            reader = HtmlText()
            reader.feed(path.read_text(encoding="utf-8"))
            yield Page(path.name, language, "debian-handbook", reader.text)


def held_out(page: Page) -> bool:
    """By a hash of source and name, so that translations go together and no page moves when others come."""
    digest = hashlib.sha256(f"{page.source}/{page.name}".encode()).digest()
    return int.from_bytes(digest[:8], "big") < HELD_OUT_SHARE * 2**64


def main(root: Path, out: Path) -> int:
    """Write the three files; 3 if some of the documentation is not there."""
    readers = {"libreoffice-help": help_pages, "manpages": manual_pages, "debian-handbook": handbook_pages}
    seen: set[str] = set()
    counts: Counter[str] = Counter()
    left_out: Counter[str] = Counter()
    files = {side: out / f"{side}.jsonl" for side in ("train", "heldout")}
    partial = {side: path.with_suffix(".partial") for side, path in files.items()}
    with partial["train"].open("w", encoding="utf-8") as train, partial["heldout"].open("w", encoding="utf-8") as held:
        for source, read in readers.items():
            for page in read(root):
                if len(page.text) < MIN_CHARACTERS or page.text in seen:  # equal: not translated, or the same page
                    left_out["too short" if len(page.text) < MIN_CHARACTERS else "a text that was there before"] += 1
                    continue
                seen.add(page.text)
                side = "heldout" if held_out(page) else "train"
                line = {"id": f"{page.language}/{source}/{page.name}", "text": page.text, "lang": page.language}
                (held if side == "heldout" else train).write(
                    json.dumps({**line, "source": source}, ensure_ascii=False) + "\n"
                )
                for unit, size in (("documents", 1), ("bytes", len(page.text.encode()))):
                    counts[f"{side} {page.language} {source} {unit}"] += size
            missing = [n for n in ("en", "de") if not counts[f"train {n} {source} documents"]]
            if missing:
                where = f"{root} holds no {source} in {' and '.join(missing)}"
                print(f"debian_texts: error: {where}; run get_texts.sh, which unpacks the packages", file=sys.stderr)
                return 3
    for side, path in files.items():
        partial[side].replace(path)
    summary = {"counts": dict(counts), "left_out": dict(left_out), "held_out_share": HELD_OUT_SHARE}
    (out / "texts.json").write_text(json.dumps(summary, indent=1, sort_keys=True) + "\n")
    for side in ("train", "heldout"):
        for language in ("en", "de"):
            names = [f"{side} {language} {source}" for source in readers]
            documents, size = (sum(counts[f"{name} {unit}"] for name in names) for unit in ("documents", "bytes"))
            print(f"{files[side]}: {language}: {documents:,} documents, {size / 1e6:.2f} MB")
    print(f"left out: {', '.join(f'{count:,} {why}' for why, count in sorted(left_out.items())) or 'nothing'}")
    return 0


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: debian_texts.py ROOT OUT   (ROOT: unpacked packages, OUT: folder for the JSON lines)")
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
