"""The experiment's driver on a small corpus: stopped by Ctrl-C's signal and by kill -9, it ends in one comparison."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.journeys.runs import ROOT, losses

SETTINGS = [
    "--train.steps", "24", "--optimizer.warmup_steps", "4", "--train.eval_samples", "8", "--train.eval_interval", "0",
    "--checkpoint.interval", "8", "--model.num_layers", "1", "--train.compile", "off", "--log.interval", "1",
    "--data.sequence_length", "128",
]  # fmt: skip


@pytest.fixture
def driver(tmp_path: Path) -> list[str]:
    """The command on two languages of invented words, many enough for the tokenizer's 8,192 pieces."""
    rng, data = random.Random(5), tmp_path / "data"
    data.mkdir()
    for name, count in (("text.jsonl", 160), ("heldout.jsonl", 12)):
        with (data / name).open("w") as file:
            for number in range(count):
                language = ("en", "de", "ja")[number % 3]
                letters = {"en": "abcdefghij", "de": "klmnopqrst", "ja": "uvwxyz"}[language]
                words = ["".join(rng.choices(letters, k=rng.randrange(2, 6))) for _ in range(1500)]
                file.write(json.dumps({"text": " ".join(words), "lang": language}) + "\n")
    return [
        "bash", str(ROOT / "examples/fp8_vs_bf16/run.sh"), "--data", str(data), "--out", str(tmp_path / "out"),
        "--recipes", "none delayed", "--jobs", "2", "--", *SETTINGS,
    ]  # fmt: skip


def start(driver: list[str], folder: Path) -> subprocess.Popen[bytes]:
    """The driver with `megafp8` of this interpreter on its path."""
    (folder / "bin").mkdir(exist_ok=True)
    door = folder / "bin" / "megafp8"
    door.write_text(f'#!/bin/sh\nexec {sys.executable} -m megafp8 "$@"\n')
    door.chmod(0o755)
    env = {**os.environ, "PATH": f"{door.parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(driver, env=env, stderr=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)


def wait_for(path: Path, text: str, process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + 240
    while not (path.is_file() and text in path.read_text()):
        assert process.poll() is None and time.monotonic() < end, (process.stderr or b"")
        time.sleep(0.1)


@pytest.mark.slow
def test_the_driver_goes_on_after_every_kind_of_end(driver: list[str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    process = start(driver, tmp_path)
    wait_for(out / "runs/bf16/log.txt", "iteration        3", process)
    os.killpg(process.pid, signal.SIGINT)  # as the terminal's Ctrl-C
    said = process.communicate(timeout=120)[1].decode()
    assert process.returncode == 75 and "the same command goes on" in said, said

    process = start(driver, tmp_path)
    wait_for(out / "runs/delayed/log.txt", "iteration       12", process)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()  # its runs are process groups of their own: they work on, and the next call stops them

    process = start(driver, tmp_path)
    said = process.communicate(timeout=400)[1].decode()
    assert process.returncode == 0, said
    found = json.loads((out / "report/compare.json").read_text())
    assert [run["name"] for run in found["runs"]] == ["bf16", "delayed", "bf16-seed-4321"]
    assert all(set(run["heldout"]) == {"en", "de", "en-bf16", "de-bf16"} for run in found["runs"])
    assert found["runs"][1]["training"]["same_samples"] and not found["runs"][2]["training"]["same_samples"]
    assert all(len(losses(out / "runs" / run["name"])) == 24 for run in found["runs"])
    assert found["runs"][0]["heldout"]["en"]["documents"] == 4

    began = time.monotonic()
    process = start(driver, tmp_path)
    process.communicate(timeout=400)
    assert process.returncode == 0 and time.monotonic() - began < 120, "what is done is skipped"
