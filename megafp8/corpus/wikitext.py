"""The prose of a page in MediaWiki's mark-up: one pass with a stack over brackets and tags, then its lines.

Links keep their words, templates go but for a few that only dress a text, tables, footnotes, formulas, files and
categories go, headings stay as lines of their own unless nothing comes behind them. Time grows with the length of the
page only, whatever is left open in it. (The mark-up has no grammar: what cannot be paired is taken as text.)
"""

from __future__ import annotations

import html
import re
from collections.abc import Callable

_DROPPED_TAGS = (
    "ref", "math", "gallery", "timeline", "score", "imagemap", "chem", "hiero", "mapframe", "graph", "table",
)  # fmt: skip
_MARK = re.compile(
    r"<!--|\{\{|\}\}|^[ \t:]*\{\||^[ \t]*\|\}|\[\[|\]\]|<nowiki\s*/?>|"
    rf"<(?P<close>/?)(?P<tag>{'|'.join(_DROPPED_TAGS)}|references)\b[^<>]*?(?P<empty>/?)>",
    re.IGNORECASE | re.MULTILINE,
)
_PAIRS = {"}}": "{{", "]]": "[[", "|}": "{|"}
_MAX_DEPTH = 60
_NO_TEXT = {
    "file", "image", "media", "category", "datei", "bild", "medium", "kategorie", "ファイル", "画像", "カテゴリ",
    "special", "spezial", "特別",
}  # fmt: skip
_FIRST_ARGUMENT = {
    "nowrap", "nobr", "small", "big", "abbr", "ruby", "読み仮名", "ふりがな", "ルビ", "sic", "tooltip", "em", "bold",
    "italic", "smaller", "larger",
}  # fmt: skip
_SPELLED = {"!": "|", "ndash": "–", "mdash": "—", "nbsp": " ", "spaces": " ", "-": "", "snd": " – ", "=": "="}
_OUTER_LINK = re.compile(r"\[(?:[a-z]+:)?//[^\s\[\]]*(?:[ \t]([^\[\]\n]*))?\]", re.IGNORECASE)
_TAG = re.compile(r"</?[a-zA-Z][^<>]*>")
_BREAK = re.compile(r"<(?:br|hr|p|/p|/div|/li|/tr)\b[^<>]*>", re.IGNORECASE)
_SWITCH = re.compile(r"__[A-Z]+__")
_HOLLOW = re.compile(r"(?<![ \t\u3000])[ \t\u3000]*(?:\([\s,;:、，；]*\)|（[\s,;:、，；]*）)")
_LEADING_MARKS = re.compile(r"([(（])[\s,;、，；]+")
_TRAILING_MARKS = re.compile(r"(?<![\s,;、，；])[\s,;、，；]+([)）])")
_SPACES = re.compile(r"[ \t\xa0]{2,}")
_LANGUAGE = re.compile(r"[a-z]{2,3}(?:-[a-z]+)?")


def prose(text: str) -> str:
    """The text of a page's mark-up, paragraphs apart by an empty line."""
    kept: list[str] = []
    text = _Scanner(text.replace("\0", ""), kept).run()
    text = _OUTER_LINK.sub(r"\1", text)
    text = _TAG.sub("", _BREAK.sub("\n", text))
    text = re.sub(r"'{2,}", "", _SWITCH.sub("", text))
    text = html.unescape(text)
    text = _TRAILING_MARKS.sub(r"\1", _LEADING_MARKS.sub(r"\1", _HOLLOW.sub("", text)))
    text = _SPACES.sub(" ", text)
    text = re.sub("\0([0-9]+)\0", lambda found: kept[int(found[1])], text)
    return _lines(text)


class _Scanner:
    """Pairs brackets and tags; `stack` holds (what opened, where its content begins in `out`)."""

    def __init__(self, text: str, kept: list[str]) -> None:
        self._text, self._kept = text, kept
        self._out: list[str] = []
        self._stack: list[tuple[str, int]] = []

    def run(self) -> str:
        text, at, skipped = self._text, 0, 0
        for mark in _MARK.finditer(text):
            if mark.start() < skipped:
                continue
            self._out.append(text[at : mark.start()])
            at = mark.end()
            word = mark[0].strip(" \t:").lower()
            if word == "<!--":
                at = skipped = _behind(text, "-->", at)
            elif word == "<nowiki>":
                end = text.find("</nowiki>", at)
                at = skipped = self._keep(text[at : end if end >= 0 else len(text)], at, len("</nowiki>"))
            elif mark["tag"]:
                self._tag(mark)
            elif word in _PAIRS:
                self._close(_PAIRS[word])
            elif word in ("{{", "[[", "{|"):
                self._open(word)
        self._out.append(text[at:])
        return "".join(self._out)

    def _keep(self, words: str, at: int, closing: int) -> int:
        """Put aside what is no mark-up; returns where it ends."""
        self._out.append(f"\0{len(self._kept)}\0")
        self._kept.append(words)
        return min(at + len(words) + closing, len(self._text))

    def _open(self, what: str) -> None:
        if len(self._stack) < _MAX_DEPTH:
            self._stack.append((what, len(self._out)))

    def _tag(self, mark: re.Match[str]) -> None:
        name = mark["tag"].lower()
        if name == "references" or mark["empty"]:
            return
        if mark["close"]:
            self._close(name)
        else:
            self._open(name)

    def _close(self, what: str) -> None:
        """Take the content of the innermost `what`; what was opened in it and not closed is text."""
        for depth in range(len(self._stack) - 1, -1, -1):
            if self._stack[depth][0] == what:
                start = self._stack[depth][1]
                del self._stack[depth:]
                content = "".join(self._out[start:])
                del self._out[start:]
                self._out.append(_RENDER.get(what, _nothing)(content))
                return


def _behind(text: str, end: str, at: int) -> int:
    found = text.find(end, at)
    return len(text) if found < 0 else found + len(end)


def _nothing(_: str) -> str:
    return ""


def _template(content: str) -> str:
    """What a template leaves: the words of those that only dress them."""
    name, *rest = content.split("|")
    name = " ".join(name.split()).lower()
    given = [one for one in rest if "=" not in one.partition("[")[0]]
    if name in _SPELLED:
        return _SPELLED[name]
    if name == "lang":
        return given[1] if len(given) > 1 else ""
    if name.startswith("lang-") or name in _FIRST_ARGUMENT:
        return given[0] if given else ""
    if name in ("convert", "cvt"):
        return " ".join(given[:2])
    return ""


def _link(content: str) -> str:
    """The words of a link; none of a file, a category, or a page in another language."""
    target, bar, rest = content.partition("|")
    target = target.strip()
    space = target.partition(":")[0].strip().lower()
    is_elsewhere = space in _NO_TEXT or (not bar and _LANGUAGE.fullmatch(space))
    if ":" in target and not target.startswith(":") and is_elsewhere:
        return ""
    return rest.rpartition("|")[2] if rest else target.lstrip(":").replace("_", " ")


_RENDER: dict[str, Callable[[str], str]] = {"{{": _template, "[[": _link}


def _lines(text: str) -> str:
    """Lists, headings and empty lines in order; a heading with nothing behind it goes."""
    lines: list[tuple[int, str]] = []  # (level of a heading or 0, line)
    for raw in text.split("\n"):
        line = raw.strip()
        if level := _level(line):
            while lines and lines[-1][0] >= level:
                lines.pop()
            lines.append((level, line[level:-level].strip()))
            continue
        if line.startswith("----"):
            line = line.lstrip("-").strip()
        marks = len(line) - len(line.lstrip("*#:;"))
        item = line[marks:].strip()
        line = f"- {item}" if marks and item and ("*" in line[:marks] or "#" in line[:marks]) else item
        if line and not _is_bare(line):
            lines.append((0, line))
    while lines and lines[-1][0]:
        lines.pop()
    out, before_item = [], False
    for level, line in lines:
        is_item = not level and line.startswith("- ")
        out.append(("\n" if is_item and before_item else "\n\n") + line)
        before_item = is_item
    return "".join(out).strip()


def _level(line: str) -> int:
    """Of a heading (`== Name ==`), 0 of any other line."""
    before, behind = len(line) - len(line.lstrip("=")), len(line) - len(line.rstrip("="))
    return min(before, behind, 6) if before < len(line) else 0


def _is_bare(line: str) -> bool:
    """What templates and tables leave of a line: marks only."""
    return not line.strip("-*|!}{,.;:()[] 、。")
