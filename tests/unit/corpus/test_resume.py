"""Killed, stopped, out of space: whatever happens to a run, calling it again ends in the same bytes."""

from __future__ import annotations

import errno
import functools
import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megafp8.core.config import dump_toml
from megafp8.core.errors import ResourceError
from megafp8.corpus import stage_run
from megafp8.corpus.executors import local
from megafp8.corpus.executors.interface import Failure
from megafp8.corpus.run import preprocess
from megafp8.corpus.tasks import Task

ROOT = Path(__file__).parents[3]
SMALL = {"shard_bytes": 12_000, "part_bytes": 8_000}  # two files of about 60 kB: some 12 shards, 20 parts
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}


class Stopped(BaseException):
    """Stands for a kill at a point of our choice."""


@pytest.mark.parametrize("first", [1, 2])
def test_killed_at_renames_ends_in_the_same_bytes(
    contents: Callable, config: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: int
) -> None:
    """Records, outputs and final names all appear by renames: stops at more and more of them, in one folder."""
    executor = {"shard_bytes": 40_000, "part_bytes": 60_000}
    preprocess(config("whole", executor=executor))
    replace, count = os.replace, [0]
    for stop_at in range(first, 99, 2):
        count[0] = 0

        def stop(source: Any, target: Any, stop_at: int = stop_at) -> None:
            count[0] += 1
            if count[0] == stop_at:
                raise Stopped
            replace(source, target)

        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", stop)
            try:
                preprocess(config(executor=executor))
                break
            except Stopped:
                pass
    assert stop_at > 12
    assert contents(tmp_path / "whole") == contents(tmp_path / "out")


def kill_often(config: Callable, tmp_path: Path, kills: int, seed: int) -> int:
    """Start the command again and again; each time kill -9 it, or one of its workers, at a random moment."""
    settings = config(output={"workers": 2}, executor={**SMALL, "retries": 3})
    (tmp_path / "c.toml").write_text(dump_toml(settings))
    command = [sys.executable, "-m", "megafp8", "preprocess", str(tmp_path / "c.toml")]
    rng, killed, longest = random.Random(seed), 0, 2.5
    while killed < kills:
        process = subprocess.Popen(command, env=ENVIRONMENT, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        try:
            process.wait(timeout=rng.uniform(0.2, longest))
            # done before it was to be killed: from the beginning, and on a machine so fast sooner
            shutil.rmtree(settings.output.folder)
            longest = max(0.3, 0.7 * longest)
            continue
        except subprocess.TimeoutExpired:
            victims = [process.pid, *children(process.pid)]
            with_worker = rng.choice(victims)
            os.kill(with_worker, signal.SIGKILL)
            killed += 1
        try:
            process.wait(timeout=rng.uniform(0.1, 1.0))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    return subprocess.run(command, env=ENVIRONMENT, check=False, capture_output=True).returncode


def children(pid: int) -> list[int]:
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def test_killed_at_any_time_ends_in_the_same_bytes(contents: Callable, config: Callable, tmp_path: Path) -> None:
    preprocess(config("whole", executor=SMALL))
    assert kill_often(config, tmp_path, 4, seed=1) == 0
    assert contents(tmp_path / "whole") == contents(tmp_path / "out")


EVERY_STEP = [{"kind": "exact"}, {"kind": "minhash"}, {"kind": "paragraphs", "unit": "line", "min_characters": 20}]


@pytest.mark.slow
@pytest.mark.parametrize("steps", [(), EVERY_STEP], ids=["plain", "steps"])
def test_killed_fifty_times_ends_in_the_same_bytes(
    contents: Callable, config: Callable, tmp_path: Path, steps: list[dict]
) -> None:
    """Five folders, five kills each, without steps and with steps over the whole corpus and a shuffle."""

    def make(folder: str = "out", output: Any = (), **sections: Any) -> Any:
        more = {"folder": str(tmp_path / folder), "shuffle": bool(steps), **dict(output)}
        return config(folder, steps, output=more, **sections)

    preprocess(make("whole", executor=SMALL))
    for round_ in range(5):
        (tmp_path / f"round{round_}").mkdir()
        assert kill_often(functools.partial(make, f"out{round_}"), tmp_path / f"round{round_}", 5, seed=round_) == 0
        assert contents(tmp_path / "whole") == contents(tmp_path / f"out{round_}")


def die(worker: Any, root: Path, task: Any, deaths: list[str], limit: int) -> None:
    """Stands for `_Worker.give`: tasks of part-1 lose their process."""
    worker.task = task
    worker.connection.send((root, task))
    if "part-1" in task.name and deaths.count(task.id) < limit:
        deaths.append(task.id)
        worker.process.kill()


def test_dead_worker_costs_one_attempt(
    contents: Callable, config: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deaths: list[str] = []
    monkeypatch.setattr(local._Worker, "give", lambda self, root, task: die(self, root, task, deaths, 1))
    preprocess(config("whole", executor=SMALL))
    preprocess(config(output={"workers": 2}, executor=SMALL))
    assert len(deaths) >= 5
    assert contents(tmp_path / "whole") == contents(tmp_path / "out")
    log = [json.loads(line) for line in (tmp_path / "out" / "stages" / "log.jsonl").read_text().splitlines()]
    again = [entry for entry in log if entry["event"] == "tried again"]
    assert len(again) == len(deaths) and all("died by signal 9" in entry["message"] for entry in again)
    assert {entry["stage"] for entry in log} == {"split", "read", "sample", "tokenizer", "check", "tokenize", "write"}


def test_workers_that_die_unseen_lose_no_task(
    contents: Callable, config: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All die while the parent is busy with a result, not while it waits for one."""
    done, seen = stage_run._Listener.done, []

    def kill(self: Any, task: Any, record: Any) -> None:
        seen.append(task.id)
        if len(seen) in (2, 5, 9):
            for child in multiprocessing.active_children():
                child.kill()
                child.join()
        done(self, task, record)

    preprocess(config("whole", executor=SMALL))
    monkeypatch.setattr(stage_run._Listener, "done", kill)
    preprocess(config(output={"workers": 2}, executor=SMALL))
    assert contents(tmp_path / "whole") == contents(tmp_path / "out")


def test_task_that_always_dies_is_set_aside_and_the_rest_goes_on(
    contents: Callable, config: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deaths: list[str] = []
    executor, source = {"retries": 1, "shard_bytes": 2000}, two(tmp_path)  # less than a file: one shard each
    with monkeypatch.context() as patch:
        patch.setattr(local._Worker, "give", lambda self, root, task: die(self, root, task, deaths, 99))
        with pytest.raises(ResourceError, match=r"1 tasks were set aside.*part-1.*died by signal 9.*run the same"):
            preprocess(config(output={"workers": 2}, executor=executor, source=source))
    assert len(deaths) == 2, "one retry"
    read = tmp_path / "out" / "stages" / "read"
    (log,) = read.glob("*.log")
    assert log.read_text().count("died by signal 9") == 2
    assert list(read.glob("*.json")), "the other file has been read"
    preprocess(config(source=source))
    preprocess(config("whole", source=source))
    assert contents(tmp_path / "whole") == contents(tmp_path / "out") and not list(read.glob("*.log"))


def test_where_a_process_died_is_told(tmp_path: Path) -> None:
    """A document that kills its process, as by a fault in a library, is near."""
    task = Task("read", "a", {}, ())
    listener = stage_run._Listener(tmp_path, "reading", [task], {task.id: {}}, False)
    listener.progress(task, {"documents": 512, "done_bytes": 7})
    listener.failed(Failure(task, "died", "its worker process died", tmp_path / "log", True))
    assert listener.set_aside[0].message == "its worker process died; last heard of at about document 512 of it"


def two(tmp_path: Path) -> dict[str, Any]:
    """Compressed files, which are never cut."""
    import gzip

    for part in range(2):
        data = (tmp_path / "text" / f"part-{part}.jsonl").read_bytes()
        (tmp_path / f"part-{part}.gz").write_bytes(gzip.compress(data, mtime=0))
    return {"files": [f"{tmp_path}/part-*.gz"]}


def test_orphaned_workers_end_themselves(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(
        "import os, signal, time\n"
        "from megafp8.corpus.executors.local import _Worker\n"
        "if __name__ == '__main__':\n"
        "    workers = [_Worker(), _Worker()]\n"
        "    time.sleep(2)\n"
        "    print(*[worker.process.pid for worker in workers], flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=ENVIRONMENT, timeout=60)
    workers = [int(pid) for pid in done.stdout.split()]
    assert workers, done.stderr
    deadline = time.monotonic() + 10
    while any(_alive(pid) for pid in workers) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(_alive(pid) for pid in workers)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    state = Path(f"/proc/{pid}/stat")
    return not state.exists() or ") Z" not in state.read_text()  # a zombie that nobody reaps is dead


def test_disk_full_is_one_line_and_goes_on_later(
    contents: Callable, config: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    preprocess(config("whole"))
    fsync, calls = os.fsync, [0]

    def full(handle: int) -> None:
        calls[0] += 1
        if calls[0] > 12:
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(handle)

    with monkeypatch.context() as patch, pytest.raises(ResourceError, match="no space left") as caught:
        patch.setattr(os, "fsync", full)
        preprocess(config())
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out" / "manifest.json").exists() and not (tmp_path / "out" / "train.bin").exists()
    preprocess(config())
    assert contents(tmp_path / "whole") == contents(tmp_path / "out")


@pytest.mark.slow
@pytest.mark.skipif(os.getuid() != 0, reason="only root mounts a file system")
def test_a_disk_that_is_really_full(contents: Callable, config: Callable, tmp_path: Path) -> None:
    """A file system of growing size: each run ends in one line or is done, and the next one goes on; so with a full
    folder for temporary files, which nothing needs."""
    steps = [{"kind": "exact"}, {"kind": "minhash"}]
    output = {"folder": str(tmp_path / "disk" / "out"), "workers": 2, "shuffle": True}
    settings = {"tokenizer": {"path": "bytes"}, "executor": {"shard_bytes": 12_000, "part_bytes": 8_000}}
    preprocess(config("whole", steps, **settings, output={**output, "folder": str(tmp_path / "whole")}))
    (tmp_path / "c.toml").write_text(dump_toml(config("", steps, **settings, output=output)))
    command = [sys.executable, "-m", "megafp8", "preprocess", str(tmp_path / "c.toml")]
    (tmp_path / "disk").mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=60k", "tmpfs", tmp_path / "disk"], check=False).returncode:
        pytest.skip("this container may not mount")
    try:
        failed = 0
        for size in range(60, 8000, 250):
            subprocess.run(["mount", "-o", f"remount,size={size}k", tmp_path / "disk"], check=True)
            environment = {**ENVIRONMENT, "TMPDIR": str(tmp_path / "disk")}
            done = subprocess.run(command, env=environment, check=False, capture_output=True, text=True)
            if done.returncode == 0:
                break
            failed += 1
            lines = [line for line in done.stderr.splitlines() if "rror" in line]
            assert done.returncode == 6 and len(lines) == 1 and "no space left" in lines[0], done.stderr
            assert not (tmp_path / "disk" / "out" / "manifest.json").exists()
        assert failed > 3 and contents(tmp_path / "whole") == contents(tmp_path / "disk" / "out")
    finally:
        subprocess.run(["umount", tmp_path / "disk"], check=True)
