"""The real command under faults of ranks: a crash under torchrun, a hang, a crash loop."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import psutil
import pytest

from tests.journeys.runs import (
    environment,
    losses,
    megafp8,
    overrides,
    records,
    start,
    wait_for,
    write_config,
)

ENDLESS = overrides(train__steps=100000, train__eval_interval=0, log__interval=1000)


def _trainer(launcher: subprocess.Popen[str], rank: int) -> psutil.Process:
    keepers = [child for child in psutil.Process(launcher.pid).children() if child.environ().get("RANK") == str(rank)]
    (trainer,) = keepers[0].children()
    return trainer


def test_a_stopped_rank_is_named_and_every_stack_is_kept(config, tmp_path):
    process = start("pretrain", config, "--nproc", "2", *ENDLESS, *overrides(train__timeout_seconds=3))
    wait_for(lambda: len(records(tmp_path / "run")) >= 3, process)
    _trainer(process, 1).send_signal(signal.SIGSTOP)
    begin = time.monotonic()
    _, err = process.communicate(timeout=60)
    assert process.returncode == 70 and time.monotonic() - begin < 3 + 35, err
    assert "rank 0: hung: rank 1 (host" in err and "stopped by a signal" in err and "1 of 2 ranks wait for it" in err
    stacks = [(tmp_path / f"run/hangs/rank-0000{rank}.txt").read_text() for rank in (0, 1)]
    assert all("megafp8/train/" in text for text in stacks)


@pytest.mark.slow
def test_torchrun_starts_the_ranks_again_and_a_stop_stays_one(config, tmp_path):
    run = tmp_path / "run"

    def torchrun(*words: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        command += ["--max-restarts", "2", "-m", "megafp8", "pretrain", str(config), *ENDLESS]
        return subprocess.Popen(
            [*command, *overrides(checkpoint__interval=3), *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True, env=environment(),
        )  # fmt: skip

    process = torchrun()
    wait_for(lambda: len(records(run)) >= 5, process)
    _trainer(process, 1).kill()
    wait_for(lambda: bool(records(run, "event")) and "resumed" in [e["event"] for e in records(run, "event")], process)
    count = len(records(run))
    wait_for(lambda: len(records(run)) > count + 3, process)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert "rank 1: killed by SIGKILL" in err and "stopped; run the same command again" in err
    losses(run)  # each step once
    process = torchrun(*overrides(train__exit_after_seconds=8))
    _, err = process.communicate(timeout=120)
    assert err.count("stopped; run the same command again") == 1 and "not started again" in err, err


@pytest.mark.slow
def test_a_run_that_starts_again_equals_one_that_never_stopped(config, data, tmp_path):
    words = ["--nproc", "2", *overrides(train__steps=40, checkpoint__interval=5)]
    process = start("pretrain", config, "--restarts", "3", *words)
    for count in (7, 16):
        wait_for(lambda count=count: len(records(tmp_path / "run")) >= count, process)
        _trainer(process, count % 2).kill()
        dead = len(records(tmp_path / "run", "event"))
        wait_for(lambda dead=dead: len(records(tmp_path / "run", "event")) > dead, process)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0 and err.count("starting again") == 2, err
    straight = write_config(tmp_path / "straight", data)
    megafp8("pretrain", straight, *words)
    assert losses(tmp_path / "run") == losses(tmp_path / "straight/run")
