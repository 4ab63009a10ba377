"""The verbs preprocess, tokenizer and data at their door: exit codes, one line for each error, what they print."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from megafp8.cli.main import main
from megafp8.core.config import dump_toml
from megafp8.data import IndexedDataset

ROOT = Path(__file__).parents[3]


@pytest.fixture
def toml(config: Callable, tmp_path: Path) -> str:
    (tmp_path / "corpus.toml").write_text(dump_toml(config()))
    return str(tmp_path / "corpus.toml")


def test_preprocess_then_look_into_it(toml: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["preprocess", toml]) == 0
    out, err = capsys.readouterr()
    assert "documents" in out and "nats/token" in out and "tokenizing: done" in err
    assert main(["preprocess", toml]) == 0
    assert "already done, nothing to do" in capsys.readouterr().out
    prefix = str(tmp_path / "out" / "train")
    assert main(["data", "verify", prefix]) == 0
    assert "checksums and index hold" in capsys.readouterr().out
    assert main(["data", "peek", prefix, "--documents", "2"]) == 0
    assert capsys.readouterr().out.count("--- document") == 2
    assert main(["data", "stats", prefix, "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["tokens"] == IndexedDataset(prefix).num_tokens and set(values["languages"]) >= {"en", "de"}
    assert main(["data", "stats", prefix]) == 0
    assert "unigram_entropy_nats" in capsys.readouterr().out


def test_verify_finds_a_flipped_bit(toml: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["preprocess", toml, "--tokenizer.path", "bytes"]) == 0
    path = tmp_path / "out" / "train.bin"
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(bytes(data))
    assert main(["data", "verify", str(tmp_path / "out" / "train")]) == 3
    assert "train.bin: checksum" in capsys.readouterr().err


def test_tokenizer_train(toml: str, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tokenizer", "train", toml]) == 0
    assert "330 ids" in capsys.readouterr().out and (tmp_path / "out" / "tokenizer.model").is_file()
    words = ["--input", f"{text}/*.jsonl", "--vocab-size", "300", "--algorithm", "unigram", "--out", f"{tmp_path}/t"]
    assert main(["tokenizer", "train", *words, "--split.valid_share=0"]) == 0
    assert (tmp_path / "t" / "tokenizer.model").is_file()


@pytest.mark.parametrize(
    ("words", "code", "line"),
    [
        (["preprocess", "/nowhere.toml"], 2, "no such file"),
        (["preprocess", "TOML", "--sorce.kind", "text"], 2, "nearest: source"),
        (["preprocess", "TOML", "--source.files", '["/nowhere/*"]'], 3, "matches no file"),
        (["preprocess", "TOML", "--output.folder", "/proc/x/y"], 6, "/proc/x"),
        (["preprocess", "TOML", "--tokenizer.vocab_size", "9999999"], 3, "largest that works is"),
        (["tokenizer", "train"], 2, "either a corpus.toml or --input"),
        (["tokenizer", "train", "--input", "x"], 2, "--out"),
        (["tokenizer", "train", "TOML", "--tokenizer.path", "bytes"], 2, "nothing to train"),
        (["data", "verify", "/nowhere/train"], 3, "no such file"),
    ],
)
def test_errors_are_one_line_with_a_code(
    toml: str, words: list[str], code: int, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([toml if word == "TOML" else word for word in words]) == code
    errors = [text for text in capsys.readouterr().err.splitlines() if ": error: " in text]
    assert len(errors) == 1 and line in errors[0]


def test_doors_and_help_need_no_torch() -> None:
    for command in (["tools/preprocess_data.py", "--help"], ["tools/train_tokenizer.py", "--help"]):
        done = subprocess.run(
            [sys.executable, "-X", "importtime", *command], capture_output=True, text=True, check=True, cwd=ROOT,
            env={"PYTHONPATH": str(ROOT), "PATH": ""},
        )  # fmt: skip
        assert "examples:" in done.stdout and "| torch\n" not in done.stderr and "sentencepiece" not in done.stderr


def test_example_corpus_is_valid() -> None:
    from megafp8.core.config import build, load_toml
    from megafp8.corpus.config import CorpusConfig

    config = build(CorpusConfig, load_toml(ROOT / "examples" / "tiny_cpu" / "corpus.toml"))
    assert config.source.kind == "python_stdlib" and config.tokenizer.vocab_size == 8192
