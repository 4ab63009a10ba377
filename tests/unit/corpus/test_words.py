"""The shared pass: words of three scripts, lines, paragraphs, hashes; all checked against plain Python."""

from __future__ import annotations

import random
import re
from collections import Counter

import numpy as np
import pytest

from megafp8.corpus.words import Words, repeats, words_of
from tests.unit.corpus.prose import TEXTS


def words(text: str) -> list[str]:
    found = Words(text)
    return [text[a:b] for a, b in zip(found.starts, found.ends)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Don’t pay 1,000.50 to R2D2, it's ok.", ["Don’t", "pay", "1,000.50", "to", "R2D2", "it's", "ok"]),
        ("'quoted' a.b 3. x,y", ["quoted", "a", "b", "3", "x", "y"]),
        ("私はコーヒーを2杯飲みました。", ["私", "は", "コーヒー", "を", "2", "杯飲", "みました"]),
        ("人々〇〇々時々ヽヾゝ", ["人々〇〇々時々", "ヽヾ", "ゝ"]),
        ("한국어 문장 straße Ünïcode", ["한국어", "문장", "straße", "Ünïcode"]),
        ("\U0002000b\U000e0041\U0010fffd x", ["\U0002000b", "x"]),
        ("", []),
        (" \n\t ", []),
        ("…!?", []),
    ],
)
def test_words(text: str, expected: list[str]) -> None:
    assert words(text) == expected


def test_words_of_latin_text_are_what_a_regular_expression_finds() -> None:
    for text in (TEXTS["en"], TEXTS["de"]):
        assert words(text) == re.findall(r"\w+(?:['’]\w+)*", text)


def test_counts_by_translations() -> None:
    # thresholds on numbers of words hold for all three because translations have about as many by this rule
    counts = {language: len(words(text)) for language, text in TEXTS.items()}
    assert all(0.8 < count / counts["en"] < 1.25 for count in counts.values()), counts


def test_hashes_know_equal_words_and_nothing_else() -> None:
    text = "Tür TÜR tür Tor tor's 東京 東 京 ab ba " * 3 + "x" * 70_000 + " tür " + "x" * 70_000
    found = Words(text)
    by_hash: dict[int, set[str]] = {}
    for word, value in zip(words(text), found.hashes.tolist()):
        by_hash.setdefault(value, set()).add(word.lower())
    assert all(len(names) == 1 for names in by_hash.values())
    assert len(by_hash) == len({word.lower() for word in words(text)})  # also across blocks of 65536 characters


def plain_repeats(names: list[str], size: int) -> Counter[tuple[str, ...]]:
    grams = Counter(tuple(names[i : i + size]) for i in range(len(names) - size + 1))
    return Counter({gram: number for gram, number in grams.items() if number > 1})


@pytest.mark.parametrize("size", [2, 3, 5, 10])
def test_repeated_grams(size: int) -> None:
    rng = random.Random(size)
    names = rng.choices(["a", "b", "c"], k=80) + [f"w{i}" for i in range(20)] + rng.choices(["a", "b", "c"], k=80)
    found = Words(" ".join(names))
    positions, groups = found.repeated_grams(size)
    expected = plain_repeats(names, size)
    assert sorted(Counter(groups.tolist()).values()) == sorted(expected.values())
    assert len(positions) == sum(expected.values()) and (np.diff(positions) > 0).all()
    covered = {i for p in positions.tolist() for i in range(p, p + size)}
    assert found.covered_characters(positions, size) == sum(len(names[i]) for i in covered)


def test_lines_and_paragraphs() -> None:
    text = "\n  Eins zwei \n\n\ndrei\n vier fünf\n \t\nEINS ZWEI\n"
    found = Words(text)
    lines = found.lines
    assert [text[a:b] for a, b in zip(lines.starts, lines.ends)] == ["Eins zwei", "drei", "vier fünf", "EINS ZWEI"]
    assert lines.numbers.tolist() == [1, 4, 5, 7] and lines.num_words.tolist() == [2, 1, 2, 2]
    assert lines.paragraph.tolist() == [0, 1, 1, 2] and repeats(lines.hashes).tolist() == [False, False, False, True]
    assert repeats(lines.paragraph_hashes).tolist() == [False, False, True]
    assert found.num_letters(lines.starts, lines.ends).tolist() == [8, 4, 8, 8]


def test_nothing_in_it() -> None:
    for text in ("", "\n\n", "..."):
        found = Words(text)
        assert found.num_words == 0 and not len(found.hashes) and not len(found.repeated_grams(2)[0])
        assert len(found.lines) == len(found.lines.paragraph_hashes) == (1 if text == "..." else 0)


def test_bare_symbols_and_numbers() -> None:
    found = Words("- a *** 12 § 3,5 (4) x-y ---\n=")
    assert found.num_bare_symbols == 5 and found.num_numbers == 3


def test_the_next_step_gets_the_same_object() -> None:
    text = "one two"
    assert words_of(text) is words_of(text) and words_of("three") is not words_of(text)


def test_half_a_surrogate_does_not_stop_it() -> None:
    assert words("a \ud800 b") == ["a", "b"]


def test_against_plain_python_on_random_text() -> None:
    rng = random.Random(5)
    for _ in range(300):
        text = "".join(rng.choices("ab1 \n\t-.,'あ漢カ…", k=rng.randrange(40)))
        found = Words(text)
        lines = [(number, line.strip()) for number, line in enumerate(text.split("\n")) if line.strip()]
        assert [(n, text[a:b]) for n, a, b in zip(found.lines.numbers, found.lines.starts, found.lines.ends)] == lines
        bare = [run for run in text.split() if not re.search(r"[^\W_]", run)]
        assert found.num_bare_symbols == len(bare)
        assert found.num_numbers == sum(bool(re.fullmatch(r"[\d.,]+", word)) for word in words(text))
