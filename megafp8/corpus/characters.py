"""Tables over code points: what class a character is of, and a 64-bit number that stands for it in hashes.

Indexed by code points of an array, so that a text is classified at once. Code points from U+40000 on (private use,
unassigned) share one entry.
"""

from __future__ import annotations

import functools
import unicodedata

import numpy as np

SYMBOL, SPACE, DIGIT, ALPHABETIC, HAN, HIRAGANA, KATAKANA, JOINER = range(8)
"""Classes. ALPHABETIC: letters of scripts that part words by spaces, Hangul too, and marks. JOINER: one of '’.,"""

LIMIT = 0x40000  # planes 0 to 3 hold all scripts
_KANA_MARKS = {0x30FC: KATAKANA, 0xFF70: KATAKANA, 0x309D: HIRAGANA, 0x309E: HIRAGANA, 0x3005: HAN, 0x3007: HAN}
_RANGES = (
    (0x3041, 0x3097, HIRAGANA),
    (0x30A1, 0x30FB, KATAKANA),
    (0x31F0, 0x3200, KATAKANA),
    (0xFF66, 0xFF9E, KATAKANA),
    (0x3400, 0x4DC0, HAN),
    (0x4E00, 0xA000, HAN),
    (0xF900, 0xFB00, HAN),
    (0x20000, 0x323B0, HAN),
)


@functools.cache
def classes() -> np.ndarray:
    """uint8 [LIMIT]: class of each code point, by Unicode's general category and script blocks."""
    table = np.zeros(LIMIT, np.uint8)
    for code in range(0x20000):
        character = chr(code)
        category = unicodedata.category(character)
        if category[0] in "LM":
            table[code] = ALPHABETIC
        elif category[0] == "N":
            table[code] = DIGIT
        elif category[0] == "Z" or character.isspace():
            table[code] = SPACE
    for start, stop, kind in _RANGES:
        table[start:stop] = kind
    for code, kind in _KANA_MARKS.items():
        table[code] = kind
    table[[ord(mark) for mark in "'’.,"]] = JOINER
    return table


@functools.cache
def symbols() -> np.ndarray:
    """uint64 [LIMIT]: a number for each character, the same for capital and small letters; splitmix64 of the code."""
    codes = np.arange(LIMIT, dtype=np.uint64)
    for code in range(0x20000):
        small = chr(code).lower()
        if len(small) == 1:
            codes[code] = ord(small)
    return mixed(codes)


def mixed(values: np.ndarray) -> np.ndarray:
    """uint64 -> uint64, one to one: each bit of the result depends on all of the argument (splitmix64, Steele 2014)."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def table_of(marks: str) -> np.ndarray:
    """bool [LIMIT]: whether a code point is one of the marks; a look-up is ten times as fast as numpy's `isin`."""
    table = np.zeros(LIMIT, bool)
    table[[ord(mark) for mark in marks]] = True
    return table


def code_points(text: str) -> np.ndarray:
    """int32 [characters]: the text's code points, those from U+40000 on as U+3FFFF; half surrogates as they are."""
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.int32)
    return codes if not len(codes) or codes.max() < LIMIT else np.minimum(codes, LIMIT - 1)
