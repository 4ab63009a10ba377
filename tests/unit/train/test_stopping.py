"""train/stopping, restarts: what asks a run to stop, how idle chains end, and when a fault is worth another start."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import pytest
import torch

from megafp8.checkpoint import save
from megafp8.core.errors import NoProgressError
from megafp8.core.heartbeat import HEART, Heartbeat
from megafp8.parallel.mesh import Mesh
from megafp8.train.config import load_run_config
from megafp8.train.lock import RunLock
from megafp8.train.restarts import launch, may_restart, restart_loop
from megafp8.train.signals import StopRequest
from megafp8.train.stopping import Stops, count_idle_stops, exit_code, stopped_before

ROOT = Path(__file__).resolve().parents[3]
TINY = ROOT / "examples/tiny_cpu/pretrain.toml"


def _stops(folder: Path, *overrides: str) -> tuple[Stops, Heartbeat]:
    heart = Heartbeat()
    config = load_run_config(TINY, ["--run.dir", str(folder), *overrides])
    return Stops(config, Mesh.single(), StopRequest(heart), RunLock(folder)), heart


def test_a_signal_a_file_and_the_clock_stop_a_run_each_with_its_code(tmp_path, monkeypatch):
    stops, heart = _stops(tmp_path, "--train.exit_after_seconds", "1e9")
    assert stops.agreed() == ""
    heart.ask_to_stop(15, own=False)
    assert (stops.agreed(), stops.describe("signal"), exit_code("signal")) == ("signal", "SIGTERM", 75)
    late, _ = _stops(tmp_path, "--train.exit_after_seconds", "0.001")
    assert (late.agreed(), exit_code("time")) == ("time", 75) and "exit_after_seconds = 0.001" in late.describe("time")
    (tmp_path / "STOP").touch()
    assert (_stops(tmp_path)[0].agreed(), exit_code("file")) == ("file", 76)


def test_stops_in_a_row_without_a_step_end_a_chain_of_jobs(tmp_path):
    count_idle_stops(tmp_path, 5, first_step=5, reason="time")
    count_idle_stops(tmp_path, 9, first_step=5, reason="time")  # a step was taken: forgotten
    count_idle_stops(tmp_path, 9, first_step=9, reason="time")
    with pytest.raises(NoProgressError, match="stopped 2 times in a row after step 9") as caught:
        count_idle_stops(tmp_path, 9, first_step=9, reason="time")
    assert caught.value.exit_code == 72
    for _ in range(4):
        count_idle_stops(tmp_path, 11, first_step=11, reason="signal")
    with pytest.raises(NoProgressError, match="stopped 5 times in a row after step 11"):
        count_idle_stops(tmp_path, 11, first_step=11, reason="signal")


def test_torchruns_restart_does_not_undo_a_stop(tmp_path):
    (tmp_path / "exit.json").write_text(json.dumps({"code": 75, "job": "j1", "step": 3}))
    before = HEART.facts
    try:
        HEART.tell(job="j1", restarts=0)
        assert stopped_before(tmp_path) == 0  # a new job of the same name
        HEART.tell(restarts=1)
        assert stopped_before(tmp_path) == 75
        HEART.tell(job="j2")
        assert stopped_before(tmp_path) == 0
    finally:
        HEART.tell(**{"job": "", "restarts": 0} | before)


@pytest.mark.parametrize("code", [0, 2, 3, 4, 5, 6, 72, 75, 76, 130, 143])
def test_what_another_start_cannot_mend_ends_at_once(tmp_path, code):
    assert not may_restart(code)
    assert restart_loop(lambda: code, tmp_path, 5) == code


def _checkpoint(run: Path, step: int) -> None:
    save(run / "checkpoints", step, {"w": torch.ones(2)}, {}, Mesh.single(), {})


def test_a_crash_loop_ends_and_progress_counts(tmp_path, capsys):
    codes = iter([137, 70, 1, 17, 71, 139])
    calls = []

    def attempt() -> int:
        calls.append(len(calls))
        if len(calls) == 2:  # the second attempt comes further before it dies
            _checkpoint(tmp_path, 4)
        return next(codes)

    assert restart_loop(attempt, tmp_path, 2, pause_seconds=0.0) == 72
    assert len(calls) == 5  # one more start after the first, then two after step 4 brought nothing, and the limit
    said = capsys.readouterr().err
    assert "3 starts in a row brought no new checkpoint (--restarts 2): giving up" in said
    assert "exit code 70, newest checkpoint: step 4" in said


def test_a_launchers_own_code_is_not_the_runs(tmp_path):
    code = f"import pathlib; pathlib.Path({str(tmp_path / 'exit.json')!r}).write_text('{{\"code\": 75}}'); exit(1)"
    assert launch([sys.executable, "-c", code], tmp_path) == 75
    assert launch([sys.executable, "-c", "exit(3)"], tmp_path) == 3
    assert launch([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"], tmp_path) == 137


def test_a_run_within_a_program_leaves_it_its_handlers_and_the_next_run_its_time():
    heart, own = Heartbeat(), signal.getsignal(signal.SIGTERM)
    request = StopRequest(heart)
    request.install()
    os.kill(os.getpid(), signal.SIGTERM)
    assert request.received == "SIGTERM"
    request.uninstall()
    assert signal.getsignal(signal.SIGTERM) == own
    heart.begin()
    assert request.received == "" and heart.seconds < 1
