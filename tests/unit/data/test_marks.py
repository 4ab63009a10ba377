"""Begin and end ids: as asked, never twice, the same in the corpus, in training and before a prompt."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
import tokenizers

from megafp8.core.errors import DataError
from megafp8.data.indexed import IndexedDataset
from megafp8.data.indexed_writer import IndexedDatasetWriter
from megafp8.data.marks import ENDS_ONLY, Marks
from megafp8.data.sources import check_marks
from megafp8.data.tokenizer import Tokenizer, identity, load_tokenizer
from megafp8.data.tokenizer_engine import encode_documents, fast
from megafp8.data.verify import problems
from megafp8.infer.sources import text_tokens
from megafp8.infer.weights import Loaded

FOX = "the quick brown fox jumps over the lazy dog"
POLICIES = [Marks(False, True), Marks(True, True), Marks(True, False)]


def sentencepiece_model(path: Path) -> Path:
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([FOX] * 20), model_prefix=str(path / "t"), model_type="bpe", vocab_size=300, pad_id=3,
        byte_fallback=True, normalization_rule_name="identity", unk_id=0, bos_id=1, eos_id=2, minloglevel=2,
    )  # fmt: skip
    return path / "t.model"


def byte_level(path: Path, *, adds_its_own: bool) -> Path:
    """A tokenizer.json with a begin id; `adds_its_own`: with a rule that puts both ids around a text, as Llama 3."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|end_of_text|>", "<|begin_of_text|>"], show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    tokenizer.train_from_iterator([FOX] * 20, trainer)
    if adds_its_own:
        tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
            single="<|begin_of_text|> $A <|end_of_text|>",
            special_tokens=[("<|begin_of_text|>", 1), ("<|end_of_text|>", 0)],
        )
    tokenizer.save(str(path / "tokenizer.json"))
    return path / "tokenizer.json"


@pytest.fixture(params=["sentencepiece", "plain", "adds its own", "bytes"])
def tokenizer(request: pytest.FixtureRequest, tmp_path: Path) -> Tokenizer:
    if request.param == "bytes":
        return load_tokenizer("bytes")
    if request.param == "sentencepiece":
        return fast(load_tokenizer(sentencepiece_model(tmp_path)))
    return fast(load_tokenizer(byte_level(tmp_path, adds_its_own=request.param == "adds its own")))


@pytest.mark.parametrize("marks", POLICIES, ids=str)
def test_first_and_last_ids_are_as_asked(tokenizer: Tokenizer, marks: Marks) -> None:
    texts = [FOX, "", "<s>x</s>", "<|begin_of_text|>", "日本"]
    ids, lengths = encode_documents(tokenizer, texts, marks)
    for text, one in zip(texts, np.split(ids, np.cumsum(lengths)[:-1])):
        expected = [*marks.before(tokenizer), *tokenizer.encode(text), *marks.after(tokenizer)]
        assert one.tolist() == expected
        assert one.tolist().count(tokenizer.bos_id) == marks.add_bos
        assert one.tolist().count(tokenizer.eod_id) == marks.append_eos
    assert marks.context(tokenizer) == (tokenizer.bos_id if marks.add_bos else tokenizer.eod_id)


def test_record_and_words() -> None:
    for marks in POLICIES:
        assert Marks.of(json.loads(json.dumps(marks.to_json()))) == marks
    assert Marks.of({}) == ENDS_ONLY and str(Marks(True, True)) == "begin id, text, end id"


@pytest.mark.parametrize("marks", POLICIES, ids=str)
def test_a_prompt_begins_as_a_document(tokenizer: Tokenizer, tmp_path: Path, marks: Marks) -> None:
    """The corpus, a prompt, and a text that is scored: the same ids, behind the id that training saw there."""
    document = encode_documents(tokenizer, [FOX], marks)[0].tolist()
    loaded = Loaded(tmp_path, None, None, tokenizer, 8, marks)  # type: ignore[arg-type]
    assert document[: len(document) - marks.append_eos] == loaded.prompt_ids(FOX)
    assert loaded.prompt_ids("") == [marks.context(tokenizer)]
    (tmp_path / "text").write_text(FOX)
    scored, size = text_tokens(tmp_path / "text", tokenizer, marks=marks)
    assert scored.tolist() == [marks.context(tokenizer), *tokenizer.encode(FOX)] and size == len(FOX)


def test_tokenizer_that_cannot_follow(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(byte_level(tmp_path, adds_its_own=False))
    Marks(True, True).check(tokenizer, "x")
    tokenizer.bos_id = tokenizer.eod_id
    with pytest.raises(DataError, match="twice"):
        Marks(True, True).check(tokenizer, "x")
    tokenizer.bos_id = -1
    with pytest.raises(DataError, match="no begin id"):
        Marks(True, False).check(tokenizer, "x")
    Marks(False, True).check(tokenizer, "x")


def written(prefix: Path, marks: Marks, *, damaged: bool = False) -> IndexedDataset:
    tokenizer = load_tokenizer("bytes")
    record = {"tokenizer": identity(tokenizer) | marks.to_json()}
    with IndexedDatasetWriter(prefix, np.dtype("<u2"), metadata=record) as writer:
        for _ in range(3):
            ids, lengths = encode_documents(tokenizer, [FOX], ENDS_ONLY if damaged else marks)
            writer.add_documents(ids.astype("<u2"), lengths)
    return IndexedDataset(prefix)


@pytest.mark.parametrize("marks", POLICIES, ids=str)
def test_verify_knows_the_policy(tmp_path: Path, marks: Marks) -> None:
    assert problems(written(tmp_path / "a", marks)) == []
    found = problems(written(tmp_path / "b", marks, damaged=True))
    assert bool(found) == marks.add_bos and all("begin ids in 3 documents" in one for one in found)


def test_datasets_of_different_policies_are_refused(tmp_path: Path) -> None:
    one, other = written(tmp_path / "a", Marks(True, True)), written(tmp_path / "b", ENDS_ONLY)
    assert check_marks([one, one]) == Marks(True, True) and check_marks([]) == ENDS_ONLY
    with pytest.raises(DataError, match="begin id, text, end id") as caught:
        check_marks([one, other])
    assert str(other.path_prefix) in str(caught.value)
