"""The Slurm executor against a queue that forgets, holds, fails to answer, kills and runs things twice."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megafp8.core.config import dump_toml
from megafp8.core.errors import ConfigError, DataError, ResourceError
from megafp8.corpus.executors.job import Job
from megafp8.corpus.run import preprocess
from megafp8.corpus.tasks import Task
from tests.unit.corpus.conftest import Cluster

EXECUTOR = {
    "kind": "slurm", "poll_seconds": 0.1, "lease_seconds": 1.0, "shard_bytes": 40_000, "part_bytes": 60_000,
}  # fmt: skip
LOCAL = {"shard_bytes": 40_000, "part_bytes": 60_000}


def made(config: Callable, folder: str, tmp_path: Path, **executor: Any) -> Any:
    return config(
        folder,
        tokenizer={"path": "bytes"},
        output={"workers": 2, "folder": str(tmp_path / folder)},
        executor={**EXECUTOR, **executor},
    )


@pytest.fixture
def whole(config: Callable, contents: Callable, tmp_path: Path) -> dict[str, bytes]:
    preprocess(config("whole", tokenizer={"path": "bytes"}, executor=LOCAL))
    return contents(tmp_path / "whole")


def test_same_bytes_as_here(
    config: Callable, contents: Callable, tmp_path: Path, cluster: Cluster, whole: dict[str, bytes]
) -> None:
    name = "out; touch owned #$(touch owned)'`touch owned`"  # a job script is a shell's; ours quotes what users name
    preprocess(made(config, name, tmp_path))
    assert contents(tmp_path / name) == whole and not list(tmp_path.rglob("owned*"))
    assert cluster.calls.count("sbatch") == 4 and "scancel" in cluster.calls, "split, check, tokenize, write"


@pytest.mark.parametrize(
    "faults",
    [
        {"forgotten": 1},
        {"held": 2},
        *(pytest.param({name: n}, marks=pytest.mark.slow) for name, n in (("sbatch_fails", 2), ("squeue_fails", 3))),
        pytest.param({"queue_forgets": 2}, marks=pytest.mark.slow),
    ],
)
def test_the_queue_is_not_trusted(
    config: Callable,
    contents: Callable,
    tmp_path: Path,
    cluster: Cluster,
    whole: dict[str, bytes],
    faults: dict[str, int],
) -> None:
    cluster.faults(**faults)
    preprocess(made(config, "out", tmp_path))
    assert contents(tmp_path / "out") == whole
    if "forgotten" in faults or "queue_forgets" in faults:
        assert cluster.calls.count("sbatch") > 4, "the rest was submitted again"
    if "held" in faults:
        assert cluster.calls.count("scontrol") == 2


def test_killed_nodes_cost_nothing_but_time(
    config: Callable, contents: Callable, tmp_path: Path, cluster: Cluster, whole: dict[str, bytes]
) -> None:
    """Elements die by kill -9; every second one is requeued, as a node's death does."""
    over = threading.Event()
    killed: list[str] = []

    def kill() -> None:
        seen: set[str] = set()
        while not over.wait(0.05) and len(killed) < 4:
            for path in cluster.elements():
                key, pid = str(path), path.read_text()
                if pid and key not in seen:
                    seen.add(key)
                    time.sleep(0.3)
                    if len(seen) % 2:
                        path.with_suffix(".requeue").touch()
                    try:
                        os.killpg(int(pid), signal.SIGKILL)
                        killed.append(key)
                    except ProcessLookupError:
                        path.with_suffix(".requeue").unlink(missing_ok=True)

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        preprocess(made(config, "out", tmp_path, retries=6))
    finally:
        over.set()
        thread.join()
    assert killed and contents(tmp_path / "out") == whole


def test_killed_driver_goes_on_with_its_array(
    config: Callable, contents: Callable, tmp_path: Path, cluster: Cluster, whole: dict[str, bytes]
) -> None:
    (tmp_path / "c.toml").write_text(dump_toml(made(config, "out", tmp_path)))
    command = [sys.executable, "-m", "megafp8", "preprocess", str(tmp_path / "c.toml")]
    for _ in range(3):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        with contextlib.suppress(subprocess.TimeoutExpired):  # a fast machine has ended
            process.wait(timeout=0.8)
        process.kill()
        process.wait()
    assert subprocess.run(command, check=False, capture_output=True).returncode == 0
    assert contents(tmp_path / "out") == whole


def test_elements_that_do_nothing_end_in_one_line(config: Callable, tmp_path: Path, cluster: Cluster) -> None:
    cluster.faults(forgotten=99)
    with pytest.raises(ResourceError, match="4 Slurm arrays in a row ended without a task done") as caught:
        preprocess(made(config, "out", tmp_path))
    assert "\n" not in str(caught.value)


def test_refused_data_is_told_as_such(config: Callable, tmp_path: Path, cluster: Cluster) -> None:
    with pytest.raises(DataError, match=r"largest that works is \d+"):
        preprocess(config(tokenizer={"vocab_size": 30000}, output={"workers": 2}, executor=EXECUTOR))
    assert list((tmp_path / "out" / "stages" / "tokenizer").glob("*.log"))


def test_no_slurm_here(config: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError, match=r"sbatch, squeue, scancel not found on PATH"):
        preprocess(made(config, "out", tmp_path))
    with pytest.raises(ConfigError, match=r'options is for executor.kind "slurm", it is "local"'):
        config(executor={"options": ["--partition=x"]})


def test_leases(tmp_path: Path) -> None:
    tasks = [Task("split", str(i), {"i": i}, ()) for i in range(3)]
    job = Job.at(tmp_path, tasks, 2, 0.4)
    job.write()
    assert Job.load(job.folder).tasks == tasks
    other = Job.load(job.folder)
    assert job.acquire(tasks[0]) == 1 and other.acquire(tasks[0]) == 0
    with job.held(tasks[0]):
        time.sleep(0.8)
        assert other.acquire(tasks[0]) == 0, "its owner lives"
    time.sleep(0.6)
    assert other.acquire(tasks[0]) == 2 and job.acquire(tasks[0]) == 0
