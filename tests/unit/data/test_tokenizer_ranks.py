"""tiktoken's files of ranks: told by content, cut as their side file or the package says, control strings stay text."""

from __future__ import annotations

import base64
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from megafp8.core.errors import DataError
from megafp8.corpus.documents import Document
from megafp8.corpus.fertility import Fertility, lost_probes
from megafp8.data.tokenizer import load_tokenizer
from megafp8.data.tokenizer_engine import FastTokenizer, encode_documents, fast
from megafp8.data.tokenizer_pieces import byte_letters
from megafp8.data.tokenizer_ranks import TiktokenTokenizer, is_tiktoken, side_file

tiktoken = pytest.importorskip("tiktoken", reason="the package is optional")
TEXT = ["the quick brown fox jumps over the lazy dog", "Größe über alles", "日本語の文章"] * 20
HOSTILE = "a <|endoftext|> b <|fim_prefix|><|end"
SIDE = {"pattern": "cl100k_base", "special_tokens": {"<|endoftext|>": 400, "<|begin_of_text|>": 405}}


def ranks(path: Path, *, side: dict[str, Any] | None = SIDE) -> Path:
    """A file of ranks, out of a byte-level vocabulary that is trained here."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    pre = tokenizers.pre_tokenizers
    tokenizer.pre_tokenizer = pre.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=350, show_progress=False, initial_alphabet=pre.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    letters = byte_letters()
    pieces = sorted(tokenizer.get_vocab().items(), key=lambda one: one[1])
    data = b"".join(
        base64.b64encode(bytes(letters[c] for c in piece)) + f" {number}\n".encode() for piece, number in pieces
    )
    path.write_bytes(data)
    if side is not None:
        side_file(path).write_text(json.dumps(side))
    return path


def test_ids_are_the_packages(tmp_path: Path) -> None:
    loaded = load_tokenizer(ranks(tmp_path / "tokenizer.model"))  # as Llama 3 calls its own
    assert isinstance(loaded, TiktokenTokenizer) and loaded.kind == "tiktoken"
    assert (loaded.vocab_size, loaded.eod_id, loaded.bos_id) == (406, 400, 405)
    own = tiktoken.Encoding(
        "own", pat_str=loaded.pattern, mergeable_ranks=loaded.ranks, special_tokens=SIDE["special_tokens"]
    )
    for text in [*TEXT[:3], HOSTILE, "  x\n\n\ty 12345", "", "\0", "e\u0301", "\U0001f3f3\ufe0f\u200d\U0001f308"]:
        assert loaded.encode(text) == own.encode(text, disallowed_special=())
        assert loaded.decode([400, *loaded.encode(text), 405, 377]) == text, "control ids and gaps have no text"
        assert not {400, 405} & set(loaded.encode(text))
    assert load_tokenizer(tmp_path).fingerprint == loaded.fingerprint and lost_probes(loaded) == []


@pytest.mark.parametrize("pattern", ["cl100k_base", "r50k_base", "o200k_base"])
def test_faster_encoder(tmp_path: Path, pattern: str) -> None:
    pytest.importorskip("gigatoken")
    reference = load_tokenizer(ranks(tmp_path / "x.tiktoken", side={**SIDE, "pattern": pattern}))
    quick = fast(reference)
    assert isinstance(quick, FastTokenizer)
    texts = [*TEXT[:3], HOSTILE, "<|begin_of_text|>", "don't 12345\r\n\r\n  x", ""]
    ids, lengths = encode_documents(quick, texts)
    assert ids.tolist() == [i for text in texts for i in [*reference.encode(text), 400]] and len(lengths) == len(texts)


def test_a_pattern_of_ones_own_stays_with_the_reference(tmp_path: Path) -> None:
    reference = load_tokenizer(ranks(tmp_path / "x.tiktoken", side={**SIDE, "pattern": r"\s+|\S+"}))
    assert fast(reference) is reference and reference.decode(reference.encode("a  b\n")) == "a  b\n"
    other = load_tokenizer(ranks(tmp_path / "y.tiktoken"))
    assert other.fingerprint != reference.fingerprint, "the same ranks, cut in another way"


def test_figures(tmp_path: Path) -> None:
    found = Fertility(406)
    found.measure(load_tokenizer(ranks(tmp_path / "x.tiktoken")), [Document("a", "the fox \U00020bb7", "en", "")])
    assert found.total.lossy_documents == 0 and found.total.split_characters == 1 and found.total.byte_tokens >= 2


def test_known_files_are_told_by_their_checksum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import tiktoken_ext.openai_public as known

    path = ranks(tmp_path / "any name", side=None)
    with pytest.raises(DataError, match="does not know"):
        load_tokenizer(path)
    checksum = hashlib.sha256(path.read_bytes()).hexdigest()

    monkeypatch.setitem(known.ENCODING_CONSTRUCTORS, "new", constructor(checksum))
    loaded = load_tokenizer(path)
    assert isinstance(loaded, TiktokenTokenizer) and loaded.eod_id == 500 and loaded.scheme == "new"


def constructor(checksum: str) -> Any:
    """A function of globals only, as the package's are."""
    namespace: dict[str, Any] = {"load_tiktoken_bpe": None}
    source = (
        "def new():\n"
        f"    pieces = load_tiktoken_bpe('https://nowhere.invalid', expected_hash={checksum!r})\n"
        "    return {'name': 'new', 'pat_str': r'\\s+|\\S+', 'mergeable_ranks': pieces,\n"
        "            'special_tokens': {'<|endoftext|>': 500}}\n"
    )
    exec(source, namespace)
    return namespace["new"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda data: data.replace(b" 7\n", b" seven\n"), "not a line of ranks"),
        (lambda data: data.replace(b" 7\n", b" 8\n"), "same rank"),
        (lambda data: data[: len(data) // 4], "no rank for|not a line"),
    ],
)
def test_bad_files(tmp_path: Path, change: Any, words: str) -> None:
    path = ranks(tmp_path / "x.tiktoken")
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(DataError, match=words) as caught:
        load_tokenizer(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("side", "words"),
    [
        ("[]", "object with pattern"),
        ('{"pattern": "x"}', "object with pattern"),
        ('{"pattern": "(", "special_tokens": {"<|endoftext|>": 400}}', "cannot be used"),
        ('{"pattern": "cl100k_base", "special_tokens": {}}', "eos_token"),
        ('{"pattern": "cl100k_base", "special_tokens": {"<|endoftext|>": 3}}', "id of a piece"),
    ],
)
def test_bad_side_files(tmp_path: Path, side: str, words: str) -> None:
    path = ranks(tmp_path / "x.tiktoken")
    side_file(path).write_text(side)
    with pytest.raises(DataError, match=words) as caught:
        load_tokenizer(path)
    assert "\n" not in str(caught.value)


def test_what_is_one() -> None:
    assert is_tiktoken(b"IQ== 0\nIg== 1\n") and not is_tiktoken(b"\n\x05\n<unk>") and not is_tiktoken(b"")
