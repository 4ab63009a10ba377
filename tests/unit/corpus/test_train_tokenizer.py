"""Training a tokenizer: reproducible, keeps the text, takes a bounded sample, and says what is too little."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from megafp8.core.errors import DataError
from megafp8.corpus.config import SourceConfig, TokenizerConfig
from megafp8.corpus.documents import Bad, Document
from megafp8.corpus.stdlib_docs import StdlibSource
from megafp8.corpus.train_tokenizer import draw_sample, sentences, train
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
    data = train(texts, config)
    assert train(texts, config) == data
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


def test_white_space_has_pieces(prose: list[str], load: Callable) -> None:
    tokenizer = load(train(prose, TokenizerConfig(vocab_size=2000)))
    assert len(tokenizer.encode("\n")) <= 2 and len(tokenizer.encode("\n\n")) <= 2
    assert len(tokenizer.encode(" " * 9)) <= 3


def test_control_ids(prose: list[str], load: Callable) -> None:
    tokenizer = load(train(prose, TokenizerConfig(vocab_size=500)))
    assert [tokenizer.model.id_to_piece(i) for i in range(4)] == list(CONTROL)


@pytest.mark.parametrize("algorithm", ["bpe", "unigram"])
def test_too_little_text_names_the_largest_vocabulary_that_works(prose: list[str], algorithm: str) -> None:
    config = TokenizerConfig(vocab_size=50_000, algorithm=algorithm)  # type: ignore[arg-type]
    with pytest.raises(DataError, match="too large for this text") as caught:
        train(prose[:10], config)
    largest = int(re.findall(r"largest that works is (\d+)", str(caught.value))[0])
    train(prose[:10], TokenizerConfig(vocab_size=largest, algorithm=algorithm))  # type: ignore[arg-type]


def test_too_many_characters_name_the_least_vocabulary(prose: list[str]) -> None:
    wide = ["".join(chr(0x4E00 + i) for i in range(1000))]
    with pytest.raises(DataError, match="give at least 1") as caught:
        train(wide, TokenizerConfig(vocab_size=300, character_coverage=1.0))
    assert "character_coverage" in str(caught.value)


@pytest.mark.parametrize("texts", [[], [""], ["\0"]])
def test_nothing_to_train_on(texts: list[str]) -> None:
    with pytest.raises(DataError):
        train(texts, TokenizerConfig(vocab_size=300))


def documents(count: int) -> list[Document]:
    return [Document(str(i), f"{i:04d} " * 20, "", "") for i in range(count)]


def test_sample_does_not_depend_on_order_and_keeps_to_its_budget() -> None:
    forward = draw_sample(documents(500), max_bytes=5000, seed=1)
    backward = draw_sample(documents(500)[::-1], max_bytes=5000, seed=1)
    assert forward == backward and forward.num_documents == 500 and forward.num_bytes == 50_000
    assert sum(len(t) for t in forward.texts) == 5000
    assert draw_sample(documents(500), max_bytes=5000, seed=2).texts != forward.texts
    assert len(draw_sample(documents(3), max_bytes=1, seed=1).texts) == 1
    assert len(draw_sample(documents(500), max_bytes=10**9, seed=1).texts) == 500


def test_sentences_join_to_the_text() -> None:
    texts = ["a\n" * 30_000, "b" * 50_000, "", "short"]
    pieces = list(sentences(texts))
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
