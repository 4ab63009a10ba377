"""Text -> shingles: 64-bit hashes of runs of n tokens, computed with numpy over many documents at once.

A token is a run of letters and digits, or a single character of a script that is written without spaces (Han, kana,
Thai, ...), so that a mixed page needs no language and has no threshold: a shingle begins at every token and has
`words` tokens if it begins with a word, `characters` tokens if it begins with such a character. Case, white space and
punctuation do not count. Word 5-grams are Lee et al. 2022 (arXiv:2107.06499, section 4.2) and FineWeb
(arXiv:2406.17557); character 5-grams for Japanese are the Swallow corpus (arXiv:2404.17733).

Which characters are which is a table of Unicode blocks kept here, so that it does not change with Python's version.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import numpy as np

SPACE, WORD, ALONE = 0, 1, 2  # what a character is: between tokens, part of a word, a token of its own

PIECE = 1 << 16  # characters that are hashed together: their arrays (about 50 bytes each) stay in the CPU's cache
_BASE = 0x9E3779B97F4A7C15  # odd, so that it has an inverse modulo 2^64
_TABLE = 0x40000  # code points that the tables cover; those behind it are private use or unassigned
_FULL_WIDTH = range(0xFF01, 0xFF5F)  # "！" to "～", the same characters as "!" to "~"

_SPACES = (
    (0x00, 0x2F), (0x3A, 0x40), (0x5B, 0x60), (0x7B, 0xA9), (0xAB, 0xB1), (0xB4, 0xB4), (0xB6, 0xB8), (0xBB, 0xBB),
    (0xBF, 0xBF), (0xD7, 0xD7), (0xF7, 0xF7), (0x2000, 0x206F), (0x2190, 0x2BFF), (0x2E00, 0x2E7F), (0x3000, 0x3004),
    (0x3008, 0x3020), (0x3030, 0x3030), (0x303D, 0x303F), (0x30FB, 0x30FB), (0xFE10, 0xFE1F), (0xFE30, 0xFE6F),
    (0xFEFF, 0xFEFF), (0xFF00, 0xFF0F), (0xFF1A, 0xFF20), (0xFF3B, 0xFF40), (0xFF5B, 0xFF65), (0xFFE0, 0xFFFF),
    (0x1F000, 0x1FAFF),
)  # fmt: skip
_ALONE = (
    (0x0E00, 0x0EFF), (0x1000, 0x109F), (0x1780, 0x17FF), (0x3005, 0x3007), (0x3021, 0x302F), (0x3031, 0x303C),
    (0x3040, 0x30FA), (0x30FC, 0x312F), (0x31A0, 0x31FF), (0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0xF900, 0xFAFF),
    (0xFF66, 0xFF9F), (0x1B000, 0x1B16F), (0x20000, 0x3FFFF),
)  # fmt: skip


@functools.cache
def _classes() -> np.ndarray:
    """uint8 [_TABLE]: class of each code point."""
    table = np.full(_TABLE, WORD, np.uint8)
    for kind, blocks in ((SPACE, _SPACES), (ALONE, _ALONE)):
        for first, last in blocks:
            table[first : last + 1] = kind
    return table


@functools.cache
def _folded() -> np.ndarray:
    """uint32 [_TABLE]: each code point in lower case (where that is one character), full-width forms as ASCII."""
    table = np.arange(_TABLE, dtype=np.uint32)
    for code in [*range(0x2C00), *range(0xA640, 0xAC00), *_FULL_WIDTH, *range(0x10400, 0x1E960)]:
        lower = chr(code - 0xFEE0 if code in _FULL_WIDTH else code).lower()
        table[code] = ord(lower) if len(lower) == 1 else code
    return table


@functools.cache
def _powers() -> tuple[np.ndarray, np.ndarray]:
    """uint64 [PIECE + 1] each: powers of the base and of its inverse, modulo 2^64."""
    with np.errstate(over="ignore"):
        return tuple(
            np.concatenate([np.ones(1, np.uint64), np.cumprod(np.full(PIECE, base, np.uint64))])
            for base in (_BASE, pow(_BASE, -1, 1 << 64))
        )  # type: ignore[return-value]


def mix(values: np.ndarray) -> np.ndarray:
    """uint64 -> uint64 in place, every bit depends on every bit (the finaliser of splitmix64, Steele et al. 2014)."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        values ^= values >> np.uint64(shift)
        values *= np.uint64(factor)
    values ^= values >> np.uint64(31)
    return values


def _codes(text: str) -> np.ndarray:
    """uint32 [characters]; a lone surrogate is a character like others."""
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)


def _tokens(codes: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens of a piece of at most `PIECE` characters.

    Returns:
        hashes: uint64 [tokens].
        starts: int64 [tokens], where each begins.
        alone: bool [tokens], whether it is a character of a script without spaces.
    """
    codes = np.minimum(codes, np.uint32(_TABLE - 1))
    kinds = _classes()[codes]
    word = kinds == WORD
    alone = kinds == ALONE
    edges = np.flatnonzero(np.diff(word, prepend=False, append=False))  # begins and ends of words, in turn
    first, last = edges[::2], edges[1::2]
    powers, inverse = _powers()
    terms = (_folded()[codes] + np.uint32(1)) * powers[: len(codes)]
    sums = np.zeros(len(codes) + 1, np.uint64)
    np.cumsum(terms, out=sums[1:])
    singles = np.flatnonzero(alone)
    if len(singles):
        starts = np.concatenate([first, singles])
        order = np.argsort(starts, kind="stable")
        starts, ends = starts[order], np.concatenate([last, singles + 1])[order]
    else:
        starts, ends = first, last
    hashes = (sums[ends] - sums[starts]) * inverse[starts]  # of the characters alone, wherever the token stands
    return mix(hashes), starts, alone[starts]


def _long_tokens(text: str) -> tuple[np.ndarray, np.ndarray]:
    """(hashes, alone) of a text of more than `PIECE` characters, cut between tokens.

    A word as long as a piece is cut at the piece's end. Pieces count from the text's begin, so that the result
    depends on the text alone.
    """
    found: list[tuple[np.ndarray, np.ndarray]] = []
    at = 0
    while at < len(text):
        codes = _codes(text[at : at + PIECE])
        size = len(codes)
        if at + size < len(text):
            kinds = _classes()[np.minimum(codes, np.uint32(_TABLE - 1))]
            if kinds[-1] == WORD:  # the word may go on: leave it to the next piece
                others = np.flatnonzero(kinds != WORD)
                size = int(others[-1]) + 1 if len(others) else size
        hashes, _, alone = _tokens(codes[:size])
        found.append((hashes, alone))
        at += size
    return np.concatenate([h for h, _ in found]), np.concatenate([a for _, a in found])


def _batches(texts: Sequence[str]) -> Iterator[list[str]]:
    """Runs of texts that fit into a piece together; a longer one is alone."""
    batch: list[str] = []
    size = 0
    for text in texts:
        if batch and size + len(text) + 1 > PIECE:
            yield batch
            batch, size = [], 0
        batch.append(text)
        size += len(text) + 1
    if batch:
        yield batch


def token_hashes(texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens of documents.

    Returns:
        hashes: uint64 [tokens of all].
        alone: bool [tokens of all], see `_tokens`.
        bounds: int64 [documents + 1], where each document's tokens begin.
    """
    hashes, alone, counts = [], [], []
    for batch in _batches(texts):
        if len(batch[0]) > PIECE:
            some, kinds = _long_tokens(batch[0])
            counts.append(np.array([len(some)]))
        else:
            some, starts, kinds = _tokens(_codes("\n".join(batch)))
            begins = np.cumsum([0] + [len(text) + 1 for text in batch])
            counts.append(np.diff(np.searchsorted(starts, begins)))
        hashes.append(some)
        alone.append(kinds)
    bounds = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.concatenate([np.zeros(0, np.int64), *counts]))])
    none = np.zeros(0, np.uint64)
    return np.concatenate([none, *hashes]), np.concatenate([none.astype(bool), *alone]), bounds


def shingles(texts: Sequence[str], words: int, characters: int) -> tuple[np.ndarray, np.ndarray]:
    """Shingles of documents, repeated ones included.

    A document with fewer tokens than a shingle has one shingle of all of them; one without tokens has none.

    Args:
        words: tokens of a shingle that begins with a word.
        characters: tokens of a shingle that begins with a character of a script without spaces.

    Returns:
        hashes: uint64 [shingles of all].
        bounds: int64 [documents + 1], where each document's shingles begin.
    """
    tokens, alone, bounds = token_hashes(texts)
    counts = np.diff(bounds)
    left = np.repeat(bounds[1:], counts) - np.arange(len(tokens))  # tokens from here to the document's end
    need = np.where(alone, characters, words)
    first = np.zeros(len(tokens), bool)
    first[bounds[:-1][counts > 0]] = True
    taken = np.minimum(need, left)
    hashes = np.zeros(len(tokens), np.uint64)
    longest = max(words, characters)
    padded = np.concatenate([tokens, np.zeros(longest, np.uint64)])
    for k in range(longest):
        terms = padded[k : k + len(tokens)] * np.uint64(pow(_BASE, 2 * k + 1, 1 << 64))
        if k < min(words, characters):
            hashes += terms  # too long at a document's end, put right below
        else:
            hashes += np.where(k < need, terms, np.uint64(0))
    whole = left >= need
    short = np.flatnonzero(first & ~whole)
    for at in short:
        n = int(taken[at])
        factors = np.array([pow(_BASE, 2 * k + 1, 1 << 64) for k in range(n)], np.uint64)
        hashes[at] = (tokens[at : at + n] * factors).sum(dtype=np.uint64)
    kept = whole
    kept[short] = True
    new_bounds = np.concatenate([np.zeros(1, np.int64), np.cumsum(kept)])[bounds]
    return mix(hashes[kept]), new_bounds
