"""Repeated paragraphs and lines: the first stays, the others go, and bytes are counted."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megafp8.corpus.dedup.paragraphs import Paragraphs
from tests.unit.corpus.dedup.driver import drop_lists

A, B, C = (
    "The first of the long paragraphs.",
    "Another one, which is long as well.",
    "Something else that is said once.",
)


def cleaned(step: Paragraphs, shards: list[list[str]], folder: Path) -> tuple[list[list[str]], int]:
    out, total = [], 0
    for texts, (dropped, _) in zip(shards, drop_lists(step, shards, folder)):
        first, some = 0, []
        for text in texts:
            kept, gone, first = step.remove(text, first, dropped)
            assert len(text.encode()) == len(kept.encode()) + gone
            some.append(kept)
            total += gone
        out.append(some)
    return out, total


def test_paragraphs_beyond_the_first_in_the_corpus_are_taken_out(tmp_path: Path) -> None:
    shards = [[f"{A}\n\n{B}\n", f"{C}\n\n{A}"], [f"{B}\n \n\nshort\n\n  {B.replace(' ', '  ')}\n\n{C} Not quite."]]
    kept, gone = cleaned(Paragraphs(min_characters=20), shards, tmp_path)
    assert kept == [[f"{A}\n\n{B}\n", C], [f"short\n\n{C} Not quite."]]
    assert gone == sum(len(text) for shard in shards for text in shard) - sum(len(t) for some in kept for t in some)


def test_a_paragraph_goes_on_over_line_ends_of_any_kind() -> None:
    assert Paragraphs().pieces("a\r\nb\r\n\r\n  c\rd\r\re\n \n\nf") == ["a\r\nb\r\n\r\n", "  c\rd\r\r", "e\n \n\n", "f"]


def test_lines(tmp_path: Path) -> None:
    shards = [
        ["Cookies? Accept all\nこれは長い行です。\r\nx"],
        ["Cookies? Accept all\r\nnew text\rx\nこれは長い行です。"],
    ]
    kept, _ = cleaned(Paragraphs(unit="line", min_characters=5), shards, tmp_path)
    assert kept == [shards[0], ["new text\rx"]]


def test_a_text_of_nothing_new_is_left_empty(tmp_path: Path) -> None:
    kept, gone = cleaned(Paragraphs(min_characters=1), [[f"{A}\n\n{A}", f" {A}\n"]], tmp_path)
    assert kept == [[A, ""]] and gone == 2 * len(A) + 4


@pytest.mark.parametrize("unit", ["paragraph", "line"])
@pytest.mark.parametrize(
    "text", ["", "\n", "\n\n\n", "a", "a\n\nb", "\r\n\r\na\n\n", "a\r\nb", "a\n\t\nb\n\n\nc\n", " \u2028 "]
)
def test_pieces_are_the_text(unit: str, text: str) -> None:
    pieces = Paragraphs(unit=unit).pieces(text)  # type: ignore[arg-type]
    assert "".join(pieces) == text and (len(pieces) == 1 or all(pieces))


def test_untouched_texts_keep_every_byte() -> None:
    text = f"{A}  \n\n{B}\n \n"
    assert Paragraphs().remove(text, 5, np.array([4, 7])) == (text, 0, 7)
