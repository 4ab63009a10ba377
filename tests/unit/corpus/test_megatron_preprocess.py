"""`tools/preprocess_data.py` with Megatron's own arguments: the same pair of files, or a line that says no."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megafp8.cli.main import guarded
from megafp8.cli.megatron_preprocess import is_meant, run
from megafp8.data.indexed import IndexedDataset
from tests.unit.data.test_tokenizer import huggingface_json

USUAL = ["--tokenizer-type", "HuggingFaceTokenizer", "--append-eod", "--workers", "1", "--log-interval", "10"]


def test_a_pair_of_files(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = huggingface_json(tmp_path)
    prefix = tmp_path / "made" / "mine"
    words = ["--input", f"{text}/part-0.jsonl", "--output-prefix", str(prefix), "--tokenizer-model", str(spec), *USUAL]
    assert is_meant(words) and not is_meant(["corpus.toml", "--output.folder", "x"])
    for _ in range(2):  # the second time all is done
        assert run(words) == 0
        assert "mine_text_document: 299 documents" in capsys.readouterr().out
        dataset = IndexedDataset(f"{prefix}_text_document")
        assert dataset.num_documents == 299 and dataset.dtype == np.dtype("<u2")
        assert all(dataset.document(i)[-1] == 0 for i in range(299)), "each ended"


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--split-sentences"], "--split-sentences"),
        (["--partitions", "4"], "--partitions"),
        (["--vocab-file", "v.json"], "--vocab-file"),
        (["--tokenizer-type", "NullTokenizer"], "needs --tokenizer-model"),
        (["--json-keys", "a", "b"], "one key"),
    ],
)
def test_what_is_refused(more: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    usual = ["--input", "x", "--output-prefix", str(tmp_path / "y"), "--tokenizer-model", "t.model", *USUAL]
    assert guarded("preprocess", lambda: run([*usual, *more]), debug=False) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line and not list(tmp_path.iterdir())


def test_documents_do_not_run_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    usual = ["--input", "x", "--output-prefix", str(tmp_path / "y"), "--tokenizer-model", "t.model", *USUAL]
    usual.remove("--append-eod")
    assert guarded("preprocess", lambda: run(usual), debug=False) == 2
    assert "--append-eod is missing" in capsys.readouterr().err
