"""Saves while training goes on, by the real command: what a kill costs, and what a save that fails costs."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import time
from pathlib import Path

import pytest

from megafp8.checkpoint import latest, verify
from megafp8.checkpoint.folders import candidates, step_of
from tests.journeys.runs import losses, megafp8, overrides, records, start, wait_for, write_config

LENGTH = {"train__steps": 40, "train__eval_interval": 0, "checkpoint__interval": 16}
ASYNC = LENGTH | {"checkpoint__asynchronous": "true"}


@pytest.fixture(scope="module")
def straight(data, tmp_path_factory) -> list[float]:
    """Losses of a run that nothing happened to."""
    folder = tmp_path_factory.mktemp("straight")
    megafp8("pretrain", write_config(folder, data), *overrides(**LENGTH))
    return losses(folder / "run")


def writers(run: Path) -> list[int]:
    """Processes that write checkpoints of a trainer of `run`."""
    words, parents = {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            words[folder.name] = (folder / "cmdline").read_bytes().decode().split("\0")
            parents[folder.name] = (folder / "stat").read_text().rpartition(")")[2].split()[1]
    trainers = {pid for pid, said in words.items() if str(run.parent / "pretrain.toml") in said}
    found = [pid for pid, said in words.items() if "megafp8.checkpoint.background" in said]
    return [int(pid) for pid in found if parents[pid] in trainers]


def test_a_kill_costs_the_steps_since_the_last_local_checkpoint(data, straight, tmp_path):
    config, run = write_config(tmp_path, data), tmp_path / "run"
    local = ASYNC | {"checkpoint__local_folder": tmp_path / "node", "checkpoint__local_interval": 3}
    process = start("pretrain", config, *overrides(**local))
    wait_for(lambda: any(e["event"] == "saved locally" and e["step"] > 16 for e in records(run, "event")), process)
    process.kill()
    process.communicate()
    durable = latest(run / "checkpoints")
    assert durable is not None and step_of(durable) == 16
    verify(durable)
    done = megafp8("pretrain", config, *overrides(**local))
    (resumed,) = (e for e in records(run, "event") if e["event"] == "resumed")
    assert resumed["step"] > 16 and str(tmp_path / "node") in resumed["checkpoint"]
    assert losses(run) == straight  # bit for bit
    assert "checkpoint saved step=40" in done.stderr and "stall_seconds" in done.stderr
    assert [step_of(path) for path in candidates(run / "checkpoints")] == [40, 32]
    assert not any((tmp_path / "node").iterdir())  # the last durable one is newer than all of them


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks at /proc")
def test_a_writer_that_dies_stops_the_run_or_costs_one_save(data, straight, tmp_path):
    config, run = write_config(tmp_path, data), tmp_path / "run"
    allowed = ASYNC | {"checkpoint__interval": 4, "checkpoint__max_failed_saves": 9}
    process = start("pretrain", config, *overrides(**allowed))
    wait_for(lambda: bool(writers(run)), process)
    os.kill(writers(run)[0], signal.SIGKILL)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 0 and losses(run) == straight
    failed = [e for e in records(run, "event") if e["event"] == "save failed"]
    assert [e["in_a_row"] for e in failed] in ([1], [])  # none if it fell between two saves: the next starts another
    for event in failed:
        assert "was killed (signal 9" in event["reason"] and event["reason"] in said
    saved = [e["step"] for e in records(run, "event") if e["event"] == "saved"]
    assert saved[-1] == 40 and len(saved) == 10 - len(failed)
    longer = megafp8("pretrain", config, *overrides(**allowed | {"train__steps": 42}))
    assert "resumed step=40" in longer.stderr  # also after the last save, which the end of the run waited for


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["async", "sync"])
def test_random_kills_of_trainer_and_writer(data, straight, tmp_path, mode):
    """Two ranks, small steps, a save every second one; whatever dies when, what is complete loads and goes on."""
    random_ = random.Random(6)
    config, run = write_config(tmp_path, data), tmp_path / "run"
    words = overrides(**(ASYNC if mode == "async" else LENGTH) | {"checkpoint__interval": 2})
    for number in range(12):
        process = start("pretrain", config, *words)
        before = len(records(run, "event"))
        wait_for(lambda: len(records(run, "event")) > before + random_.randint(0, 1), process)  # noqa: B023
        time.sleep(random_.uniform(0, 0.3))
        found = writers(run)
        if found and number % 2:
            os.kill(random_.choice(found), signal.SIGKILL)
            if process.poll() is None:
                time.sleep(0.2)
        process.kill()
        process.communicate()
        for path in candidates(run / "checkpoints"):
            verify(path)
        if step_of(latest(run / "checkpoints") or Path("step_00000000")) >= 36:
            break
    megafp8("pretrain", config, *words)
    assert losses(run) == straight
    assert all(path.name.startswith("step_") for path in (run / "checkpoints").iterdir())
