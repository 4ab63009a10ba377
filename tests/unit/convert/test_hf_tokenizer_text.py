"""tokenizer.json against the tokenizer it is made from, on 10,000 lines of English, German and Japanese text."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import sentencepiece
import tokenizers
import transformers
import zstandard

from megafp8.convert.hf_tokenizer import write_tokenizer
from megafp8.convert.verify_hf import _Ties
from megafp8.corpus.config import TokenizerConfig
from megafp8.corpus.train_tokenizer import Sentences, train
from megafp8.data.tokenizer import load_tokenizer

SHARED = Path(os.environ.get("MEGAFP8_SHARED_DATA", "../shared/data"))
FILES = ("bench-en-novels", "bench-de-novels", "bench-de-laws", "bench-ja-aozora", "bench-en-de-ja-techdocs")
LINES = 10_000
TRAINED_ON = 400  # documents of each file

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not all((SHARED / f"{name}.jsonl.zst").is_file() for name in FILES), reason="no ../shared/data"),
]


def documents(name: str) -> Iterator[str]:
    with zstandard.open(SHARED / f"{name}.jsonl.zst", "rt", encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)["text"]


@pytest.fixture(scope="module")
def texts() -> tuple[list[str], list[str]]:
    """What the tokenizers are trained on, and the lines, from documents spread over each file."""
    sample, lines = [], []
    for name in FILES:
        found = list(documents(name))
        step = max(1, len(found) // TRAINED_ON)
        sample += [text[:4000] for text in found[::step]]
        mine = [line for text in found[1 :: max(1, len(found) // 150)] for line in text.splitlines(keepends=True)]
        lines += mine[:: max(1, len(mine) * len(FILES) // LINES)][: LINES // len(FILES)]
    assert len(lines) >= 0.95 * LINES, len(lines)
    return sample, lines


def differing(path: Path, folder: Path, lines: list[str]) -> list[str]:
    folder.mkdir()
    write_tokenizer(path, folder, max_length=1 << 20)
    ours, theirs = load_tokenizer(path), transformers.AutoTokenizer.from_pretrained(folder)
    wanted = ours.encode_batch(lines)
    got = theirs(lines, add_special_tokens=False)["input_ids"]
    return [line for line, a, b in zip(lines, wanted, got, strict=True) if a != b]


@pytest.mark.parametrize("normalizing", [False, True])
@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_sentencepiece(tmp_path, texts, kind, normalizing):
    sample, lines = texts
    if normalizing:  # as others train theirs
        out = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(sample), model_writer=out, model_type=kind, vocab_size=8192, byte_fallback=True,
            max_sentence_length=100_000, minloglevel=2, num_threads=2, character_coverage=0.9995,
        )  # fmt: skip
        model = out.getvalue()
    else:
        model = train(Sentences(sample), TokenizerConfig(algorithm=kind, vocab_size=8192))
    (tmp_path / "t.model").write_bytes(model)
    found = differing(tmp_path / "t.model", tmp_path / "hf", lines)
    if kind == "unigram" and normalizing:  # scores on no grid: rounding decides among what is as likely
        ties = _Ties(tmp_path / "t.model")
        ours, theirs = load_tokenizer(tmp_path / "t.model"), transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
        assert len(found) < 20 and all(ties.hold(ours.encode(line), theirs(line)["input_ids"]) for line in found)
    else:
        assert found == []


def test_hugging_face(tmp_path, texts):
    sample, lines = texts
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=8192, initial_alphabet=alphabet, show_progress=False, special_tokens=["<|endoftext|>"]
    )
    made.train_from_iterator(sample, trainer)
    made.save(str(tmp_path / "tokenizer.json"))
    assert differing(tmp_path / "tokenizer.json", tmp_path / "hf", lines) == []
