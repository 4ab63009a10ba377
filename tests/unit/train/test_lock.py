"""train/lock: two jobs never write into one run folder, on one host or on two; what a dead one held is taken over."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megafp8.core.errors import ResourceError
from megafp8.train import lock as lock_module
from megafp8.train.lock import RunLock

ROOT = Path(__file__).resolve().parents[3]


def _short(folder: Path) -> RunLock:
    return RunLock(folder, beat_seconds=0.05, stale_seconds=0.4)


def test_the_lock_names_its_holder_and_ends_with_the_process(tmp_path, caplog):
    code = (
        "import sys, time; from pathlib import Path; from megafp8.train.lock import RunLock\n"
        f"lock = RunLock(Path({str(tmp_path)!r})); lock.acquire(); print('held', flush=True); time.sleep(60)"
    )
    holder = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert holder.stdout is not None and holder.stdout.readline() == "held\n"
    with pytest.raises(ResourceError, match=f'in use by .*"pid": {holder.pid}'):
        RunLock(tmp_path).acquire()
    holder.kill()
    holder.wait()
    lock = RunLock(tmp_path)
    lock.acquire()
    lock.check()
    lock.release()
    assert json.loads((tmp_path / "lock").read_text())["released"]


@pytest.fixture
def no_kernel_locks(monkeypatch):
    """A file system on which every host has locks of its own."""
    monkeypatch.setattr(lock_module.fcntl, "flock", lambda file, how: None)


def _on(host: str, monkeypatch, lock: RunLock) -> None:
    monkeypatch.setattr(lock_module.socket, "gethostname", lambda: host)
    lock.acquire()


def test_a_live_job_on_another_host_is_seen_by_its_heartbeat(tmp_path, monkeypatch, no_kernel_locks):
    first = _short(tmp_path)
    _on("a", monkeypatch, first)
    with pytest.raises(ResourceError, match='in use by .*"host": "a"'):
        _on("b", monkeypatch, _short(tmp_path))
    first.release()
    begin = time.monotonic()
    third = _short(tmp_path)
    _on("b", monkeypatch, third)  # let go: nothing to wait for
    assert time.monotonic() - begin < 0.3
    third.release()


def test_what_a_dead_job_on_another_host_held_is_taken_over_and_it_would_notice(tmp_path, monkeypatch, no_kernel_locks):
    silent = RunLock(tmp_path, beat_seconds=1.0, stale_seconds=9.0)
    _on("a", monkeypatch, silent)
    taker = _short(tmp_path)
    _on("b", monkeypatch, taker)  # 0.4 s without a beat
    end = time.monotonic() + 5
    while not silent.lost and time.monotonic() < end:
        time.sleep(0.02)
    with pytest.raises(ResourceError, match="no longer this job's"):
        silent.check()
    silent.release()
    assert json.loads((tmp_path / "lock").read_text())["host"] == "b"  # and leaves it alone
    taker.check()
    taker.release()


def test_a_removed_lock_file_is_noticed(tmp_path):
    lock = _short(tmp_path)
    lock.acquire()
    (tmp_path / "lock").unlink()
    end = time.monotonic() + 5
    while not lock.lost and time.monotonic() < end:
        time.sleep(0.02)
    with pytest.raises(ResourceError, match="it was removed"):
        lock.check()
    lock.release()
