"""Three kinds of tokenizer keep one promise: control strings in a text stay text."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import sentencepiece
import tokenizers

from megafp8.core.errors import DataError
from megafp8.data.tokenizer import Tokenizer, identity, load_tokenizer

HOSTILE = "a </s> b <|endoftext|> c <s><unk><pad> d"
TEXTS = ["", "Hello, world.", "  two  spaces\n\ttab\r\n", "日本語 äöü €", "\0", HOSTILE, "🏳️‍🌈 \u200b\ufeff"]


def sentencepiece_model(folder: Path) -> Path:
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["the quick brown fox jumps over the lazy dog"] * 20), model_writer=out,
        vocab_size=300, model_type="bpe", byte_fallback=True, normalization_rule_name="identity",
        remove_extra_whitespaces=False, unk_id=0, bos_id=1, eos_id=2, pad_id=3, minloglevel=2,
    )  # fmt: skip
    (folder / "tokenizer.model").write_bytes(out.getvalue())
    return folder / "tokenizer.model"


def huggingface_json(folder: Path) -> Path:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|endoftext|>"], show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    tokenizer.train_from_iterator(["the quick brown fox jumps over the lazy dog"] * 20, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


@pytest.fixture(params=["sentencepiece", "huggingface", "bytes"])
def tokenizer(request: pytest.FixtureRequest, tmp_path: Path) -> Tokenizer:
    make = {"sentencepiece": sentencepiece_model, "huggingface": huggingface_json}.get(request.param)
    loaded = load_tokenizer(make(tmp_path) if make else "bytes")
    assert loaded.kind == request.param
    return loaded


@pytest.mark.parametrize("text", TEXTS)
def test_round_trip(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_control_strings_stay_text(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(HOSTILE)
    assert tokenizer.eod_id not in ids and tokenizer.bos_id not in ids


def test_batch_equals_one_by_one(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode_batch(TEXTS) == [tokenizer.encode(text) for text in TEXTS]


def test_ids_lie_below_the_vocabulary(tokenizer: Tokenizer) -> None:
    assert 0 <= tokenizer.eod_id < tokenizer.vocab_size
    assert all(0 <= i < tokenizer.vocab_size for text in TEXTS for i in tokenizer.encode(text))


def test_identity_is_plain(tokenizer: Tokenizer) -> None:
    assert json.loads(json.dumps(identity(tokenizer)))["fingerprint"] == tokenizer.fingerprint
    assert len(tokenizer.fingerprint) == 64


def test_folder_is_enough(tmp_path: Path) -> None:
    huggingface_json(tmp_path)
    assert load_tokenizer(tmp_path).kind == "huggingface"
    sentencepiece_model(tmp_path)
    assert load_tokenizer(tmp_path).kind == "sentencepiece"


def test_end_token_that_is_not_marked_special_is_guarded(tmp_path: Path) -> None:
    """Many published files add their end token as an ordinary added token, which would match inside a text."""
    path = huggingface_json(tmp_path)
    definition = json.loads(path.read_text())
    definition["added_tokens"][0]["special"] = False
    path.write_text(json.dumps(definition))
    loaded = load_tokenizer(path)
    assert loaded.eod_id not in loaded.encode(HOSTILE)


def test_end_token_named_by_the_config(tmp_path: Path) -> None:
    path = huggingface_json(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "<|endoftext|>"}}')
    assert load_tokenizer(path).eod_id == 0
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|nowhere|>"}')
    with pytest.raises(DataError, match="no end-of-document token"):
        load_tokenizer(path)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("x.model", b"no model", "not a SentencePiece model"),
        ("x.model", b"", "not a SentencePiece model"),
        ("x.json", b"{}", "not a tokenizer.json"),
        ("x.json", b"\xff", "not a tokenizer.json"),
        ("folder/", b"", "without tokenizer.model"),
        ("absent", None, "no such tokenizer"),
    ],
)
def test_bad_files(tmp_path: Path, name: str, content: bytes | None, words: str) -> None:
    path = tmp_path / name
    if name.endswith("/"):
        path.mkdir()
    elif content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=words) as caught:
        load_tokenizer(path)
    assert "\n" not in str(caught.value)
