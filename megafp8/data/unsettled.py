"""Characters that are letters, digits or marks in newer versions of Unicode and unassigned in older ones.

Two libraries cut a text in other places where it holds one of them, if their tables are of other versions: tokenizers
has those of Unicode 14 to 16, gigatoken those of 17 (github.com/marcelroed/gigatoken, issues 35 and 37).
"""

from __future__ import annotations

import re

# by the first byte of UTF-8, which stands nowhere else: what follows in blocks with additions after Unicode 13
# (Arabic Extended-B and Extended-A, Telugu, Kannada, Lao, combining marks, Cyrillic Extended-C, Latin Extended-D)
_BASIC = {
    b"\xe0": (b"\xe0\xa1\xb0", b"\xe0\xa2", b"\xe0\xb1\x9c", b"\xe0\xb3\x9c", b"\xe0\xb3\xb3", b"\xe0\xbb\x8e"),
    b"\xe1": (b"\xe1\xab", b"\xe1\xb2"),
    b"\xea": (b"\xea\x9f",),
}
# beyond the Basic Multilingual Plane all but mathematical letters, emoji and symbols (U+1F000 to 1FFFF), and the blocks
# of CJK ideographs that were full in Unicode 13
_BEYOND = re.compile(
    rb"\xf0(?:[\x90-\x9c\x9e]|\x9d[^\x90-\x9f]|\xaa\x9b|\xab\x9c|\xac\xba|\xae[\xaf-\xbf]|\xaf[^\xa0-\xa8]"
    rb"|\xb1[\x8d-\xbf]|[\xb2-\xbf])|[\xf1-\xf4]"
)


def is_unsettled(data: bytes) -> bool:
    """Whether UTF-8 text holds such a character, or a rare neighbour of one; texts without cost a look at each byte."""
    for lead, blocks in _BASIC.items():
        if lead in data and any(block in data for block in blocks):
            return True
    return any(lead in data for lead in (b"\xf0", b"\xf1", b"\xf2", b"\xf3", b"\xf4")) and bool(_BEYOND.search(data))
