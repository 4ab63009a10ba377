"""Does text come back, and what does a tokenizer cost each language: figures, and a run that a lossy one stops."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers

from megafp8.cli.main import main
from megafp8.core.config import dump_toml
from megafp8.core.errors import DataError
from megafp8.core.jsonio import sealed, write_json
from megafp8.corpus.documents import Document
from megafp8.corpus.fertility import Fertility, lost, lost_probes
from megafp8.corpus.run import preprocess
from megafp8.data.tokenizer import load_tokenizer


def lossy_json(path: Path, normalizer: object) -> Path:
    """A byte-level tokenizer behind a normalizer; the letters are bytes, none is merged."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        special_tokens=["<|endoftext|>"], initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        vocab_size=258, show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator(["a"], trainer)
    path.mkdir(exist_ok=True)
    tokenizer.save(str(path / "tokenizer.json"))
    return path


def test_figures_of_bytes() -> None:
    found = Fertility(260)
    texts = {"en": "two words", "ja": "日本", "de": "Größe"}
    found.measure(load_tokenizer("bytes"), [Document(k, text, k, "") for k, text in texts.items()])
    again = Fertility()
    again.add_json(json.loads(json.dumps(found.to_json())))
    figures = again.figures()
    assert figures == found.figures() and figures["first_loss"] == ""
    english, japanese = figures["languages"]["en"], figures["languages"]["ja"]
    assert (english["tokens"], english["words"], english["tokens_per_byte"]) == (9, 2, 1.0)
    assert english["tokens_per_word"] == 4.5 and english["covered_share"] == 1.0
    assert japanese["tokens_per_character"] == 3.0 and japanese["covered_share"] == 0.0
    assert japanese["byte_token_share"] == 1.0 and figures["languages"]["de"]["covered_share"] == 0.6
    assert figures["all"]["documents"] == 3 and figures["all"]["lossy_documents"] == 0
    assert found.used.sum() == len({b for text in texts.values() for b in text.encode()})


def test_what_is_lost_is_named(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(lossy_json(tmp_path, tokenizers.normalizers.NFC()))
    text = "plain cafe\u0301"
    assert lost(tokenizer, "plain", tokenizer.encode("plain")) == ""
    assert lost(tokenizer, text, tokenizer.encode(text)).startswith("at character 9: ")
    assert lost_probes(tokenizer) == ["decomposed accents"] and lost_probes(load_tokenizer("bytes")) == []


def test_visible_space_of_sentencepiece_is_no_loss(config: Callable, text: Path, tmp_path: Path) -> None:
    (text / "part-0.jsonl").write_text((text / "part-0.jsonl").read_text() + '{"text": "a \\u2581 b"}\n' * 30)
    report = preprocess(config()).manifest["tokenizer_report"]
    assert report["all"]["lossy_documents"] == 0 and set(report["languages"]) == {"", "de", "en"}
    assert 1 < report["languages"]["en"]["tokens_per_word"] < 4 and report["all"]["documents"] == 628
    manifest = tmp_path / "out" / "manifest.json"
    changed = json.loads(manifest.read_text().replace('"lossy_documents": 0', '"lossy_documents": 9'))
    write_json(manifest, sealed(changed))
    with pytest.raises(DataError, match="9 of 628"):
        preprocess(config())  # judged again, out of the manifest
    preprocess(config(tokenizer={"max_lossy_share": 0.1}))


def test_lossy_tokenizer_stops_the_run(
    config: Callable, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line and exit code 3 before anything is tokenized; what `normalise` mends, or is allowed, goes on."""
    with open(text / "part-1.jsonl", "a", encoding="utf-8") as file:
        file.write('{"id": "nfd", "text": "cafe\\u0301 au lait"}\n')
    spec = str(lossy_json(tmp_path / "nfc", tokenizers.normalizers.NFC()))
    (tmp_path / "c.toml").write_text(dump_toml(config(tokenizer={"path": spec})))
    assert main(["preprocess", str(tmp_path / "c.toml")]) == 3
    (line,) = [one for one in capsys.readouterr().err.splitlines() if "does not give back the text" in one]
    assert "1 of 599 sampled documents" in line and "nfd at character 3" in line and "max_lossy_share" in line
    assert not (tmp_path / "out" / "stages" / "tokenize").exists()
    assert preprocess(config(tokenizer={"path": spec, "max_lossy_share": 0.01})).manifest["tokenizer_report"]["all"][
        "lossy_documents"
    ]
    mended = config("mended", steps=[{"kind": "normalise"}], tokenizer={"path": spec})
    assert preprocess(mended).manifest["tokenizer_report"]["all"]["lossy_documents"] == 0


def test_tokenizer_that_loses_everything_is_refused_before_reading(config: Callable, tmp_path: Path) -> None:
    spec = str(lossy_json(tmp_path / "lower", tokenizers.normalizers.Lowercase()))
    with pytest.raises(DataError, match="capital letters and digits"):
        preprocess(config(tokenizer={"path": spec}))
    assert not (tmp_path / "out" / "stages" / "read").exists()


def test_summary_shows_how_documents_are_marked(
    config: Callable, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "c.toml").write_text(dump_toml(config(tokenizer={"path": "bytes", "add_bos": True})))
    assert main(["preprocess", str(tmp_path / "c.toml")]) == 0
    out = capsys.readouterr().out
    assert "each document: begin id 1, text, end id 2; the first of train: 1 " in out and " ... " in out
    assert "tokens a word, of a sample: (none) 2.67, de " in out
    side = json.loads((tmp_path / "out" / "train.json").read_text())["tokenizer"]
    assert side["add_bos"] and side["append_eos"]
