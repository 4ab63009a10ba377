"""What an id stands for: by kind of tokenizer, and with characters that are spread over several ids."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
import tokenizers

from megafp8.data.tokenizer import Tokenizer, load_tokenizer
from megafp8.data.tokenizer_pieces import BYTE, NO_TEXT, TEXT, UNKNOWN, pieces_of

KNOWN = "the quick brown fox jumps over the lazy dog"


def sentencepiece_model(path: Path, *, byte_fallback: bool) -> Tokenizer:
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([KNOWN] * 20), model_writer=out, model_type="bpe", unk_id=0, bos_id=1, eos_id=2,
        vocab_size=300 if byte_fallback else 40, byte_fallback=byte_fallback, normalization_rule_name="identity",
        character_coverage=1.0, pad_id=3, minloglevel=2,
    )  # fmt: skip
    (path / "t.model").write_bytes(out.getvalue())
    return load_tokenizer(path / "t.model")


def byte_level(path: Path) -> Tokenizer:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|endoftext|>"], show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    tokenizer.train_from_iterator([KNOWN] * 20 + ["ä"] * 20, trainer)
    tokenizer.add_tokens(["<tool>"])
    tokenizer.save(str(path / "tokenizer.json"))
    return load_tokenizer(path)


def counted(tokenizer: Tokenizer, text: str) -> tuple[list[int], int]:
    """(kinds of a text's ids, characters that have no piece of their own)."""
    pieces, ids = pieces_of(tokenizer), tokenizer.encode(text)
    return pieces.kinds[ids].tolist(), int(pieces.split[ids].sum())


def test_sentencepiece(tmp_path: Path) -> None:
    tokenizer = sentencepiece_model(tmp_path, byte_fallback=True)
    pieces = pieces_of(tokenizer)
    assert pieces.kinds[:4].tolist() == [UNKNOWN, NO_TEXT, NO_TEXT, NO_TEXT]
    assert np.count_nonzero(pieces.kinds == BYTE) == 256
    assert set(counted(tokenizer, KNOWN)[0]) == {TEXT} and counted(tokenizer, KNOWN)[1] == 0
    kinds, split = counted(tokenizer, "the 日\tdog")
    assert kinds.count(BYTE) == 4 and split == 2, "3 bytes of a kanji, and a tab that has no piece: 2 characters"


def test_without_fallback_unknown_is_counted(tmp_path: Path) -> None:
    kinds, split = counted(sentencepiece_model(tmp_path, byte_fallback=False), "the 日dog")
    assert kinds.count(UNKNOWN) == 1 and split == 1 and BYTE not in kinds


def test_byte_level(tmp_path: Path) -> None:
    tokenizer = byte_level(tmp_path)
    pieces = pieces_of(tokenizer)
    assert pieces.kinds[tokenizer.eod_id] == NO_TEXT and pieces.kinds[tokenizer.vocab_size - 1] == TEXT
    assert counted(tokenizer, KNOWN + "ä<tool>")[1] == 0, "ä was merged, plain letters are whole"
    kinds, split = counted(tokenizer, "日x")
    assert kinds == [BYTE, BYTE, BYTE, TEXT] and split == 1


@pytest.mark.parametrize("text", ["a", "äöü", "日本語 x\n", ""])
def test_bytes(text: str) -> None:
    kinds, split = counted(load_tokenizer("bytes"), text)
    assert split == sum(c > "\x7f" for c in text) and kinds.count(BYTE) == sum(b > 0x7F for b in text.encode())
