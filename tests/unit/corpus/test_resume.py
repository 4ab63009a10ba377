"""Killed, stopped, out of space: whatever happens to a run, calling it again ends in the same bytes."""

from __future__ import annotations

import errno
import functools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megafp8.core.errors import ResourceError
from megafp8.corpus import run as run_module
from megafp8.corpus import tokenize
from megafp8.corpus.run import preprocess

pytestmark = pytest.mark.usefixtures("small_batches")


class Stopped(BaseException):
    """Stands for a kill at a point of our choice."""


def test_interrupted_at_each_batch_ends_in_the_same_bytes(
    contents: Callable, config: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    preprocess(config("whole", source={"max_bad_share": 0.5}))
    add, calls = run_module.Totals.add, [0]

    def stop(self: Any, encoded: Any) -> None:
        calls[0] += 1
        if calls[0] == 3:
            raise Stopped
        add(self, encoded)

    attempts = 0
    while True:
        attempts, calls[0] = attempts + 1, 0
        monkeypatch.setattr(run_module.Totals, "add", stop)
        try:
            preprocess(config(source={"max_bad_share": 0.5}), snapshot_seconds=0)
            break
        except Stopped:
            continue
    assert attempts > 10, "38 batches, two a time"
    assert contents(tmp_path / "whole") == contents(tmp_path / "out")


KILLED = """
import sys
from megafp8.core.config import build, load_toml
from megafp8.corpus import tokenize
from megafp8.corpus.config import CorpusConfig
from megafp8.corpus.run import preprocess
tokenize._BATCH_RECORDS = 16
if __name__ == "__main__":
    preprocess(build(CorpusConfig, load_toml(sys.argv[1])), snapshot_seconds=0)
"""


def test_killed_at_any_time_ends_in_the_same_bytes(contents: Callable, config: Callable, tmp_path: Path) -> None:
    """kill -9 of the whole process after growing delays, then a call that runs through."""
    from megafp8.core.config import dump_toml

    preprocess(config("whole"))
    (tmp_path / "c.toml").write_text(dump_toml(config()))
    (tmp_path / "killed.py").write_text(KILLED)
    command = [sys.executable, str(tmp_path / "killed.py"), str(tmp_path / "c.toml")]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    kills = 0
    for attempt in range(8):
        process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
        try:
            process.wait(timeout=0.25 + 0.06 * attempt)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
            kills += 1
    preprocess(config())
    assert kills, "nothing was killed: the delays are too long for this machine"
    assert contents(tmp_path / "whole") == contents(tmp_path / "out")


def test_killed_while_names_are_given(
    contents: Callable, config: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stops at each rename in turn; the next call must not mix old with new."""
    preprocess(config("whole"))
    replace, count = os.replace, [0]
    for stop_at in range(1, 40):
        count[0] = 0

        def stop(a: Any, b: Any, stop_at: int = stop_at) -> None:
            count[0] += 1
            if count[0] == stop_at:
                raise Stopped
            replace(a, b)

        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", stop)
            try:
                preprocess(config(f"out{stop_at}"), snapshot_seconds=10)
                break
            except Stopped:
                pass
        preprocess(config(f"out{stop_at}"))
        assert contents(tmp_path / "whole") == contents(tmp_path / f"out{stop_at}"), stop_at
    assert stop_at > 8


def test_dead_worker_is_an_error_and_no_hang(config: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenize, "_start_worker", functools.partial(os._exit, 9))
    with pytest.raises(ResourceError, match="one of 2 worker processes died"):
        preprocess(config(output={"workers": 2}))


def test_orphaned_workers_end_themselves(config: Callable, tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(
        "import multiprocessing, os, signal, sys, time\n"
        "from concurrent.futures import ProcessPoolExecutor\n"
        "from megafp8.corpus.tokenize import _start_worker\n"
        "if __name__ == '__main__':\n"
        "    pool = ProcessPoolExecutor(2, multiprocessing.get_context('spawn'), _start_worker)\n"
        "    print(*{pool.submit(os.getpid).result() for _ in range(4)}, flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=environment, timeout=60)
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

    with monkeypatch.context() as patch, pytest.raises(ResourceError, match="no space left"):
        patch.setattr(os, "fsync", full)
        preprocess(config(), snapshot_seconds=0)
    assert not (tmp_path / "out" / "manifest.json").exists() and not (tmp_path / "out" / "train.bin").exists()
    preprocess(config())
    assert contents(tmp_path / "whole") == contents(tmp_path / "out")
