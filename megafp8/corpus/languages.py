"""What the filters know of a language: words that any text in it has, and how long its words and texts are.

Thresholds in the papers were chosen on English. They are kept, and measured in the language's own units: counts of
words need no change (translations of the same news, NTREX-128, have 1.02 times as many words by our rule in German
and in Japanese as in English), lengths in characters do.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Annotated

import numpy as np
from pydantic import Field

from megafp8.core.config import config_dataclass
from megafp8.corpus.words import Words


@config_dataclass
class LanguageRules:
    """Units of one language."""

    stop_words: Annotated[
        tuple[str, ...], Field(description="words of which any text has some; empty: the rule is not applied")
    ] = ()
    characters: Annotated[
        float, Field(gt=0, description="characters that say what one says in English; lengths in rules are multiplied")
    ] = 1.0
    min_word_length: Annotated[float, Field(ge=0, description="mean characters of a document's words, lower end")] = 2.0
    max_word_length: Annotated[float, Field(gt=0, description="the same, upper end")] = 12.0


BUILT_IN = {
    # stop words and 3 to 10 characters: Rae et al. 2021 (arXiv:2112.11446), A1.1
    "en": LanguageRules(("the", "be", "to", "of", "and", "that", "have", "with"), 1.0, 3.0, 10.0),
    # the most frequent words of German; mean word length of German law is 6.2, of news 5.7
    "de": LanguageRules(("der", "die", "und", "in", "den", "von", "zu", "das", "mit", "ist", "nicht"), 1.19, 3.0, 12.0),
    # particles and endings, which are hiragana runs of their own; runs of one script have 2.3 characters on average
    "ja": LanguageRules(("の", "を", "は", "に", "が", "で", "と", "も", "な", "した", "する", "から"), 0.45, 1.3, 6.0),
}  # fmt: skip
GENERAL = LanguageRules()
"""For languages that are not listed: no stop words, wide limits."""


def rules_for(language: str, more: Mapping[str, LanguageRules]) -> LanguageRules:
    """Rules of a language code such as "de" or "de-AT"; `more` comes before what is built in."""
    short = language.replace("_", "-").partition("-")[0].lower()
    return more.get(language) or more.get(short) or BUILT_IN.get(short, GENERAL)


@functools.lru_cache(maxsize=64)
def stop_hashes(stop_words: tuple[str, ...]) -> np.ndarray:
    """uint64: hashes of stop words, as `Words.hashes` has them."""
    return np.unique(Words("\n".join(stop_words)).hashes)
