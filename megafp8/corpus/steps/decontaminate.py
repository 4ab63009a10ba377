"""Drops documents that contain pieces of evaluation sets.

13-grams of words as in Brown et al. 2020, "Language Models are Few-Shot Learners" (arXiv:2005.14165), appendix C:
without capitals and punctuation, found by an exact match. They cut 200 characters around a match out; here the whole
document goes. Items in Han and kana are matched by 30 characters instead, which is as much text as 13 words and does
not depend on where lines break. Shorter items are matched as a whole, down to a limit below which anything matches.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import Field

from megafp8.core.config import config_dataclass
from megafp8.corpus import characters
from megafp8.corpus.characters import DIGIT, HAN, JOINER
from megafp8.corpus.documents import Document, Dropped
from megafp8.corpus.text_files import read_texts, resolve
from megafp8.corpus.words import Words, words_of

_MIX = np.uint64(0xD6E8FEB86659FD93)
_MAX_MARKS = 1 << 27


@config_dataclass
class Decontaminate:
    """Drops documents that share an n-gram with one of the files."""

    files: Annotated[
        tuple[str, ...], Field(min_length=1, description="evaluation files or globs: .jsonl, .txt, .gz, .zst")
    ]
    keys: Annotated[tuple[str, ...], Field(description="keys of JSON lines; empty: all strings in them")] = ()
    ngram_words: Annotated[int, Field(ge=2, description="words in a row that must be equal")] = 13
    ngram_characters: Annotated[int, Field(ge=4, description="the same for Han and kana, in letters and digits")] = 30
    min_words: Annotated[int, Field(ge=2, description="items of fewer words are not looked for")] = 8
    min_characters: Annotated[int, Field(ge=4, description="the same for Han and kana")] = 18

    version = 1

    def __post_init__(self) -> None:
        if not resolve(self.files):
            raise ValueError("files: none are given")
        for small, large in (("min_words", "ngram_words"), ("min_characters", "ngram_characters")):
            if getattr(self, small) > getattr(self, large):
                raise ValueError(f"{small} {getattr(self, small)} is above {large} {getattr(self, large)}")

    @property
    def name(self) -> str:
        """What the step is called in counts and reports."""
        return "decontaminate"

    @property
    def files_read(self) -> tuple[str, ...]:
        """Files whose content decides what the step does."""
        return resolve(self.files)

    def apply(self, document: Document) -> Document | Dropped:
        """The document, or in which file, at which line, stands what it contains."""
        words = words_of(document.text)
        sizes = (self.min_words, self.ngram_words, self.min_characters, self.ngram_characters)
        for index, units in zip(_indexes(self.files_read, self.keys, sizes), (word_units, character_units)):
            if index.is_empty:
                continue
            if match := index.find(*units(words)):
                file, line, start, end = match
                gram = " ".join(document.text[start:end].split())
                return Dropped(f"in {Path(file).name}", f"line {line}: {gram!r}")
        return document


def word_units(words: Words) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(hashes, starts, ends) of the words."""
    return words.hashes, words.starts, words.ends


def character_units(words: Words) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(hashes, starts, ends) of the letters and digits, or of none if there is no Han or kana."""
    if not (words.kinds >= HAN).any():
        none = np.zeros(0, np.int64)
        return none.astype(np.uint64), none, none
    places = np.flatnonzero((words.kinds >= DIGIT) & (words.kinds != JOINER))
    return characters.symbols()[words.codes[places]], places, places + 1


def is_han_or_kana(words: Words) -> bool:
    """Whether most of the letters are Han or kana."""
    return 2 * int((words.kinds >= HAN).sum()) > words.num_word_characters


class Index:
    """Hashes of the n-grams of all items, by length, and where each stands."""

    def __init__(self, smallest: int, largest: int) -> None:
        self._smallest, self._largest = smallest, largest
        self._places: list[tuple[str, int]] = []
        self._grams: dict[int, list[np.ndarray]] = {}
        self._items: dict[int, list[np.ndarray]] = {}
        self._tables: dict[int, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}
        self.num_short = 0

    @property
    def is_empty(self) -> bool:
        """True if there is nothing to find."""
        return not self._tables

    def add(self, file: str, line: int, hashes: np.ndarray) -> None:
        """Enter an item's n-grams, the item as a whole if it is shorter, and count it if it is too short."""
        if len(hashes) < self._smallest:
            self.num_short += 1
            return
        size = min(len(hashes), self._largest)
        for length, grams in _all_grams(hashes, size):
            if length == size:
                self._grams.setdefault(size, []).append(grams)
                self._items.setdefault(size, []).append(np.full(len(grams), len(self._places), np.int32))
        self._places.append((file, line))

    def close(self) -> Index:
        """Sort; the first item of an n-gram stands for it."""
        for size, parts in self._grams.items():
            grams, first = np.unique(np.concatenate(parts), return_index=True)
            bits = min(_MAX_MARKS, 1 << (8 * len(grams)).bit_length()).bit_length() - 1
            marks = np.zeros(1 << bits, bool)
            shift = np.uint64(64 - bits)
            marks[grams >> shift] = True
            self._tables[size] = grams, np.concatenate(self._items[size])[first], marks
        self._grams, self._items = {}, {}
        return self

    def find(self, hashes: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> tuple[str, int, int, int] | None:
        """(file, line, start, end) of the first shared n-gram of the longest kind, by characters of the document."""
        found = None
        for size, grams in _all_grams(hashes, self._largest):
            if size not in self._tables:
                continue
            table, items, marks = self._tables[size]
            maybe = np.flatnonzero(marks[grams >> np.uint64(65 - len(marks).bit_length())])
            places = np.minimum(np.searchsorted(table, grams[maybe]), len(table) - 1)
            hits = np.flatnonzero(table[places] == grams[maybe])
            if len(hits):
                first = int(maybe[hits[0]])
                file, line = self._places[int(items[places[hits[0]]])]
                found = file, line, int(starts[first]), int(ends[first + size - 1])
        return found


def _all_grams(hashes: np.ndarray, largest: int) -> Iterator[tuple[int, np.ndarray]]:
    """(n, uint64 hashes of the n-grams) for n = 1 to `largest`, each made from the one before."""
    grams = hashes
    for size in range(1, min(largest, len(hashes)) + 1):
        if size > 1:
            grams = grams[:-1] * _MIX + hashes[size - 1 :]
        yield size, characters.mixed(grams)


@functools.cache
def _indexes(files: tuple[str, ...], keys: tuple[str, ...], sizes: tuple[int, int, int, int]) -> tuple[Index, Index]:
    by_words, by_characters = Index(*sizes[:2]), Index(*sizes[2:])
    for file in files:
        for line, text in read_texts(file, keys):
            words = Words(text)
            if is_han_or_kana(words):
                by_characters.add(file, line, character_units(words)[0])
            else:
                by_words.add(file, line, words.hashes)
    return by_words.close(), by_characters.close()


STEP = Decontaminate
