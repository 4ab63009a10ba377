"""Gopher's repetition rules: lines, paragraphs and word n-grams that a document says again and again.

Rae et al. 2021 (arXiv:2112.11446), A1.1 "Repetition Removal" and Table A1. What differs: words are those of
`megafp8.corpus.words`; shares of characters are of characters in words, so that white space counts on neither side;
the first occurrence of a line, paragraph or n-gram of 5 to 10 words is no repetition, the later ones are. Overlapping
n-grams count their characters once. Lines of fewer than 4 letters (ornaments, chapter numbers, braces) are no lines.
"""

from __future__ import annotations

from typing import Annotated

import numpy as np
from pydantic import Field

from megafp8.core.config import config_dataclass
from megafp8.corpus.documents import Document, Dropped
from megafp8.corpus.words import Words, repeats, words_of

_MIN_LETTERS = 4


@config_dataclass
class GopherRepetition:
    """Drops documents that repeat themselves; each limit is a share, and 1 turns its rule off."""

    lines: Annotated[float, Field(ge=0, le=1, description="of lines that stood before")] = 0.3
    line_characters: Annotated[float, Field(ge=0, le=1, description="of characters in lines that stood before")] = 0.2
    paragraphs: Annotated[float, Field(ge=0, le=1, description="of paragraphs that stood before")] = 0.3
    paragraph_characters: Annotated[float, Field(ge=0, le=1, description="of characters in such paragraphs")] = 0.2
    top_grams: Annotated[
        tuple[float, float, float],
        Field(description="of characters in the run of 2, 3, 4 words that takes most of them"),
    ] = (0.2, 0.18, 0.16)
    repeated_grams: Annotated[
        tuple[float, float, float, float, float, float],
        Field(description="of characters in runs of 5, 6, 7, 8, 9, 10 words that stood before"),
    ] = (0.15, 0.14, 0.13, 0.12, 0.11, 0.1)

    version = 1

    @property
    def name(self) -> str:
        """What the step is called in counts and reports."""
        return "gopher_repetition"

    def apply(self, document: Document) -> Document | Dropped:
        """The document, or the first rule that it breaks."""
        words = words_of(document.text)
        if not words.num_words:
            return document
        return self._lines(words) or self._top_grams(words) or self._repeated_grams(words) or document

    def _lines(self, words: Words) -> Dropped | None:
        lines = words.lines
        parts = (
            ("lines", lines.repeated, (lines.starts, lines.ends), self.lines, self.line_characters),
            (
                "paragraphs",
                repeats(lines.paragraph_hashes),
                lines.paragraph_bounds,
                self.paragraphs,
                self.paragraph_characters,
            ),
        )
        for what, again, bounds, limit, character_limit in parts:
            if not again.any():
                continue
            letters = words.num_letters(*bounds)
            again = again & (letters >= _MIN_LETTERS)
            share = int(np.count_nonzero(again)) / max(1, int(np.count_nonzero(letters >= _MIN_LETTERS)))
            if share > limit:
                return Dropped(f"repeated {what}", f"{share:.2f}")
            share = int(letters[again].sum()) / max(1, int(letters.sum()))
            if share > character_limit:
                return Dropped(f"characters in repeated {what}", f"{share:.2f}")
        return None

    def _top_grams(self, words: Words) -> Dropped | None:
        for size, limit in enumerate(self.top_grams, start=2):
            positions, groups = words.repeated_grams(size)
            if not len(positions):
                return None  # nor does any longer run repeat
            taken = np.bincount(groups, weights=_lengths_of_runs(words, positions, size))
            if taken.max() <= limit * words.num_word_characters:  # overlaps counted twice, and still under the limit
                continue
            best = positions[groups == taken.argmax()]
            share = words.covered_characters(best, size) / words.num_word_characters
            if share > limit:
                return Dropped(f"top {size}-gram", f"{share:.2f}: {words.run_text(int(best[0]), size)!r}")
        return None

    def _repeated_grams(self, words: Words) -> Dropped | None:
        least = min(self.repeated_grams)
        for size, limit in enumerate(self.repeated_grams, start=5):
            positions, groups = words.repeated_grams(size)
            if not len(positions):
                return None
            later = positions[repeats(groups)]
            share = words.covered_characters(later, size) / words.num_word_characters
            if share <= least:
                return None  # where a run repeats, so does each part of it: longer ones cover no more
            if share > limit:
                return Dropped(f"repeated {size}-grams", f"{share:.2f}: {words.run_text(int(later[0]), size)!r}")
        return None


def _lengths_of_runs(words: Words, positions: np.ndarray, size: int) -> np.ndarray:
    return words.length_sums[positions + size] - words.length_sums[positions]


STEP = GopherRepetition
