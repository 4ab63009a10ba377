"""`--plan` says what would run, exactly where records tell, and runs nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from megafp8.cli.main import main
from megafp8.core.config import dump_toml
from megafp8.corpus.plan import make_plan
from megafp8.corpus.run import preprocess

EXECUTOR = {"shard_bytes": 12_000, "part_bytes": 8_000}


def test_plan_before_and_after(config: Callable, tmp_path: Path, text: Path) -> None:
    made = config(executor=EXECUTOR)
    before = make_plan(made)
    assert not (tmp_path / "out").exists()
    stages = [row.stage for row in before.rows]
    assert stages == ["split", "read", "sample", "tokenizer", "check", "tokenize", "write"]
    assert [row.is_exact for row in before.rows] == [True, *[False] * 6] and before.seconds > 0
    preprocess(made)
    after = make_plan(made)
    assert all(row.is_exact and row.done == row.tasks for row in after.rows) and after.seconds == 0
    read = {row.stage: row.tasks for row in after.rows}["read"]
    guessed = {row.stage: row.tasks for row in before.rows}["read"]
    assert guessed - 2 <= read <= guessed, "a range without a line end of its own makes no task"
    on_disk = sum(path.stat().st_size for path in (tmp_path / "out" / "stages").rglob("*") if path.suffix != ".json")
    assert 0.3 < after.disk / on_disk < 3, "an estimate"
    (text / "part-2.jsonl").write_text('{"text": "one more"}\n')
    grown = {row.stage: (row.tasks, row.done) for row in make_plan(made).rows}
    assert grown["read"] == (read + 1, read)


def test_plan_on_the_command_line(config: Callable, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "c.toml").write_text(dump_toml(config()))
    assert main(["preprocess", str(tmp_path / "c.toml"), "--plan"]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[1].split()[:4] == ["stage", "tasks", "done", "to"] and "MB in the output folder" in out
    assert not (tmp_path / "out").exists()
