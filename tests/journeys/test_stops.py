"""The real command told to stop, in every section, by time, by file: nothing is lost, put off is not left out."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from megafp8.checkpoint import latest
from megafp8.checkpoint.folders import step_of
from tests.journeys.runs import losses, megafp8, overrides, records, start, wait_for

pytestmark = pytest.mark.slow
ENDLESS = overrides(train__steps=100000, train__eval_interval=0, checkpoint__interval=1000, log__interval=1000)


def test_a_signal_a_file_and_an_evaluation_that_gives_way(config, tmp_path):
    """One run in two starts, and every step and evaluation once."""
    run = tmp_path / "run"
    words = overrides(train__steps=100000, train__eval_interval=6, train__eval_samples=60, train__micro_batch=1)
    words += overrides(checkpoint__interval=1000, log__interval=1000)
    process = start("pretrain", config, *words)
    wait_for(lambda: len(records(run)) >= 6, process)
    process.send_signal(signal.SIGTERM)  # mostly while the set of step 6 is judged
    _, err = process.communicate(timeout=60)
    assert process.returncode == 75, err
    stopped = records(run)[-1]["step"]
    assert step_of(latest(run / "checkpoints")) == stopped
    process = start("pretrain", config, *words)
    wait_for(lambda: records(run)[-1]["step"] > stopped, process)
    (run / "STOP").touch()
    _, err = process.communicate(timeout=60)
    assert process.returncode == 76 and "remove the file and run the same command again" in err
    done = megafp8("pretrain", config, "--nproc", "1", *words, code=76)
    assert "STOP is there; remove it to go on" in done.stderr
    losses(run)  # each step once
    evaluated = [r["step"] for r in records(run, "eval")]
    last = records(run)[-1]["step"]
    assert evaluated in (list(range(6, last + 1, 6)), list(range(6, last, 6)))  # the last one may have given way too


def test_slices_of_time_go_on_and_idle_ones_end_the_chain(config, tmp_path):
    steps = [0]
    for _ in range(3):
        megafp8("pretrain", config, *ENDLESS, *overrides(train__exit_after_seconds=15), code=75)
        steps.append(len(losses(tmp_path / "run")))
    assert steps == sorted(set(steps))
    idle = overrides(train__exit_after_seconds=0.1)
    megafp8("pretrain", config, *ENDLESS, *idle, code=75)
    done = megafp8("pretrain", config, *ENDLESS, *idle, code=72)
    assert "stopped 2 times in a row" in done.stderr and len(losses(tmp_path / "run")) == steps[-1]


@pytest.mark.parametrize("wait", [0.0, 0.5, 1.5, 3.0, 5.0])
def test_a_signal_during_start_up_is_not_lost(config, tmp_path, wait):
    process = start("pretrain", config, "--nproc", "2", *ENDLESS)
    wait_for(lambda: b"pretrain" in Path(f"/proc/{process.pid}/cmdline").read_bytes(), process)
    time.sleep(0.5 + wait)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode in (75, 143, -15), err
    newest = latest(tmp_path / "run/checkpoints")
    assert (0 if newest is None else step_of(newest)) == len(records(tmp_path / "run"))


def test_two_signals_stop_at_once_and_damage_nothing(config, tmp_path):
    words = [*ENDLESS, *overrides(checkpoint__interval=3)]
    process = start("pretrain", config, "--nproc", "2", *words)
    wait_for(lambda: len(records(tmp_path / "run")) >= 7, process)
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=10)
    assert process.returncode in (75, 130), err
    megafp8("checkpoint", "verify", tmp_path / "run")
    megafp8("pretrain", config, "--nproc", "2", *words, *overrides(train__exit_after_seconds=8), code=75)
    losses(tmp_path / "run")
