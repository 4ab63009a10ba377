"""Filters keep prose in English, German and Japanese, and drop by name what each rule is for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megafp8.core.errors import ConfigError
from megafp8.corpus.documents import Document, Dropped
from megafp8.corpus.step_registry import make_step, step_kinds
from tests.unit.corpus.prose import ENGLISH, GERMAN, JAPANESE, TEXTS

FILTERS = ("gopher_quality", "gopher_repetition", "c4", "fineweb", "boilerplate")
NASTY = Path(__file__).resolve().parents[2] / "nasty"


def run(kind: str, text: str, language: str = "en", **options: object) -> Document | Dropped:
    return make_step({"kind": kind, **options}).apply(Document("i", text, language, "s"))


def reason(kind: str, text: str, language: str = "en", **options: object) -> str:
    result = run(kind, text, language, **options)
    return result.reason if isinstance(result, Dropped) else "kept"


@pytest.mark.parametrize("language", TEXTS)
@pytest.mark.parametrize("kind", FILTERS)
def test_prose_is_kept_as_it_is(kind: str, language: str) -> None:
    document = Document("i", TEXTS[language], language, "s")
    assert make_step({"kind": kind}).apply(document) is document


@pytest.mark.parametrize("kind", FILTERS)
def test_no_text_breaks_a_filter(kind: str) -> None:
    texts = ["", " ", "\n", "a", "。", "…\n…", "x" * 10**5, "\x00\ufffe", "\ud800", "- " * 50, "あ" * 3000, "#\n" * 9]
    for line in (NASTY / "unicode_zoo.jsonl").read_text(encoding="utf-8").splitlines():
        texts.append(json.loads(line)["text"])
    for text in texts:
        assert isinstance(run(kind, text), (Document, Dropped))


@pytest.mark.parametrize(
    ("text", "language", "options", "expected"),
    [
        ("Too short to say anything.", "en", {}, "few words"),
        ("短い文です。", "ja", {}, "few words"),
        (ENGLISH, "en", {"max_words": 60}, "many words"),
        ("a b c d e f g " * 20, "en", {}, "word length"),
        (JAPANESE.replace("。", "").replace("、", ""), "en", {}, "word length"),  # Japanese by English measures
        ("Donaudampfschifffahrtsgesellschaft " * 60, "de", {}, "word length"),
        ("the tables of 12.34 56.78 1990 - - and others " * 20, "en", {}, "words without letters"),
        ("#tag of the day and #more to #read with them " * 20, "en", {}, "hash signs"),
        ("well ... of course ... and then the end " * 20, "en", {}, "ellipses"),
        ("そうね……でも、それは……いつの話ですか。私の……いいえ。" * 20, "ja", {}, "ellipses"),
        ("- the first of these and that\n* have it with you\n" * 20, "en", {}, "bullet lines"),
        ("・これは最初の項目である\n・次の項目は長い\n" * 20, "ja", {}, "bullet lines"),
        ("the start of a long story that goes on ...\nand some more words.\n" * 20, "en", {}, "ellipsis lines"),
        (GERMAN, "en", {}, "stop words"),
        (ENGLISH, "de", {}, "stop words"),
    ],
)  # fmt: skip
def test_gopher_quality(text: str, language: str, options: dict, expected: str) -> None:
    assert reason("gopher_quality", text, language, **options) == expected


def test_a_language_without_stop_words_is_counted_and_can_be_given() -> None:
    french = "Le phare se trouve au bout de la jetée et les visiteurs peuvent y monter le dimanche. " * 5
    kept = run("gopher_quality", french, "fr")
    assert isinstance(kept, Document) and kept.metadata == {"count:no stop words known for fr": 1}
    rules = {"fr": {"stop_words": ["le", "et", "de"]}}
    assert run("gopher_quality", french, "fr-CA", languages=rules) == Document("i", french, "fr-CA", "s")
    assert reason("gopher_quality", french, "fr", languages={"fr": {"stop_words": ["que", "qui"]}}) == "stop words"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("".join(f"line number {i} of them\nsame again\n" for i in range(20)), "repeated lines"),
        ("".join(f"line {i}\n{w}\n" for i, w in enumerate("abcdefgh")) + (ENGLISH.replace("\n", " ") + "\n") * 2,
         "characters in repeated lines"),
        ("\n\n".join(f"first {i} half\nsecond {i % 2} half" for i in (0, 1, 2, 0, 2, 0, 2)), "repeated lines"),
        ("buy now " * 30 + ENGLISH, "top 2-gram"),
        (JAPANESE + "今すぐ登録" * 60, "top 2-gram"),
        (ENGLISH + "".join(f"item {i}: see the full price list in our shop. " for i in range(7)), "repeated 5-grams"),
        (GERMAN + "".join(f"Artikel {i}: Sie finden die volle Preisliste bei uns im Laden. " for i in range(6)),
         "repeated 5-grams"),
    ],
)  # fmt: skip
def test_gopher_repetition(text: str, expected: str) -> None:
    assert reason("gopher_repetition", text) == expected


def test_ornaments_between_sections_are_no_repetition() -> None:
    text = "\n\n".join(f"{part}\n\n＊　＊　＊" for part in ENGLISH.split("\n\n"))
    assert reason("gopher_repetition", text) == "kept"


def test_a_repeated_run_counts_from_its_second_time_on() -> None:
    # one sentence of 52 letters among 208 others: said twice it covers 52 of 312 letters, said three times 104 of 364
    sentence = "exactly these eleven words stand here once more without any change "
    others = " ".join(f"w{i:03d}" for i in range(60))
    letters = len(sentence.replace(" ", ""))
    share = letters / (2 * letters + len(others.replace(" ", "")))
    for limit, expected in ((share * 1.01, "kept"), (share * 0.99, "repeated 5-grams")):
        limits = [limit] + [1.0] * 5
        assert reason("gopher_repetition", sentence + others + " " + sentence, repeated_grams=limits) == expected


@pytest.mark.parametrize(
    ("text", "options", "expected"),
    [
        ("Lorem ipsum dolor sit amet. A. B. C.", {}, "lorem ipsum"),
        ("One sentence. And two.", {}, "few sentences"),
        ("一つ目の文。二つ目の文。", {}, "few sentences"),
        ("int f() { return 1; } A. B. C.", {"braces": True}, "brace"),
        ("This is damn good. Yes. Yes.", {"bad_words": ["damn"]}, "bad word"),
        ("This is damnation. Yes. Yes.", {"bad_words": ["damn"]}, "kept"),
        ("これは禁句です。はい。はい。", {"bad_words": ["禁句"]}, "bad word"),
    ],
)
def test_c4_documents(text: str, options: dict, expected: str) -> None:
    assert reason("c4", text, **options) == expected


def test_c4_lines() -> None:
    notices = "Please enable JavaScript.\nRead our privacy policy.\nWir verwenden\nDatenschutzerklärung\n利用規約\n"
    kept = run("c4", notices + ENGLISH.replace("spring.", "spring.[12]"))
    assert isinstance(kept, Document) and kept.text == "Wir verwenden\n" + ENGLISH
    assert kept.metadata == {"count:citations": 1, "count:lines": 4}
    long = "JavaScript is a language of which this long line says so many things " + "and more " * 20 + "."
    assert reason("c4", long + " A. B.") == "kept" and run("c4", long + " A. B.").text.startswith("JavaScript")
    kept = run("c4", "Title\n" + ENGLISH + "x" * 1001 + " end.\n", final_mark=True, min_line_words=3)
    assert isinstance(kept, Document) and "Title" not in kept.text and "xxx" not in kept.text
    assert kept.text.startswith("\nnow on. ") and kept.text.endswith("last autumn.\n")
    assert "lighthouse every" not in kept.text


MENU = "Products\nPrices\nAbout us\nJobs\nPress\nContact\n"
WRAPPED = "\n".join(f"word number {i} stands in a line of seventy characters or nearly so, as" for i in range(30))


@pytest.mark.parametrize(
    ("text", "language", "options", "expected"),
    [
        (MENU, "en", {}, "lines without end"),
        ("製品\n価格\n会社\n採用\n連絡\n", "ja", {}, "lines without end"),
        ("Yes.\nNo.\nPerhaps.\n", "en", {}, "short lines"),
        ("はい。\nいいえ。\nたぶんそうです。\n", "ja", {}, "short lines"),
        ("一つ目の文はこれで終わりです。\n二つ目の文もここで終わります。\n", "ja", {}, "kept"),  # 15 characters
        ("一つ目の文はこれで終わりです。\n二つ目の文もここで終わります。\n", "en", {}, "short lines"),
        (ENGLISH + ENGLISH, "en", {}, "repeated lines"),
        (WRAPPED + " the end.", "en", {}, "kept"),
        (WRAPPED + " the end.", "en", {"unwrap": False}, "lines without end"),
        (WRAPPED, "en", {}, "lines without end"),
    ],
)
def test_fineweb(text: str, language: str, options: dict, expected: str) -> None:
    assert reason("fineweb", text, language, **options) == expected


def test_boilerplate() -> None:
    page = "Home » Menü | Log in\n".replace(" » Menü |", "\nMenü\n")
    page += (
        "ログイン\n>> Read more...\nWir verwenden Cookies, um Ihnen zu helfen.\n"
        + ENGLISH
        + "© 2024 ACME Inc. All rights reserved.\n"
    )
    kept = run("boilerplate", page)
    assert isinstance(kept, Document) and kept.text == ENGLISH and kept.metadata == {"count:lines": 7}
    assert reason("boilerplate", page.replace(ENGLISH, "A line.\n")) == "mostly boilerplate"
    prose = "We go home.\nThe menu was good.\nWeiter ging es nicht, sagte er.\n広告を出した。\nSo ging es\nweiter.\n"
    assert run("boilerplate", prose).text == prose
    assert run("boilerplate", ENGLISH + "*\n* Werbung\n").text == ENGLISH + "*\n"
    assert run("boilerplate", ENGLISH + "Buy 3 cheap\n", phrases=["buy .*"]).text == ENGLISH
    with pytest.raises(ConfigError, match=r"phrases: '\(' is no regular expression"):
        make_step({"kind": "boilerplate", "phrases": ["("]})


def test_every_kind_has_a_version_and_documented_options() -> None:
    for kind in set(step_kinds()) - {"score", "decontaminate"}:
        if ".steps." in step_kinds()[kind]:
            step = make_step({"kind": kind})
            assert step.name == kind and isinstance(step.version, int) and callable(step.apply)
            assert step == make_step({"kind": kind})
