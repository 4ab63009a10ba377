"""Three kinds of tokenizer keep one promise: control strings in a text stay text."""

from __future__ import annotations

import base64
import io
import json
import random
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


def tiktoken_ranks(folder: Path) -> Path:
    """The bytes alone, and two merges."""
    pieces = [bytes([byte]) for byte in range(256)] + [b"th", b"the"]
    lines = [base64.b64encode(piece) + f" {rank}\n".encode() for rank, piece in enumerate(pieces)]
    (folder / "tokenizer.tiktoken").write_bytes(b"".join(lines))
    side = {"pattern": "cl100k_base", "special_tokens": {"<|endoftext|>": 260}}
    (folder / "tokenizer.tiktoken.json").write_text(json.dumps(side))
    return folder / "tokenizer.tiktoken"


MAKERS = {"sentencepiece": sentencepiece_model, "huggingface": huggingface_json, "tiktoken": tiktoken_ranks}


@pytest.fixture(params=[*MAKERS, "bytes"])
def tokenizer(request: pytest.FixtureRequest, tmp_path: Path) -> Tokenizer:
    make = MAKERS.get(request.param)
    loaded = load_tokenizer(make(tmp_path) if make else "bytes")
    assert loaded.kind == request.param
    return loaded


@pytest.mark.parametrize("text", TEXTS)
def test_round_trip(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_every_byte_and_random_characters_come_back(tokenizer: Tokenizer) -> None:
    """Each byte that UTF-8 knows, characters of all planes; ids that are cut within a character lose only that one."""
    rng = random.Random(5)
    planes = ((1, 0x80), (0x80, 0x800), (0x800, 0xD800), (0xE000, 0x10000), (0x10000, 0x110000))
    texts = ["".join(chr(rng.randrange(*planes[i % 5])) for _ in range(30)) for i in range(300)]
    texts = [text.replace("\u2581", "") for text in [*texts, "\0"]]  # SentencePiece's own space
    assert len({byte for text in texts for byte in text.encode()}) == 243  # UTF-8 has no c0, c1, f5 to ff
    for text in texts:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text and "\ufffd" not in text
        assert text.startswith(tokenizer.decode(ids[: len(ids) // 2]).rstrip("\ufffd"))


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
