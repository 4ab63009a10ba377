"""Gives each document a number, and drops those out of bounds: a classifier of yours, or unigram perplexity.

`function = "module:function"` names a function of one argument, the `Document`, that returns a number; it is imported
in each worker and must give the same number for the same document. Built in is the perplexity of a document's words
under their frequencies in files of good text, a cheap relative of CCNet's (Wenzek et al. 2020, arXiv:1911.00359,
section 4.2), which takes a 5-gram model: text far off in words or language scores high, word order is not seen.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Annotated

import numpy as np
from pydantic import Field

from megafp8.core.config import config_dataclass
from megafp8.corpus.documents import Document, Dropped
from megafp8.corpus.text_files import read_texts, resolve
from megafp8.corpus.words import Words, words_of

UNIGRAM = "unigram_perplexity"


@config_dataclass
class Score:
    """Scores documents, keeps the score in the metadata, and drops what is out of bounds."""

    function: Annotated[
        str, Field(min_length=1, description=f'"module:function" that takes a Document, or "{UNIGRAM}"')
    ] = UNIGRAM
    reference: Annotated[
        tuple[str, ...], Field(description=f"{UNIGRAM}: files or globs of good text, .txt or .jsonl, also .gz, .zst")
    ] = ()
    keys: Annotated[tuple[str, ...], Field(description="reference: keys of JSON lines; empty: all strings")] = ("text",)
    min_score: Annotated[float, Field(description="lower scores are dropped")] = -math.inf
    max_score: Annotated[float, Field(description="higher scores are dropped")] = math.inf
    metadata_key: Annotated[str, Field(min_length=1, description="where the metadata has the score")] = "score"

    version = 1

    def __post_init__(self) -> None:
        if self.function == UNIGRAM and not resolve(self.reference):
            raise ValueError(f"reference is empty, but function is {UNIGRAM!r}; name files of good text")
        if self.function != UNIGRAM:
            _imported(self.function)
        if self.min_score > self.max_score:
            raise ValueError(f"min_score {self.min_score} is above max_score {self.max_score}")

    @property
    def name(self) -> str:
        """What the step is called in counts and reports."""
        return "score"

    @property
    def files_read(self) -> tuple[str, ...]:
        """Files whose content decides what the step does."""
        return resolve(self.reference) if self.function == UNIGRAM else ()

    def apply(self, document: Document) -> Document | Dropped:
        """The document with its score, or that it is out of bounds.

        Raises:
            ValueError: the function returned no number.
        """
        if self.function == UNIGRAM:
            score = _unigrams(self.files_read, self.keys).perplexity(words_of(document.text))
        else:
            score = float(_imported(self.function)(document))
        if math.isnan(score):
            raise ValueError(f"{self.function} returned nan")
        if score < self.min_score:
            return Dropped("score too low", f"{score:.4g}")
        if score > self.max_score:
            return Dropped("score too high", f"{score:.4g}")
        return replace(document, metadata={**document.metadata, self.metadata_key: score})


class Unigrams:
    """Frequencies of words in good text."""

    def __init__(self, hashes: np.ndarray) -> None:
        self._words, counts = np.unique(hashes, return_counts=True)
        # add one: a word that was never seen counts as one seen once (Laplace)
        self._costs = -np.log((counts + 1.0) / (len(hashes) + len(self._words) + 1))
        self._unseen = math.log(len(hashes) + len(self._words) + 1)

    def perplexity(self, words: Words) -> float:
        """exp of the mean negative log-probability of the words; infinite if there are none."""
        if not words.num_words:
            return math.inf
        places = np.minimum(np.searchsorted(self._words, words.hashes), len(self._words) - 1)
        costs = np.where(self._words[places] == words.hashes, self._costs[places], self._unseen)
        return math.exp(float(costs.mean()))


@functools.cache
def _unigrams(files: tuple[str, ...], keys: tuple[str, ...]) -> Unigrams:
    texts = [Words(text).hashes for file in files for _, text in read_texts(file, keys)]
    hashes = np.concatenate(texts) if texts else np.zeros(0, np.uint64)
    if not len(hashes):
        raise ValueError(f"there are no words in {', '.join(files)} (keys {', '.join(keys)})")
    return Unigrams(hashes)


@functools.cache
def _imported(name: str) -> Callable[[Document], float]:
    module, colon, function = name.partition(":")
    if not colon:
        raise ValueError(f'function {name!r} is neither "module:function" nor {UNIGRAM!r}')
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"function {name!r} cannot be imported: {error}; is its folder on PYTHONPATH?") from None
    if not callable(found):
        raise ValueError(f"function {name!r} is {type(found).__name__}, no function")
    return found


STEP = Score
