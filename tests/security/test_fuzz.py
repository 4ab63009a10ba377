"""P10: mutated files end in one line or in what they say: no signal, no hang, no 2 GiB. `fuzz` says how."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.architecture.sources import ROOT
from tests.journeys.runs import environment


def fuzz(*words: str, timeout: float) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "tests.security.fuzz", *words],
        cwd=ROOT, capture_output=True, text=True, timeout=timeout, env=environment(),
    )  # fmt: skip
    last = (done.stdout.splitlines() or [""])[-1].rsplit("\r", 1)[-1]
    assert done.returncode == 0, f"exit code {done.returncode} at {last}\n{done.stderr[-3000:]}"
    return last


def test_a_few_hundred_cases():
    assert fuzz("--cases", "480", "--seed", "7", "--seconds", "60", timeout=120).startswith("480 cases of 15 kinds")


@pytest.mark.slow
def test_ten_minutes():
    fuzz("--seconds", "600", "--seed", "2026", timeout=700)
