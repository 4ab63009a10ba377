"""FineWeb's own rules: lines that end no sentence, lines that repeat, short lines.

Penedo et al. 2024, "The FineWeb Datasets" (arXiv:2406.17557), section 3.6 "Developing additional heuristic filters".
What differs: short is measured in the language's characters (30 English ones say as much as 36 German or 13 Japanese
ones), and sentences also end in 。！？ and in any closing mark. Text that is wrapped at a fixed width is judged by its
paragraphs, since the width, not the writing, ends its lines.
"""

from __future__ import annotations

from dataclasses import field
from typing import Annotated

import numpy as np
from pydantic import Field

from megafp8.core.config import config_dataclass
from megafp8.corpus.documents import Document, Dropped
from megafp8.corpus.languages import LanguageRules, rules_for
from megafp8.corpus.line_ends import ends_closed
from megafp8.corpus.words import words_of

_WRAP_WIDTHS = (40, 100)  # characters; mail, manual pages, RFCs, e-texts
_WRAPPED_SHARE = 0.5


@config_dataclass
class FineWeb:
    """Drops documents that look like lists, menus and scraps instead of paragraphs."""

    min_ended_lines: Annotated[float, Field(ge=0, le=1, description="share of lines with closing punctuation")] = 0.12
    max_repeated_characters: Annotated[
        float, Field(ge=0, le=1, description="share of characters in lines that stood before")
    ] = 0.1
    max_short_lines: Annotated[float, Field(ge=0, le=1, description="share of short lines")] = 0.67
    short_line_characters: Annotated[int, Field(ge=0, description="shorter lines are short; of English")] = 30
    unwrap: Annotated[bool, Field(description="judge text of a fixed width by its paragraphs")] = True
    languages: Annotated[
        dict[str, LanguageRules], Field(description="units of more languages, or others for en, de, ja")
    ] = field(default_factory=dict)

    version = 1

    @property
    def name(self) -> str:
        """What the step is called in counts and reports."""
        return "fineweb"

    def apply(self, document: Document) -> Document | Dropped:
        """The document, or the first rule that it breaks."""
        words = words_of(document.text)
        lines = words.lines
        if not len(lines):
            return document
        again = lines.repeated
        share = float(lines.lengths[again].sum() / lines.lengths.sum())
        if share > self.max_repeated_characters:
            return Dropped("repeated lines", f"{share:.2f} of the characters")
        ended, lengths = ends_closed(words), lines.lengths
        if self.unwrap and _is_wrapped(lengths):
            starts, ends = lines.paragraph_bounds
            lengths = ends - starts
            ended = ended[np.searchsorted(lines.ends, ends)]
        share = np.count_nonzero(ended) / len(ended)
        if share < self.min_ended_lines:
            return Dropped("lines without end", f"{share:.2f} end in punctuation")
        limit = self.short_line_characters * rules_for(document.language, self.languages).characters
        share = np.count_nonzero(lengths < limit) / len(lengths)
        return Dropped("short lines", f"{share:.2f} of the lines") if share > self.max_short_lines else document


def _is_wrapped(lengths: np.ndarray) -> bool:
    """Whether half of the characters are in lines of nearly the largest width, and that is one of plain text."""
    width = int(np.partition(lengths, -1 - len(lengths) // 50)[-1 - len(lengths) // 50])  # 2 % may stick out
    if not _WRAP_WIDTHS[0] <= width <= _WRAP_WIDTHS[1]:
        return False
    full = lengths[lengths >= 0.75 * width]
    return len(full) >= 3 and full.sum() >= _WRAPPED_SHARE * lengths.sum()


STEP = FineWeb
