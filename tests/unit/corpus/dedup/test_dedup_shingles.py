"""Shingles against tokens and tuples in plain Python; they depend on the text alone, however texts are batched."""

from __future__ import annotations

import random
import unicodedata
from collections.abc import Iterator

import numpy as np
import pytest

from megafp8.corpus.dedup import shingles as module
from megafp8.corpus.dedup.shingles import shingles, token_hashes

KANA = "あいうえおかきくけこ日本語文書検索"
ALPHABET = "abcXYZ äÖß 019 ,.;\n\t ーー 。、「」" + KANA + "éñ Ａｂ１ ｶﾅ 한국어 ไทย 𠮷 😀"


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Pieces of 64 characters, so that most texts are cut."""
    module._powers.cache_clear()
    monkeypatch.setattr(module, "PIECE", 64)
    yield
    module._powers.cache_clear()


def plain_tokens(text: str) -> list[tuple[str, bool]]:
    """(token, whether it is a character of a script without spaces), by the names of characters."""
    found: list[tuple[str, bool]] = []
    word = ""
    for character in [*text, " "]:
        name = unicodedata.name(character, "")
        alone = any(part in name for part in ("CJK UNIFIED", "HIRAGANA", "KATAKANA", "THAI CHARACTER"))
        alone = alone and name != "KATAKANA MIDDLE DOT"
        if not alone and character.isalnum():
            code = ord(character)
            lower = (chr(code - 0xFEE0) if 0xFF01 <= code <= 0xFF5E else character).lower()
            word += lower
            continue
        if word:
            found.append((word, False))
            word = ""
        if alone:
            found.append((character, True))
    return found


def plain_shingles(text: str, words: int, characters: int) -> list[tuple[str, ...]]:
    tokens = plain_tokens(text)
    needs = [characters if alone else words for _, alone in tokens]
    found = [tuple(t for t, _ in tokens[i : i + n]) for i, n in enumerate(needs) if i + n <= len(tokens)]
    if tokens and needs[0] > len(tokens):
        found.insert(0, tuple(t for t, _ in tokens))
    return found


def texts(count: int, longest: int, seed: int = 3) -> list[str]:
    rng = random.Random(seed)
    return ["".join(rng.choices(ALPHABET, k=rng.randrange(longest))) for _ in range(count)]


@pytest.mark.parametrize(("words", "characters"), [(5, 5), (3, 7), (4, 1), (1, 1)])
def test_shingles_are_those_of_plain_python(words: int, characters: int) -> None:
    some = ["", "...", "one", "a b c d", "a b c d e", "日本", *texts(300, 120)]
    hashes, bounds = shingles(some, words, characters)
    assert len(bounds) == len(some) + 1 and bounds[-1] == len(hashes)
    seen: dict[int, tuple[str, ...]] = {}
    for text, low, high in zip(some, bounds, bounds[1:]):
        expected = plain_shingles(text, words, characters)
        assert high - low == len(expected), text
        for value, shingle in zip(hashes[low:high].tolist(), expected):
            assert seen.setdefault(value, shingle) == shingle
    assert len(set(seen.values())) == len(seen)  # one hash a shingle, one shingle a hash


def test_tokens_of_a_text_do_not_depend_on_the_texts_around_it(small_pieces: None) -> None:
    some = ["x" * 500, "a " * 300, KANA * 30, "ab" * 31 + " c", "x" * 64, "x" * 63 + " ", *texts(200, 300)]
    hashes, alone, bounds = token_hashes(some)
    for at, text in enumerate(some):
        mine, kinds, _ = token_hashes([text])
        assert (mine == hashes[bounds[at] : bounds[at + 1]]).all() and len(mine) == bounds[at + 1] - bounds[at]
        assert (kinds == alone[bounds[at] : bounds[at + 1]]).all()
        if max((len(token) for token, _ in plain_tokens(text)), default=0) < 64:  # longer words are cut
            assert len(mine) == len(plain_tokens(text))


def test_long_texts_have_the_tokens_of_their_parts(small_pieces: None) -> None:
    """A text cut into pieces gives what its words give one by one."""
    words = texts(400, 12, seed=9)
    whole, _, _ = token_hashes([" ".join(words)])
    parts, _, _ = token_hashes(words)
    assert (whole == parts).all()


def test_case_width_space_and_punctuation_do_not_count() -> None:
    some = ["Das Haus, gross: ÄÖ-12 in Ａｂ!", "das  haus\ngross äö 12 IN ab"]
    hashes, bounds = shingles(some, 2, 2)
    assert (hashes[: bounds[1]] == hashes[bounds[1] :]).all()


def test_nasty_texts() -> None:
    some = ["\ud800 half", "\0", "\U0010ffff \U000e0041", "e\u0301", "\u200b", "n" * 1_000_000, "あ" * 300_000]
    hashes, bounds = shingles(some, 5, 5)
    assert np.diff(bounds).tolist() == [1, 0, 1, 1, 0, 12, 299_996]  # a word of 16 pieces has 12 shingles
    assert len(set(hashes[-299_996:].tolist())) == 1
    assert shingles([], 5, 5)[1].tolist() == [0]


def test_values_stay() -> None:
    """Signatures on disk were made with these; other values need a new `MinHash.version`."""
    hashes, _ = shingles(["the quick brown fox jumps over 日本語の文書"], 5, 5)
    assert [f"{value:016x}" for value in hashes[:2].tolist()] == GOLDEN


GOLDEN = ["f60d9573058e554d", "1468ed9e817456a3"]
