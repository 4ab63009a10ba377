"""Repeated paragraphs or lines: each one beyond the first in the corpus is taken out of its text.

As in CCNet (Wenzek et al. 2020, arXiv:1911.00359, section 3.1), by hashes of normalised paragraphs, but over the whole
corpus. Units are numbered through a shard: the pieces of its first row, then of the second, and so on; what the
passes call a row is a unit here. The first is kept, in the order of the corpus, also within one document.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from megafp8.core.config import config_dataclass
from megafp8.corpus.dedup.exact import Ignored, normal, text_records
from megafp8.corpus.dedup.records import TEXT

# a unit goes from the end of the one before it to the end of what separates it from the next
_LINE_END = r"(?:\r\n|\r(?!\n)|\n)"
_ENDS = {"paragraph": re.compile(rf"{_LINE_END}(?:[^\S\r\n]*{_LINE_END})+"), "line": re.compile(_LINE_END)}


@config_dataclass
class Paragraphs:
    """What is compared, and what is left alone."""

    unit: Annotated[
        Literal["paragraph", "line"],
        Field(description="what is compared and taken out: what stands between empty lines, or each line"),
    ] = "paragraph"
    min_characters: Annotated[
        int, Field(ge=1, description="shorter ones (white space at their ends not counted) may be repeated")
    ] = 40
    ignore: Annotated[
        tuple[Ignored, ...], Field(description='of "space" (how much, and which), "case": what makes no difference')
    ] = ("space",)

    version = 1
    reason = "repeated"
    dtype = TEXT

    @property
    def name(self) -> str:
        """What the step is called in counts and reports."""
        return "paragraphs"

    def pieces(self, text: str) -> list[str]:
        """A text cut into units, each with what separates it from the next; together they are the text."""
        ends = [match.end() for match in _ENDS[self.unit].finditer(text)]
        if not ends or ends[-1] < len(text):
            ends.append(len(text))
        return [text[start:end] for start, end in zip([0, *ends], ends)]

    def records(self, texts: Sequence[str], first: int) -> tuple[np.ndarray, int]:
        """A record for each unit that is long enough, and the number behind the last unit."""
        units = [piece for text in texts for piece in self.pieces(text)]
        long = [at for at, piece in enumerate(units) if len(piece.strip()) >= self.min_characters]
        numbers = np.array(long, np.uint64) + np.uint64(first)
        return text_records((normal(units[at], self.ignore) for at in long), numbers), first + len(units)

    def remove(self, text: str, first: int, dropped: np.ndarray) -> tuple[str, int, int]:
        """A text without its repeated units.

        Args:
            first: number of its first unit.
            dropped: sorted, of the whole shard (rows of `drop_list`).

        Returns:
            The text, without white space at its end if something is gone; bytes taken out; number behind its last unit.
        """
        pieces = self.pieces(text)
        behind = first + len(pieces)
        low, high = np.searchsorted(dropped, [first, behind])
        if low == high:
            return text, 0, behind
        gone = set((dropped[low:high] - first).tolist())
        kept = "".join(piece for at, piece in enumerate(pieces) if at not in gone).rstrip()
        return kept, len(text.encode("utf-8", "surrogatepass")) - len(kept.encode("utf-8", "surrogatepass")), behind


STEP = Paragraphs
