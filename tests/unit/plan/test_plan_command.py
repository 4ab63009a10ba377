"""The real command: what it prints, what it writes, what it refuses and how fast."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megafp8.cli.main import main

ROOT = Path(__file__).resolve().parents[3]
TOML = str(ROOT / "examples/llama3_8b/pretrain.toml")


def test_mesh_of_a_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    table = tmp_path / "mesh.csv"
    assert main(["plan", "--mesh", TOML, "--world", "64", "--parallel.pp", "4", "--out", str(table)]) == 0
    out = capsys.readouterr().out
    assert "64 ranks on 8 nodes of 8: pp=4 dp=4 cp=1 tp=4" in out
    assert "0,16,32,48" in out and "embedding, 0-7" in out
    assert f"and 48 more ranks; all of them in {table}" in out
    assert len(table.read_text().splitlines()) == 65


def test_schedule_of_a_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    picture = tmp_path / "timeline.svg"
    words = ["plan", "--schedule", TOML, "--parallel.pp=4", "--parallel.schedule=zb_v", "--out", str(picture)]
    assert main([*words, "--micro-batches", "8"]) == 0
    out = capsys.readouterr().out
    assert "6.25% = (p-1) F/(2m (F+I+W))" in out and "0-3 | 28-31" in out
    assert picture.read_text().lstrip().startswith("<?xml")


def test_a_long_step_is_drawn_with_as_many_micro_batches_as_can_be_read(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ["plan", "--schedule", TOML, "--parallel.pp=4", "--out", str(tmp_path / "timeline.svg")]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "512 micro-batches" in out and "with 16 of 512 micro-batches (--micro-batches 512 draws all)" in out


def test_comparison_without_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--compare", "--parallel.pp", "4", "--micro-batches", "12"]) == 0
    lines = capsys.readouterr().out.splitlines()
    bubbles = {line.split("  ")[0]: line for line in lines}
    assert "25.00% = (p-1)/m" in bubbles["1F1B"]
    assert "8.33% = (p-1)(F+I-W)/(m (F+I+W))" in bubbles["ZB-H1"]
    assert "4 3 2 1" in bubbles["1F1B"]


REFUSED: list[tuple[list[str], list[str]]] = [
    (["--mesh", TOML, "--world", "10"], ["parallel.?tp 4 does not divide 10 processes; nearest: tp = 2 or 5"]),
    (["--mesh", "nowhere.toml"], ["nowhere.toml: no such file"]),
    (["--schedule", TOML, "--parallel.pp=3"], ["32 is not divisible by parallel.pp 3; nearest: num_layers = 30 or 33"]),
    (["--schedule", "--parallel.pp=4"], ["--micro-batches is needed"]),
    (["--schedule", "--micro-batches=4", "--model.num_layers=4"], ["without CONFIG only --parallel"]),
    (["--schedule", "--micro-batches=4", "--parallel.schedule=1b1f"], ["parallel.schedule: '1b1f' is refused"]),
    (
        ["--schedule", "--micro-batches=-1", "--latency=-1", "--costs=1,2", "--out=x.gif", "--gpus-per-node=0"],
        ["--gpus-per-node 0", "--micro-batches -1", "--latency -1.0", ".gif is not one of .svg", "--costs 1,2"],
    ),
    (["--mesh", "--out=x.svg"], [".svg is not one of .csv"]),
    (["--schedule", "--micro-batches=4", "--costs=1,0,inf"], ["three numbers above 0"]),
    (
        ["--schedule", "--micro-batches=4", "--parallel.pp=2", "--parallel.virtual_stages=2", "--world=3"],
        ["pp 2 does not divide 3", '"1f1b" has one stage a rank; nearest: 1, or "interleaved"'],
    ),
]


@pytest.mark.parametrize(("words", "lines"), REFUSED)
def test_wrong_input_is_one_line_each_and_code_2(
    capsys: pytest.CaptureFixture[str], words: list[str], lines: list[str]
) -> None:

    assert main(["plan", *words]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == len(lines), errors
    for line in lines:
        assert any(line in error or re.search(line, error) for error in errors), (line, errors)


def test_wrong_input_takes_under_three_seconds_and_nothing_heavy() -> None:
    # CPU time: wall time on a busy machine says nothing about the program
    code = (
        "import json, resource, sys\nfrom megafp8.cli.main import main\n"
        f"code = main(['plan', '--schedule', {TOML!r}, '--parallel.pp', '3'])\n"
        "usage = resource.getrusage(resource.RUSAGE_SELF)\n"
        "heavy = [name for name in ('torch', 'matplotlib') if name in sys.modules]\n"
        "print(json.dumps([code, heavy, usage.ru_utime + usage.ru_stime]))\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    exit_code, heavy, seconds = json.loads(run.stdout)
    assert (exit_code, heavy) == (2, [])
    assert seconds < 3.0
