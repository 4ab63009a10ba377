"""Language by the model in the wheel, scores by a function or by words, evaluation n-grams found."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import socket
from pathlib import Path

import pytest

from megafp8.core.errors import ConfigError
from megafp8.corpus.compressed import InputStream
from megafp8.corpus.documents import Document, Dropped
from megafp8.corpus.mapping import step_values
from megafp8.corpus.step_registry import make_step
from megafp8.corpus.steps.language import identify, sample_of
from tests.unit.corpus.prose import ENGLISH, GERMAN, JAPANESE, TEXTS

NEWS = Path(os.environ.get("MEGAFP8_SHARED_DATA", "../shared/data")) / "heldout-en-de-ja-ntrex.jsonl.zst"


def document(text: str, language: str = "") -> Document:
    return Document("i", text, language, "s")


def test_language(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("the model is not in the wheel"))
    step = make_step({"kind": "language"})
    for language, text in TEXTS.items():
        assert step.apply(document(text)) == document(text, language) == step.apply(document(text, language))
        assert step.apply(document(text, "fr")).language == language
    assert step.apply(document("12 34 56")).reason == "language unsure"  # type: ignore[union-attr]
    assert step.apply(document("\n\u200b")).reason == "language unsure"  # type: ignore[union-attr]


def test_language_options() -> None:
    assert (
        make_step({"kind": "language", "languages": ["de", "ja"]}).apply(document(ENGLISH)).reason == "other language"
    )
    step = make_step({"kind": "language", "keep_label": True})
    assert step.apply(document(ENGLISH, "ja")).reason == "label disagrees"
    assert step.apply(document(ENGLISH)) == document(ENGLISH, "en")


def test_more_than_the_beginning_is_looked_at() -> None:
    # the package looks at 80 characters unless told otherwise: an English licence in front of a German page
    licence = "Permission is granted to copy and distribute this document. " * 4
    assert make_step({"kind": "language"}).apply(document(licence + GERMAN * 3)).language == "de"
    first = "This sentence of more than eighty characters is in English, and it stands in front. "
    assert identify(first + " ".join(GERMAN.split()))[0] == "de"
    sample = sample_of("".join(f"{i:05d} " for i in range(10_000)), 1200)
    numbers = [int(word) for word in sample.split() if len(word) == 5]
    assert len(sample) <= 1203 and numbers[0] > 2000 and numbers[-1] == 9999 and numbers == sorted(numbers)


def test_accuracy_on_held_out_news() -> None:
    if not NEWS.exists():
        pytest.skip(f"{NEWS} is not there")
    right = total = 0
    with InputStream(NEWS) as stream:
        for line in stream.reader:
            one = json.loads(line)
            for sentence in one["text"].split("\n")[::12]:  # a twelfth keeps it short; all 5,991: see docs/corpus.md
                right += identify(sentence)[0] == one["lang"]
                total += 1
    # 0.9985 of all sentences; three standard deviations of a sample of 600 below that are 0.9938
    assert total > 400 and right / total > 0.993


def long_words(one: Document) -> float:
    """A score that is imported by name."""
    return sum(len(word) > 8 for word in one.text.split()) / len(one.text.split())


def not_a_number(one: Document) -> float:
    """A broken score."""
    return math.nan


def test_score_by_a_function() -> None:
    function = f"{__name__}:long_words"
    step = make_step({"kind": "score", "function": function, "min_score": 0.05, "metadata_key": "long"})
    kept = step.apply(document(GERMAN))
    assert isinstance(kept, Document) and kept.metadata == {"long": long_words(document(GERMAN))}
    assert step.apply(document("all of it is short")) == Dropped("score too low", "0")
    assert step.files_read == ()
    with pytest.raises(ValueError, match="returned nan"):
        make_step({"kind": "score", "function": f"{__name__}:not_a_number"}).apply(document("x"))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "reference is empty"),
        ({"reference": ["/nowhere/*.txt"]}, "no such file"),
        ({"function": "len"}, "neither"),
        ({"function": "os:nothing"}, "cannot be imported"),
        ({"function": "os:sep"}, "no function"),
        ({"function": "builtins:len", "min_score": 2, "max_score": 1}, "min_score 2.0 is above max_score 1.0"),
    ],
)
def test_wrong_scores_are_refused(options: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make_step({"kind": "score", **options})


def test_unigram_perplexity(tmp_path: Path) -> None:
    (tmp_path / "good.jsonl").write_text(json.dumps({"text": "a b a b"}) + "\n" + json.dumps({"text": "A c"}) + "\n")
    step = make_step({"kind": "score", "reference": [f"{tmp_path}/*.jsonl"]})
    # 6 words of 3 kinds: p(a) = (3+1)/(6+3+1), p(unseen) = 1/10
    assert step.apply(document("a a!")).metadata["score"] == pytest.approx(10 / 4)
    assert step.apply(document("a xyz")).metadata["score"] == pytest.approx(math.sqrt(10 / 4 * 10))
    assert step.apply(document("...")).metadata["score"] == math.inf
    for language, text in TEXTS.items():
        (tmp_path / f"{language}.txt").write_text(text, encoding="utf-8")
    step = make_step({"kind": "score", "reference": [f"{tmp_path}/*.txt"], "max_score": 400})
    assert isinstance(step.apply(document(JAPANESE)), Document)
    assert step.apply(document("zxq wvk jjq ppl " * 9)).reason == "score too high"


QUESTION = (
    "Which of the two rivers that meet below the old mill at Sankt Goar carries more water in an ordinary winter?"
)
FRAGE = (
    "Welcher der beiden Flüsse, die sich unterhalb der alten Mühle treffen, führt in den meisten Wintern mehr Wasser?"
)
MONDAI = "古い水車小屋の下で合流する二つの川のうち、ふつうの冬により多くの水を運ぶのはどちらの川か答えなさい。"


@pytest.fixture
def evaluation(tmp_path: Path) -> Path:
    lines = [{"question": QUESTION, "choices": ["Rhine", "Mosel"], "n": 3}, {"question": FRAGE}, {"question": MONDAI}]
    lines += [{"question": "Who painted the ceiling of the great hall?"}, {"question": "What is this?"}]
    (tmp_path / "rivers.jsonl").write_text("\n".join(json.dumps(line) for line in lines) + "\n")
    (tmp_path / "story.txt").write_text(
        "\n\nOnce upon a time\nthere was a very small king who had no castle.\n\nEnd.\n"
    )
    return tmp_path


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (QUESTION, "in rivers.jsonl: line 1"),
        (ENGLISH + QUESTION.upper().replace(" ", "\n").replace("?", " !") + ENGLISH, "in rivers.jsonl: line 1"),
        (GERMAN + FRAGE.replace(",", " –"), "in rivers.jsonl: line 2"),
        (JAPANESE + "\n".join(MONDAI[i : i + 7] for i in range(0, len(MONDAI), 7)), "in rivers.jsonl: line 3"),
        ("He asked who painted the ceiling of the great hall, twice.", "in rivers.jsonl: line 4"),  # 8 words: the item
        ("Who painted the ceiling of the small hall?", ""),
        ("What is this?", ""),  # too short to mean anything
        (" ".join(QUESTION.split()[:12]), ""),  # 12 words of a longer item
        (MONDAI[:29], ""),
        ("a time there was a very small king who had no castle", ""),
        ("upon a time there was a very small king who had no castle", "in story.txt: line 3"),
        ("", ""),
        *((text, "") for text in TEXTS.values()),
    ],
)
def test_decontaminate(evaluation: Path, text: str, found: str) -> None:
    result = make_step({"kind": "decontaminate", "files": [f"{evaluation}/*"]}).apply(document(text))
    if not found:
        assert result == document(text)
    else:
        assert isinstance(result, Dropped) and f"{result.reason}: {result.detail}".startswith(found)


def test_the_n_gram_is_named(evaluation: Path) -> None:
    step = make_step({"kind": "decontaminate", "files": [f"{evaluation}/rivers.jsonl"], "keys": ["question"]})
    words = QUESTION.split()
    result = step.apply(document("Before. " + " ".join(words[2:]) + " After."))
    assert result == Dropped("in rivers.jsonl", f"line 1: {' '.join(words[2:15])!r}")


def test_files_are_part_of_what_a_task_is(evaluation: Path) -> None:
    table = {"kind": "decontaminate", "files": [f"{evaluation}/rivers.jsonl"]}
    before = step_values(table)
    assert list(before["files"]) == [f"{evaluation}/rivers.jsonl"]
    (evaluation / "rivers.jsonl").write_text('{"question": "another"}\n')
    assert step_values(table) != before and "files" not in step_values({"kind": "length"})


def test_wrong_evaluation_files(evaluation: Path) -> None:
    for options, words in (
        ({}, "files: missing"),
        ({"files": []}, "files"),
        ({"files": [f"{evaluation}/*.parquet"]}, "no such file"),
        ({"files": [f"{evaluation}/story.txt"], "min_words": 20}, "min_words 20 is above ngram_words 13"),
    ):
        with pytest.raises(ConfigError, match=words):
            make_step({"kind": "decontaminate", **options})
    bad = evaluation / "bad.jsonl"
    for data, words in (
        (b'{"q": "a"}\n{"q": ', "bad.jsonl:2"),
        (b"\xff\n", "bad.jsonl:1"),
        (b'{"a": 1}', "none of the keys"),
    ):
        bad.write_bytes(data)
        options = {"files": [str(bad)], "keys": ["q"], "min_words": 2 + len(data) % 9}  # its own cache entry each
        with pytest.raises(ValueError, match=words):
            make_step({"kind": "decontaminate", **options}).apply(document("x"))


def test_scores_and_labels_survive_a_second_step() -> None:
    one = dataclasses.replace(document(ENGLISH), metadata={"url": "x"})
    assert make_step({"kind": "language"}).apply(one).metadata == {"url": "x"}
