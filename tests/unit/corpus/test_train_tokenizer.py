"""Training a tokenizer: reproducible, keeps the text, takes a bounded sample, and says what is too little."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from sentencepiece.sentencepiece_model_pb2 import ModelProto

from megafp8.core.errors import DataError
from megafp8.corpus.config import SourceConfig, TokenizerConfig
from megafp8.corpus.documents import Bad, Document
from megafp8.corpus.round_scores import GRID, round_scores
from megafp8.corpus.run import preprocess
from megafp8.corpus.stdlib_docs import StdlibSource
from megafp8.corpus.train_tokenizer import Sentences, draw_sample, train
from megafp8.data.tokenizer import CONTROL, SentencePieceTokenizer


@pytest.fixture(scope="module")
def prose() -> list[str]:
    from pydoc_data.topics import topics

    return [topics[name] for name in sorted(topics)]


@pytest.fixture
def load(tmp_path: Path) -> Callable[[bytes], SentencePieceTokenizer]:
    def loaded(data: bytes) -> SentencePieceTokenizer:
        (tmp_path / "t.model").write_bytes(data)
        return SentencePieceTokenizer(tmp_path / "t.model")

    return loaded


@pytest.mark.parametrize("algorithm", ["bpe", "unigram"])
def test_reproducible_and_faithful(prose: list[str], load: Callable, algorithm: str) -> None:
    config = TokenizerConfig(vocab_size=1000, algorithm=algorithm, train_bytes=100_000)  # type: ignore[arg-type]
    texts = prose[:20]
    data = train(Sentences(texts), config)
    assert train(Sentences(texts), config) == data
    tokenizer = load(data)
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eod_id) == (1000, 1, 2)
    for text in [
        *texts[:3],
        "\tif x:\n\n        y  =  'é日本🎉'\r\n",
        " leading",
        "trailing \n",
        CONTROL[2] * 2,
        "e\u0301 ﬁ",
    ]:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.eod_id not in tokenizer.encode("</s><s><unk><pad>")


def test_unigram_scores_add_up_exactly(prose: list[str]) -> None:
    """In fp32 as in fp64, so that every program that reads the model segments alike."""
    data = train(Sentences(prose[:20]), TokenizerConfig(vocab_size=1000, algorithm="unigram", train_bytes=100_000))
    model = ModelProto.FromString(data)
    scores = [piece.score for piece in model.pieces]
    assert all(score / GRID == int(score / GRID) for score in scores) and len(set(scores)) > 100
    assert round_scores(data) == data
    for piece in model.pieces:
        piece.score += GRID / 3
    assert round_scores(model.SerializeToString()) == data  # nothing else is touched


def test_white_space_has_pieces(prose: list[str], load: Callable) -> None:
    tokenizer = load(train(Sentences(prose), TokenizerConfig(vocab_size=2000)))
    assert len(tokenizer.encode("\n")) <= 2 and len(tokenizer.encode("\n\n")) <= 2
    assert len(tokenizer.encode(" " * 9)) <= 3


def test_control_ids(prose: list[str], load: Callable) -> None:
    tokenizer = load(train(Sentences(prose), TokenizerConfig(vocab_size=500)))
    assert [tokenizer.model.id_to_piece(i) for i in range(4)] == list(CONTROL)


@pytest.mark.parametrize("algorithm", ["bpe", "unigram"])
def test_too_little_text_names_the_largest_vocabulary_that_works(prose: list[str], algorithm: str) -> None:
    config = TokenizerConfig(vocab_size=50_000, algorithm=algorithm)  # type: ignore[arg-type]
    with pytest.raises(DataError, match="too large for this text") as caught:
        train(Sentences(prose[:10]), config)
    largest = int(re.findall(r"largest that works is (\d+)", str(caught.value))[0])
    train(Sentences(prose[:10]), TokenizerConfig(vocab_size=largest, algorithm=algorithm))  # type: ignore[arg-type]


def test_too_many_characters_name_the_least_vocabulary(prose: list[str]) -> None:
    wide = ["".join(chr(0x4E00 + i) for i in range(1000))]
    with pytest.raises(DataError, match="give at least 1") as caught:
        train(Sentences(wide), TokenizerConfig(vocab_size=300, character_coverage=1.0))
    assert "character_coverage" in str(caught.value)


@pytest.mark.parametrize("texts", [[], [""], ["\0"]])
def test_nothing_to_train_on(texts: list[str]) -> None:
    with pytest.raises(DataError):
        train(Sentences(texts), TokenizerConfig(vocab_size=300))


def documents(count: int) -> list[Document]:
    return [Document(str(i), f"{i:04d} " * 20, "", "") for i in range(count)]


def test_sample_does_not_depend_on_order_and_keeps_to_its_budget() -> None:
    forward = draw_sample(documents(500), budgets={"*": 5000}, seed=1)
    backward = draw_sample(documents(500)[::-1], budgets={"*": 5000}, seed=1)
    assert forward == backward and forward.num_documents == 500 and forward.num_bytes == 50_000
    assert sum(len(t) for t in forward.texts) == 5000
    assert draw_sample(documents(500), budgets={"*": 5000}, seed=2).texts != forward.texts
    assert len(draw_sample(documents(3), budgets={"*": 1}, seed=1).texts) == 1
    assert len(draw_sample(documents(500), budgets={"*": 10**9}, seed=1).texts) == 500


def test_sentences_join_to_the_text() -> None:
    texts = ["a\n" * 30_000, "b" * 50_000, "", "short"]
    pieces = list(Sentences(texts))
    assert "".join(pieces) == "".join(texts) and max(map(len, pieces)) <= 16_384
    assert all(piece.endswith("\n") for piece in pieces[:4])


def test_stdlib_source() -> None:
    """About 4,450 documents and 2 MB of prose on CPython 3.10 to 3.13; a slice takes whole files and their place."""
    source = StdlibSource(SourceConfig(kind="python_stdlib", source_bytes=300_000))
    records = list(source.records())
    assert records == list(source.records())
    found = [r.data for r in records if isinstance(r.data, Document)]
    assert not [r for r in records if isinstance(r.data, (Bad, bytes))]
    names = [d.id for d in found]
    assert "stdlib/posixpath.join" not in names or len(found) > 3000
    assert 3000 < len(found) < 6000
    code = [d for d in found if d.source == "python-stdlib/source"]
    assert 200_000 < sum(len(d.text.encode()) for d in code) <= 300_000
    assert {d.id.removeprefix("stdlib/source/") for d in code} == {source._name(p) for p in source.source_slice}
    taken = {d.id.removeprefix("stdlib/source/").removesuffix(".py").replace("/", ".") for d in code}
    assert not any(name.removeprefix("stdlib/") in taken for name in names)
    assert sum(name.startswith("stdlib/help/") for name in names) > 70
    assert not any("site-packages" in f.path or "/test/" in f.path for f in source.files)
    assert set(source.checksums) == {f.path for f in source.files}
    assert source.position == sum(f.num_bytes for f in source.files)


def test_nothing_is_left_out_of_training(load: Callable) -> None:
    """The trainer by itself skips sentences that hold U+2585, and lines that are too long."""
    texts = ["zebra\u2585 zebra zebra zebra"] * 50 + ["quagga " * 3000] + [" okapi" * 50 + "x" * 200_000]
    sentences = Sentences(texts)
    tokenizer = load(train(sentences, TokenizerConfig(vocab_size=318, character_coverage=1.0)))
    pieces = {tokenizer.model.id_to_piece(i).strip("\u2581") for i in range(tokenizer.vocab_size)}
    assert {"zebra", "quagga", "okapi"} <= pieces
    assert sentences.num_replaced == 50 and sentences.num_cuts == 21_000 // 16_384 + 200_300 // 16_384


def test_options_of_training(prose: list[str], load: Callable) -> None:
    text = ["v1.23 costs 4567 tokens, 日本go and 日本go"] * 50 + prose[:5]
    usual = load(train(Sentences(text), TokenizerConfig(vocab_size=600)))
    other = load(
        train(
            Sentences(text),
            TokenizerConfig(
                vocab_size=600, split_digits=False, split_scripts=False, split_words=False, max_piece_length=40,
                symbols=("<tool>", "\t"), control_symbols=("<|im_start|>",),
            ),
        )
    )  # fmt: skip
    assert len(usual.encode("4567")) >= 4 > len(other.encode("4567"))
    assert max(len(other.model.id_to_piece(i)) for i in range(600)) > 16
    assert any("go" in p and "日本" in p for p in (other.model.id_to_piece(i) for i in range(600)))
    spelled = other.encode("<tool>\t<|im_start|>")
    assert [other.model.id_to_piece(i) for i in spelled][1:3] == ["<tool>", "\t"]
    assert other.model.piece_to_id("<|im_start|>") not in spelled and other.model.is_control(4)
    assert other.decode(spelled) == "<tool>\t<|im_start|>"
    without = load(train(Sentences(text), TokenizerConfig(vocab_size=300, byte_fallback=False)))
    assert without.model.unk_id() in without.encode("\u16a0")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"symbols": ("</s>",)}, "control piece"),
        ({"symbols": ("a", "a")}, "stands twice"),
        ({"symbols": ("a",), "control_symbols": ("a",)}, "stands twice"),
        ({"symbols": ("\u2581",)}, "keeps for itself"),
        ({"symbols": tuple(map(str, range(10))), "vocab_size": 265}, "no room"),
        ({"language_weights": {"en": 0.0}}, "above 0"),
        ({"append_eos": False}, "run together"),
    ],
)
def test_options_that_make_no_sense(values: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        TokenizerConfig(**values)


def test_sample_by_language() -> None:
    mixed = [Document(str(i), f"{i:04d} " * 20, ("en", "en", "en", "de", "fr")[i % 5], "") for i in range(500)]
    found = draw_sample(mixed, budgets={"en": 2000, "de": 2000}, seed=1)
    assert found == draw_sample(mixed[::-1], budgets={"en": 2000, "de": 2000}, seed=1)
    assert found.group_bytes == {"en": 2000, "de": 2000} and len(found.texts) == 40
    assert not any(int(text[:4]) % 5 == 4 for text in found.texts)
    others = draw_sample(mixed, budgets={"de": 1000, "*": 3000}, seed=1)
    assert others.group_bytes == {"de": 1000, "*": 3000} and any(int(text[:4]) % 5 == 4 for text in others.texts)


def test_run_with_language_weights(config: Callable, text: Path, tmp_path: Path) -> None:
    """A rare language gets its share, in two passes; what has no weight is told; what is not there is refused."""
    lines = [f'{{"text": "rare words {i} of a rare tongue, {i * i}", "lang": "ja"}}\n' for i in range(60)]
    (text / "part-2.jsonl").write_text("".join(lines))
    weights = {"ja": 1.0, "en": 1.0}
    preprocess(config(tokenizer={"language_weights": weights, "train_bytes": 3000}))
    info = json.loads((tmp_path / "out" / "tokenizer_info.json").read_text())
    got = info["sample_languages"]
    assert got.keys() == weights.keys() and all(0.8 * 1500 < size <= 1500 for size in got.values())
    assert info["left_out"]["de"] > 200 and info["sample_cuts"] == info["sample_replaced"] == 0
    with pytest.raises(DataError, match=r"names 'jp', but .*'de', 'en', 'ja'"):
        preprocess(config("other", tokenizer={"language_weights": {"jp": 1, "*": 1, "en": 1, "de": 1, "ja": 1}}))
