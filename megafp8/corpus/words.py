"""One pass over a text that all word filters share: where its words, lines and paragraphs are, and their hashes.

A word is a longest run of letters, marks and digits of one kind: Han, hiragana and katakana each make words of their
own, since Japanese has no spaces (a run of one kind is about a morpheme with its ending; 2.2 characters on average,
where dictionary words have 1.9). Apostrophes between letters and points or commas between digits belong to their
word. No language has to be known. Hashes do not tell capital letters from small ones.

Everything is numpy over code points: about 30 ns a character, where a Python loop over words takes 10 times that.
"""

from __future__ import annotations

import functools
from functools import cached_property

import numpy as np

from megafp8.corpus import characters
from megafp8.corpus.characters import ALPHABETIC, DIGIT, JOINER, SPACE, SYMBOL

_BASE = 0x5851F42D4C957F2D  # odd, hence invertible modulo 2**64
_BLOCK = 1 << 16
_WORD_KINDS = np.array([SYMBOL, SPACE, ALPHABETIC, ALPHABETIC, 4, 5, 6, SYMBOL], np.uint8)  # R2D2 is one word
_WORD_MIX = np.uint64(0xD6E8FEB86659FD93)


class Words:
    """A text's words and lines as arrays; computed once, kept by `words_of`.

    Attributes:
        codes: int32 [C], code points.
        kinds: uint8 [C], classes of `characters` after joining.
        starts, ends: int64 [W], of each word, in characters.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.codes = characters.code_points(text)
        self.kinds = characters.classes().take(self.codes)
        _join(self.codes, self.kinds)
        kinds = _WORD_KINDS.take(self.kinds)
        changes = _where(kinds[1:] != kinds[:-1]) + 1
        bounds = np.concatenate((np.zeros(min(1, len(kinds)), np.int64), changes, [len(kinds)]))
        chosen = _where(kinds[bounds[:-1]] >= ALPHABETIC)
        self.starts, self.ends = bounds[chosen], bounds[chosen + 1]

    @property
    def num_words(self) -> int:
        """Number of words."""
        return len(self.starts)

    @cached_property
    def num_numbers(self) -> int:
        """Words that are digits only."""
        begun = _where(self.kinds[self.starts] == DIGIT)
        if not len(begun):
            return 0
        digits = _where(self.kinds == DIGIT)
        starts, ends = self.starts[begun], self.ends[begun]
        return int(np.count_nonzero(digits.searchsorted(ends) - digits.searchsorted(starts) == ends - starts))

    @cached_property
    def lengths(self) -> np.ndarray:
        """int64 [W]: characters of each word."""
        return self.ends - self.starts

    @cached_property
    def length_sums(self) -> np.ndarray:
        """int64 [W + 1]: characters of the words before each, and of all."""
        sums = np.zeros(self.num_words + 1, np.int64)
        self.lengths.cumsum(out=sums[1:])
        return sums

    @property
    def num_word_characters(self) -> int:
        """Characters of all words."""
        return int(self.length_sums[-1])

    @cached_property
    def _sums(self) -> np.ndarray:
        """uint64 [C + 1]: running polynomial hash; differences of two, scaled back, are hashes of what is between."""
        values = characters.symbols().take(self.codes)
        low, _ = _powers()
        for number, start in enumerate(range(0, len(values), _BLOCK)):
            block = values[start : start + _BLOCK]
            block *= low[: len(block)]
            if number:
                block *= np.uint64(pow(_BASE, start, 1 << 64))
        sums = np.zeros(len(values) + 1, np.uint64)
        values.cumsum(out=sums[1:])
        return sums

    def hash_ranges(self, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """uint64 [n]: hashes of the characters in [start, end): equal for equal strings, capitals aside."""
        _, inverse = _powers()
        values = (self._sums[ends] - self._sums[starts]) * inverse[starts & (_BLOCK - 1)]
        if len(self.codes) > _BLOCK:
            blocks = [pow(_BASE, -(i * _BLOCK), 1 << 64) for i in range(len(self.codes) // _BLOCK + 1)]
            values *= np.array(blocks, np.uint64)[starts >> 16]
        return values

    @cached_property
    def hashes(self) -> np.ndarray:
        """uint64 [W]: of each word."""
        return characters.mixed(self.hash_ranges(self.starts, self.ends))

    @cached_property
    def _letter_sums(self) -> np.ndarray:
        sums = np.zeros(len(self.kinds) + 1, np.int32)
        np.cumsum((self.kinds >= DIGIT) & (self.kinds != JOINER), out=sums[1:])
        return sums

    def num_letters(self, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """int32 [n]: letters and digits in [start, end)."""
        return self._letter_sums[ends] - self._letter_sums[starts]

    def gram_hashes(self, size: int) -> np.ndarray:
        """uint64 [W - size + 1]: of each run of `size` words; what stands between words does not matter."""
        count = max(self.num_words - size + 1, 0)
        values = self.hashes[:count]
        for offset in range(1, size):
            values = values * _WORD_MIX + self.hashes[offset : offset + count]
        return values

    def _gram_hashes_at(self, positions: np.ndarray, size: int) -> np.ndarray:
        values = self.hashes[positions]
        for offset in range(1, size):
            values = values * _WORD_MIX + self.hashes[positions + offset]
        return values

    @cached_property
    def _repeats(self) -> dict[int, tuple[np.ndarray, np.ndarray]]:
        return {}

    def repeated_grams(self, size: int) -> tuple[np.ndarray, np.ndarray]:
        """(positions, group): where the runs of `size` >= 2 words stand that occur more than once, by text.

        Positions are sorted; equal runs have equal group numbers. A run repeats only if its first size - 1 words do,
        so that longer runs are looked for where shorter ones were found.
        """
        if size not in self._repeats:
            if size == 2:
                positions, values = np.arange(max(self.num_words - 1, 0)), self.gram_hashes(2)
            else:
                positions = self.repeated_grams(size - 1)[0]
                positions = positions[positions <= self.num_words - size]
                values = self._gram_hashes_at(positions, size)
            order = values.argsort()
            ranked = values[order]
            same = ranked[1:] == ranked[:-1]
            chosen = np.zeros(len(values), bool)
            chosen[order[1:]] = same
            chosen[order[:-1]] |= same
            groups = np.zeros(len(values), np.int64)
            groups[order[1:]] = (~same).cumsum()
            self._repeats[size] = positions[chosen], groups[chosen]
        return self._repeats[size]

    def covered_characters(self, positions: np.ndarray, size: int) -> int:
        """Characters of the words in the runs of `size` words at `positions`, each counted once."""
        marks = np.zeros(self.num_words + 1, np.int32)
        np.add.at(marks, positions, 1)
        np.add.at(marks, positions + size, -1)
        return int(self.lengths[marks[:-1].cumsum() > 0].sum())

    def run_text(self, position: int, size: int) -> str:
        """The text from word `position` to the end of the `size`-th word, in one line."""
        last = min(position + size, self.num_words) - 1
        return " ".join(self.text[self.starts[position] : self.ends[last]].split())

    @cached_property
    def lines(self) -> Lines:
        """The lines of the text."""
        return Lines(self)

    @cached_property
    def num_bare_symbols(self) -> int:
        """Runs between white space in which there is no word, such as " - " and " *** "."""
        space = self.kinds == SPACE
        num_runs = int(np.count_nonzero(space[:-1] > space[1:])) + int(len(space) > 0 and not space[0])
        if not self.num_words:
            return num_runs
        # a word is the first of its run if there is white space between it and the word before
        after, before = self.ends[:-1], self.starts[1:] - 1
        first = space[after] | space[before]
        hidden = _where(~first & (before - after > 1))  # such as "a- -b"
        if len(hidden):
            spaces = _where(space)
            first[hidden] = np.searchsorted(spaces, after[hidden]) != np.searchsorted(spaces, before[hidden])
        return num_runs - 1 - int(np.count_nonzero(first))


class Lines:
    """Lines that are not blank, without white space at both ends.

    Attributes:
        starts, ends: int64 [L], in characters.
        lengths: int64 [L], characters.
        paragraph: int64 [L], number of the paragraph; paragraphs are parted by blank lines.
    """

    def __init__(self, words: Words) -> None:
        self._words = words
        codes = words.codes
        breaks = _where(codes == 10)
        starts = np.concatenate(([0], breaks + 1))
        ends = np.concatenate((breaks, [len(codes)]))
        numbers = _where(ends > starts)
        starts, ends = starts[numbers], ends[numbers]
        loose = _where((words.kinds[starts] == SPACE) | (words.kinds[ends - 1] == SPACE))
        if len(loose):  # white space at an end, or nothing else
            solid = _where(words.kinds != SPACE)
            low, high = np.searchsorted(solid, starts[loose]), np.searchsorted(solid, ends[loose])
            blank = low == high
            tight = loose[~blank]
            starts[tight], ends[tight] = solid[low[~blank]], solid[high[~blank] - 1] + 1
            numbers, starts, ends = (np.delete(values, loose[blank]) for values in (numbers, starts, ends))
        self.numbers, self.starts, self.ends = numbers, starts, ends
        self.lengths = ends - starts
        self.paragraph = np.zeros(len(numbers), np.int64)
        (numbers[1:] - numbers[:-1] > 1).cumsum(out=self.paragraph[1:])

    def __len__(self) -> int:
        return len(self.starts)

    @cached_property
    def hashes(self) -> np.ndarray:
        """uint64 [L]: of each line."""
        return self._words.hash_ranges(self.starts, self.ends)

    @cached_property
    def repeated(self) -> np.ndarray:
        """bool [L]: whether an equal line stands before it."""
        return repeats(self.hashes)

    @cached_property
    def num_words(self) -> np.ndarray:
        """int64 [L]: words that begin in each line."""
        starts = self._words.starts
        return starts.searchsorted(self.ends) - starts.searchsorted(self.starts)

    @property
    def first_codes(self) -> np.ndarray:
        """int32 [L]: first character of each line."""
        return self._words.codes[self.starts]

    @property
    def last_codes(self) -> np.ndarray:
        """int32 [L]: last character of each line."""
        return self._words.codes[self.ends - 1]

    @cached_property
    def paragraph_bounds(self) -> tuple[np.ndarray, np.ndarray]:
        """(starts, ends) of the paragraphs, in characters."""
        if not len(self):
            return self.starts, self.ends
        after = _where(self.paragraph[1:] != self.paragraph[:-1]) + 1
        first, last = np.concatenate(([0], after)), np.concatenate((after, [len(self)])) - 1
        return self.starts[first], self.ends[last]

    @cached_property
    def paragraph_hashes(self) -> np.ndarray:
        """uint64 [P]: of each paragraph."""
        return self._words.hash_ranges(*self.paragraph_bounds)


@functools.lru_cache(maxsize=1)
def words_of(text: str) -> Words:
    """The words of a text; asked again for the same text by the next step, the same object."""
    return Words(text)


def _where(mask: np.ndarray) -> np.ndarray:
    """Positions of True; numpy's `flatnonzero` without its three wrappers, which small texts would feel."""
    return mask.nonzero()[0]


def repeats(hashes: np.ndarray) -> np.ndarray:
    """bool [n]: whether an equal value stands before it."""
    result = np.zeros(len(hashes), bool)
    ranked = np.sort(hashes)
    if not (ranked[1:] == ranked[:-1]).any():  # the most frequent case, and three times as fast
        return result
    order = hashes.argsort(kind="stable")
    ranked = hashes[order]
    result[order[1:]] = ranked[1:] == ranked[:-1]
    return result


def _join(codes: np.ndarray, kinds: np.ndarray) -> None:
    """Make marks inside words (don't, 1,000.5) part of them, and other such marks symbols; changes `kinds`."""
    marks = _where(kinds == JOINER)
    kinds[marks] = SYMBOL
    inner = marks[(marks > 0) & (marks < len(kinds) - 1)]
    before, after, number = kinds[inner - 1], kinds[inner + 1], codes[inner] < 0x2F
    number &= codes[inner] != 0x27
    kinds[inner[number & (before == DIGIT) & (after == DIGIT)]] = DIGIT
    kinds[inner[~number & (before == ALPHABETIC) & (after == ALPHABETIC)]] = ALPHABETIC


@functools.cache
def _powers() -> tuple[np.ndarray, np.ndarray]:
    """(powers, inverse powers) of the hash's base, uint64 [64 Ki] each."""
    low = np.full(_BLOCK, _BASE, np.uint64)
    low[0] = 1
    inverse = np.full(_BLOCK, pow(_BASE, -1, 1 << 64), np.uint64)
    inverse[0] = 1
    return np.cumprod(low), np.cumprod(inverse)
