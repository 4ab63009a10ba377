"""With what sentences end, in Latin and in Japanese writing."""

from __future__ import annotations

import numpy as np

from megafp8.corpus.characters import table_of
from megafp8.corpus.words import Words

SENTENCE_ENDS = ".!?。！？．｡…‥"
CLOSING_MARKS = "\"'”’“‘»«›‹」』）)】］]〉》"
_CLOSED = table_of(SENTENCE_ENDS + CLOSING_MARKS + ":;：；")
_FULL_ENDS = table_of(SENTENCE_ENDS)
_CLOSING = table_of(CLOSING_MARKS)


def ends_sentence(words: Words) -> np.ndarray:
    """bool [lines]: whether the line ends in . ! ? 。 … or such a mark and a closing quotation mark or bracket."""
    lines = words.lines
    last = lines.last_codes
    before = words.codes[np.maximum(lines.ends - 2, 0)]
    return _FULL_ENDS[last] | (_CLOSING[last] & _FULL_ENDS[before])


def ends_closed(words: Words) -> np.ndarray:
    """bool [lines]: whether the line ends in any mark with which a sentence, quotation or clause can be closed."""
    return _CLOSED[words.lines.last_codes]
