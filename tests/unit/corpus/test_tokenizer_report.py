"""`megafp8 tokenizer report`: tokenizers side by side on the same sample."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from megafp8.cli.main import main
from megafp8.corpus.config import SourceConfig
from megafp8.corpus.run import train_into
from megafp8.corpus.tokenizer_report import draw


def test_table_and_json(config: Callable, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with open(text / "part-1.jsonl", "a", encoding="utf-8") as file:
        file.write('{"text": "\u65e5\u672c", "lang": "ja"}\n{"text": 3}\n')
    spec = train_into(config(), tmp_path / "out")
    command = ["tokenizer", "report", spec, "bytes", "--input", f"{text}/*.jsonl"]
    assert main(command) == 0
    out = capsys.readouterr().out
    assert "599 of 599 documents" in out and "1 bad records were passed over, first: " in out
    assert out.count("\nja ") == 2 and out.count("\nall ") == 2 and "330 ids" in out and "260 ids" in out
    assert main([*command, "--json", "--sample-bytes", "3000"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["identity"]["kind"] for row in rows] == ["sentencepiece", "bytes"]
    for row in rows:
        assert row["languages"]["en"]["text_bytes"] <= 3000 and row["languages"]["ja"]["documents"] == 1
        assert row["lost_probes"] == [] and 0 < row["vocabulary_used"] < 1
    assert rows[0]["languages"]["en"]["tokens_per_word"] < 2 < 4 < rows[1]["languages"]["en"]["tokens_per_word"]
    assert rows[0]["languages"]["ja"]["byte_tokens"] == 6 and rows[0]["languages"]["ja"]["covered_share"] == 0.0


def test_sample_does_not_depend_on_the_order_of_files(text: Path) -> None:
    files = [str(text / f"part-{i}.jsonl") for i in (0, 1)]
    both = [SourceConfig(kind="jsonl", files=tuple(one)) for one in (files, files[::-1])]
    found = [draw(one, sample_bytes=4000, seed=0) for one in both]
    assert found[0] == found[1] and len(found[0].documents) < found[0].num_documents == 598


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["absent.model", "--input", "{text}/part-0.jsonl"], 3),
        (["bytes", "--input", "{text}/nothing*"], 3),
        (["bytes"], 2),
        (["bytes", "--input", "{text}/part-0.jsonl", "--sample-bytes", "0"], 2),
    ],
)
def test_bad_input(words: list[str], code: int, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tokenizer", "report", *(word.format(text=text) for word in words)]) == code
    assert len(capsys.readouterr().err.splitlines()) == 1
