"""Brings a text into one form: NFC, line ends, no control or invisible characters, repaired mojibake.

NFC is Unicode Standard Annex 15. Repair of text that was decoded with the wrong encoding is ftfy's (Speer, ftfy 6.3),
which is slow (2 MB a second): it is asked only about lines in which a pattern finds UTF-8 read as Latin-1 or
Windows-1252. Of each kind of change it is counted how often it was made.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import replace
from typing import Annotated

import ftfy
from pydantic import Field

from megafp8.core.config import config_dataclass
from megafp8.corpus.documents import Document

_LINE_END = re.compile("\r\n|[\r\x0b\x0c\x85\u2028\u2029]")
_CONTROL = re.compile("[\x00-\x08\x0e-\x1f\x7f-\x9f\ufff9-\ufffb\ufffe\uffff]")
# zero-width space, word joiner, byte order mark, soft hyphen, invisible operators: none carries meaning in plain text
_ZERO_WIDTH = re.compile("[\u200b\u2060-\u2064\ufeff\u00ad\u180e]")
# joiners mean something in emoji and in Arabic and Indic writing, not between these
_PLAIN = "\n\t -\u02ff\u3000-\u30ff\u3400-\u9fff\uff00-\uffef"
_JOINERS = re.compile(f"(?:(?<=[{_PLAIN}])|^)[\u200c\u200d]+|[\u200c\u200d]+(?=[{_PLAIN}]|$)")
_RARE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u180e\u200b-\u200d\u2028\u2029\u2060-\u2064\ufeff\ufff9-\ufffb\ufffe\uffff]"
)

# what bytes 80 to BF are in Latin-1 and in Windows-1252
_TAIL = "\x80-\xbf€‚ƒ„…†‡ˆ‰Š‹ŒŽ‘’“”•–—˜™š›œžŸ"
_MOJIBAKE = re.compile(f"[\xc2-\xdf][{_TAIL}]|[\xe0-\xef][{_TAIL}]{{2}}|[\xf0-\xf4][{_TAIL}]{{3}}")
# bytes that lead the characters of European text, punctuation, kana, Han and emoji
_LEADS = "ÂÃâãäåæçèéðïÄÅÎÏÐÑ"


@config_dataclass
class Normalise:
    """Changes characters, never drops a document."""

    nfc: Annotated[bool, Field(description="compose letters and their accents")] = True
    line_ends: Annotated[bool, Field(description="CR LF, CR, VT, FF, NEL, LS and PS become LF")] = True
    control: Annotated[bool, Field(description="remove control characters but tab and LF, and non-characters")] = True
    zero_width: Annotated[
        bool, Field(description="remove invisible characters, joiners only where they join nothing")
    ] = True
    mojibake: Annotated[bool, Field(description="repair lines that were decoded with the wrong encoding")] = True

    version = 1

    @property
    def name(self) -> str:
        """What the step is called in counts and reports."""
        return "normalise"

    def apply(self, document: Document) -> Document:
        """The document in its one form, with "count:" metadata of what was changed."""
        text, counts = document.text, dict.fromkeys(("mojibake", "line_ends", "control", "zero_width", "nfc"), 0)
        if self.mojibake and not text.isascii():
            text, counts["mojibake"] = repaired(text)  # first: it needs C1 control characters and soft hyphens
        if _RARE.search(text):
            if self.line_ends:
                text, counts["line_ends"] = _LINE_END.subn("\n", text)
            if self.control:
                text, counts["control"] = _CONTROL.subn("", text)
            if self.zero_width:
                text, counts["zero_width"] = _ZERO_WIDTH.subn("", text)
                text, joiners = _JOINERS.subn("", text)
                counts["zero_width"] += joiners
        if self.nfc and not unicodedata.is_normalized("NFC", text):
            text, counts["nfc"] = unicodedata.normalize("NFC", text), 1
        found = {f"count:{kind}": number for kind, number in counts.items() if number}
        return replace(document, text=text, metadata={**document.metadata, **found}) if found else document


def repaired(text: str) -> tuple[str, int]:
    """The text with mojibake repaired, and in how many lines it was.

    Lines without a pair of characters that looks like a UTF-8 sequence are not touched.
    """
    if not any(lead in text for lead in _LEADS) or not _MOJIBAKE.search(text):
        return text, 0
    lines, count = text.split("\n"), 0
    for number, line in enumerate(lines):
        if _MOJIBAKE.search(line):
            better = ftfy.fix_encoding(line)
            count += better != line
            lines[number] = better
    return "\n".join(lines), count


STEP = Normalise
