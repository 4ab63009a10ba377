"""The faster encoder gives the reference's ids for every text, control strings too, or is not used."""

from __future__ import annotations

import io
import json
import logging
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
import tokenizers

from megafp8.corpus.config import SourceConfig
from megafp8.corpus.documents import Document, parse
from megafp8.corpus.readers import FileSource
from megafp8.data import tokenizer_engine
from megafp8.data.tokenizer import HuggingFaceTokenizer, SentencePieceTokenizer, Tokenizer, load_tokenizer
from megafp8.data.tokenizer_engine import EngineMismatchError, FastTokenizer, encode_documents, fast

pytest.importorskip("gigatoken", reason="the engine is optional")
NASTY = Path(__file__).parents[2] / "nasty"
FOX = "the quick brown fox jumps over the lazy dog"
TEXTS = [FOX, "Der schnelle braune Fuchs, ein faules Huhn", "いろはにほへと"] * 20
CONTROLS = ["<unk>", "<s>", "</s>", "<pad>", "<|endoftext|>", "<|im_start|>", "<0x41>", "<tool>"]


def sentencepiece_model(folder: Path, **options: Any) -> Path:
    out = io.BytesIO()
    settings = {"model_type": "bpe", "vocab_size": 350, "remove_extra_whitespaces": False, **options}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS), model_writer=out, byte_fallback=True, normalization_rule_name="identity",
        allow_whitespace_only_pieces=True, unk_id=0, bos_id=1, eos_id=2, pad_id=3, minloglevel=2, **settings,
    )  # fmt: skip
    (folder / "tokenizer.model").write_bytes(out.getvalue())
    return folder / "tokenizer.model"


def huggingface_json(folder: Path, *, regex: str = "") -> Path:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    pre = tokenizers.pre_tokenizers
    if regex:
        split = pre.Split(tokenizers.Regex(regex), "isolated")
        tokenizer.pre_tokenizer = pre.Sequence([split, pre.ByteLevel(add_prefix_space=False, use_regex=False)])
    else:
        tokenizer.pre_tokenizer = pre.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<|endoftext|>", "<|im_start|>"], show_progress=False,
        initial_alphabet=pre.ByteLevel.alphabet(),
    )  # fmt: skip
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.add_tokens(["<tool>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def with_symbols(folder: Path) -> Path:
    return sentencepiece_model(folder, user_defined_symbols=["<tool>", "::"])


@pytest.fixture(params=[sentencepiece_model, with_symbols, huggingface_json])
def reference(request: pytest.FixtureRequest, tmp_path: Path) -> Tokenizer:
    return load_tokenizer(request.param(tmp_path))


def assert_same(tokenizer: Tokenizer, reference: Tokenizer, texts: list[str]) -> None:
    ids, lengths = encode_documents(tokenizer, texts)
    expected = [[*reference.encode(text), reference.eod_id] for text in texts]
    assert lengths.tolist() == [len(one) for one in expected]
    assert ids.tolist() == [i for one in expected for i in one]
    assert tokenizer.encode_batch(texts) == [one[:-1] for one in expected]


def test_engine_is_used(reference: Tokenizer) -> None:
    tokenizer = fast(reference)
    assert isinstance(tokenizer, FastTokenizer) and "gigatoken" in tokenizer.engine_name
    assert tokenizer.fingerprint == reference.fingerprint and tokenizer.kind == reference.kind
    assert tokenizer.decode(tokenizer.encode("a b")) == "a b"


def test_control_strings_are_text(reference: Tokenizer) -> None:
    tokenizer = fast(reference)
    for control in CONTROLS:
        texts = [control, f"x{control}", f"the quick {control}{control} fox", "plain", f"\n{control}\n", control[:-1]]
        assert_same(tokenizer, reference, texts)
        ids = [i for one in tokenizer.encode_batch(texts) for i in one]
        assert reference.eod_id not in ids and reference.bos_id not in ids


def test_control_ids_never_pass_even_unguarded(reference: Tokenizer) -> None:
    """The second guard: what the first does not see is seen in the ids."""
    tokenizer = fast(reference)
    assert isinstance(tokenizer, FastTokenizer)
    tokenizer._guard = tokenizer_engine.re.compile(r"(?!)")
    assert_same(tokenizer, reference, ["plain", "a </s> b <|endoftext|>", "c <s> <pad>", "", "<|im_start|>"])


def test_random_texts(reference: Tokenizer) -> None:
    rng = random.Random(3)
    pieces = [*CONTROLS, "the ", "lazy", " ", "\n", "\0", "\u2581", "é", "e\u0301", "日本", "::", "1", "\U0001f600"]
    texts = ["".join(rng.choices(pieces, k=rng.randrange(12))) for _ in range(500)]
    assert_same(fast(reference), reference, texts)


def test_nothing_and_empty_texts(reference: Tokenizer) -> None:
    tokenizer = fast(reference)
    for texts in ([], [""], ["", "", ""], ["<s>"], ["a", "", "b"]):
        assert_same(tokenizer, reference, texts)


def test_nasty_texts(reference: Tokenizer) -> None:
    files = [str(path) for path in NASTY.iterdir() if ".json" in path.name and path.name != "MANIFEST.json"]
    config = SourceConfig(kind="jsonl", files=tuple(files))
    found = [parse(record, config) for record in FileSource(config).records()]
    texts = [one.text for one in found if isinstance(one, Document) and len(one.text) < 200_000]
    assert len(texts) > 60
    assert_same(fast(reference), reference, texts)


def test_unknown_models_stay_with_the_reference(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("megafp8").propagate = True
    unigram = load_tokenizer(sentencepiece_model(tmp_path, model_type="unigram", vocab_size=300))
    odd = load_tokenizer(huggingface_json(tmp_path, regex=r"[xyz]+|\s|[^xyz\s]+"))
    with caplog.at_level(logging.INFO):
        assert fast(unigram) is unigram and fast(odd) is odd and fast(load_tokenizer("bytes")).kind == "bytes"
    assert sum("encoding by the reference" in one for one in set(caplog.messages)) == 2 and "unigram" in caplog.text


class _Wrong:
    """An engine that is wrong for texts with a word in them, or dies of it."""

    def __init__(self, engine: Any, word: str, *, dies: bool = False) -> None:
        self.engine, self.word, self.dies = engine, word.encode(), dies

    def encode_batch(self, texts: list[bytes], *, parallel: bool) -> Any:
        if self.dies and any(self.word in text for text in texts):
            raise BaseException("panicked")  # as pyo3's PanicException
        return self.engine.encode_batch([text.replace(self.word, b"") for text in texts], parallel=parallel)


def _wrong(make: Callable[..., Any], word: str, **how: bool) -> Callable[..., Any]:
    return lambda data: _Wrong(make(data), word, **how)


@pytest.mark.parametrize("dies", [False, True])
def test_wrong_engine_is_found_at_the_start(
    reference: Tokenizer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, dies: bool
) -> None:
    import gigatoken

    logging.getLogger("megafp8").propagate = True
    for name in ("from_sentencepiece", "from_json"):
        monkeypatch.setattr(gigatoken.Tokenizer, name, _wrong(getattr(gigatoken.Tokenizer, name), "def f", dies=dies))
    with caplog.at_level(logging.WARNING):
        assert fast(reference) is reference
    assert "encoding by the reference" in caplog.text


def test_wrong_engine_is_found_on_the_way(reference: Tokenizer) -> None:
    tokenizer = fast(reference)
    assert isinstance(tokenizer, FastTokenizer)
    tokenizer._engine = _Wrong(tokenizer._engine, "zebra")
    texts = [f"{i} zebra" for i in range(2000)]  # none of 2,000 is checked with probability (255/256)^2000 = 4e-4
    with pytest.raises(EngineMismatchError, match="other ids"):
        tokenizer.encode_flat(texts)
    assert len(tokenizer.encode_flat(["no stripes"] * 2000)[1]) == 2000


def by_classes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Tokenizer:
    """A tokenizer that cuts as Llama 3's does, whose ids show whether "?_fox" was cut before or behind "_"."""
    monkeypatch.setattr(sys.modules[__name__], "TEXTS", [*TEXTS, *["_fox _fox"] * 20])
    words = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    return load_tokenizer(huggingface_json(folder, regex=rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|{words}"))


def test_letters_that_only_newer_versions_of_unicode_know(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reference = by_classes(tmp_path, monkeypatch)
    tokenizer = fast(reference)
    assert isinstance(tokenizer, FastTokenizer), "the probes hold such characters"
    texts = [f"{chr(code)}_fox" for code in (0x1C8A, 0xA7CB, 0xA7DA, 0x10D4A, 0x31350, 0x323B0, 0x324BF)]
    assert_same(tokenizer, reference, texts)
    monkeypatch.setattr(tokenizer_engine, "is_unsettled", lambda data: False)
    with pytest.raises(EngineMismatchError):
        tokenizer.prove(texts)


@pytest.mark.slow
def test_every_character_of_unicode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reference = by_classes(tmp_path, monkeypatch)
    tokenizer = fast(reference)
    assert isinstance(tokenizer, FastTokenizer)
    codes = [code for code in [*range(0x40000), *range(0xE0000, 0xE0200)] if not 0xD800 <= code < 0xE000]
    tokenizer.prove([f"fox{chr(code)}_fox 1{chr(code)}2" for code in codes])


def test_the_engine_forgets(reference: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """It keeps each word that it has met for ever, gigabytes of a long run."""
    monkeypatch.setattr(tokenizer_engine, "_RENEWED_EVERY", 1000)
    tokenizer = fast(reference)
    assert isinstance(tokenizer, FastTokenizer)
    engines, texts = [], [f"w{i} " * 20 for i in range(20)]
    for number, text in enumerate(texts):
        assert tokenizer.encode_flat([text])[0].tolist() == reference.encode(text), number
        if tokenizer._engine not in engines:  # kept, so that a new one is not taken for an old one
            engines.append(tokenizer._engine)
    assert 2 <= len(engines) <= 1 + sum(map(len, texts)) // 1000


def test_truncation_in_a_file_cuts_nothing(tmp_path: Path) -> None:
    path = huggingface_json(tmp_path)
    definition = json.loads(path.read_text())
    definition["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    definition["padding"] = {
        "strategy": {"Fixed": 8}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0,
        "pad_token": "<|endoftext|>",
    }  # fmt: skip
    path.write_text(json.dumps(definition))
    reference = load_tokenizer(path)
    assert reference.decode(reference.encode("x" * 50)) == "x" * 50
    assert len(reference.encode("x")) == 1
    assert_same(fast(reference), reference, ["x" * 50, "x"])


def test_without_the_package(reference: Tokenizer) -> None:
    """A machine without the engine: the reference, and one line that says so."""
    assert isinstance(reference, (SentencePieceTokenizer, HuggingFaceTokenizer))
    code = (
        "import sys; sys.modules['gigatoken'] = None\n"
        "from megafp8.core.log import set_up; set_up()\n"
        "from megafp8.data.tokenizer import ByteTokenizer, HuggingFaceTokenizer\n"
        "from megafp8.data.tokenizer_engine import fast\n"
        "class Any(HuggingFaceTokenizer):\n"
        "    def __init__(self): pass\n"
        "one = Any()\n"
        "assert fast(one) is one\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "gigatoken is not installed" in run.stderr


def test_ids_are_whole_numbers(reference: Tokenizer) -> None:
    ids, lengths = encode_documents(fast(reference), ["the quick", "", "fox"])
    assert np.issubdtype(ids.dtype, np.integer) and lengths.dtype == np.int64 and lengths.sum() == len(ids)
