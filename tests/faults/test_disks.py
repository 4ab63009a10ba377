"""F03, F05, F16 to F18: disks that stop at any byte, that are slow, that refuse, and power that goes."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest
import torch

from megafp8 import checkpoint
from megafp8.checkpoint import latest, verify
from megafp8.checkpoint.folders import candidates, step_of
from megafp8.core.errors import ResourceError
from megafp8.parallel.mesh import Mesh
from tests.faults.attempts import attempt, forks
from tests.faults.conftest import WORDS
from tests.journeys.runs import overrides, records

SEED = 3
NAMES = [f"layer.{i}" for i in range(6)]


def values(step: int) -> dict[str, torch.Tensor]:
    return {name: torch.full((3_000,), float(step)) for name in NAMES}


def save_until(root: str, limit: int, step: int, dies: bool) -> None:
    """Save a step; no file may grow beyond `limit` bytes: the write that would is cut there, then killed or refused."""
    if dies:
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    try:
        checkpoint.save(root, step, values(step), {}, Mesh.single(), {"step": step})
    except ResourceError as error:
        assert str(error) == f"{root}: File too large"
        os._exit(6)


def intact(root: Path) -> list[int]:
    """The steps under `root`, each with its own values and no others."""
    for path in candidates(root):
        verify(path)
        for tensor in checkpoint.load_tensors(path).values():
            assert bool((tensor == step_of(path)).all()), f"{path}: a mix of steps"
    return [step_of(path) for path in candidates(root)]


@forks
@pytest.mark.parametrize("ends", [40, pytest.param(400, marks=pytest.mark.slow)])
def test_ends_at_random_bytes_of_a_write(tmp_path, ends):
    """F03 (and a quota's limit, F18): every second one is refused there, the others are killed."""
    rng, context = random.Random(SEED), multiprocessing.get_context("forkserver")
    saved = checkpoint.save(tmp_path, 1, values(1), {}, Mesh.single(), {"step": 1})
    size, again = (saved / "piece_00000_00.safetensors").stat().st_size, 0
    for number in range(ends):
        step = rng.choice([1, 2])  # also over the same step
        process = context.Process(target=save_until, args=(str(tmp_path), rng.randrange(size), step, number % 2 == 0))
        process.start()
        process.join(60)
        assert process.exitcode == (-signal.SIGXFSZ if number % 2 == 0 else 6), f"end {number}, seed {SEED}"
        assert intact(tmp_path) == [1], f"end {number}, seed {SEED}"
        again += step == 1
    assert 0.2 * ends < again < 0.8 * ends
    checkpoint.save(tmp_path, 2, values(2), {}, Mesh.single(), {"step": 2})
    assert sorted(os.listdir(tmp_path)) == ["step_00000001", "step_00000002"]  # and what they left is gone


@forks
@pytest.mark.parametrize("mode", ["false", "true"], ids=["sync", "async"])
def test_refusals_of_one_ranks_disk_are_all_ranks_and_cost_a_save_each(config, tmp_path, as_calm, mode):
    """F17, F18: the run goes on as often as it may, else stops; the next attempt is as if nothing had been."""
    some = ["save-piece:full:1:*#1", "save-written:io:1:*#2", "save-piece:quota:1:*#3"]
    words = [*WORDS, *overrides(checkpoint__asynchronous=mode)]
    first = attempt(config, 2, [*words, *overrides(checkpoint__max_failed_saves=0)], orders="save-piece:readonly:1:*")
    assert first.codes[0] == 6 and first.codes[1] == 6, first.said
    assert "read-only file system" in first.said and latest(tmp_path / "run/checkpoints") is None
    assert not list((tmp_path / "run/checkpoints").iterdir())
    orders = tmp_path / "orders"
    allowed = [*words, *overrides(checkpoint__max_failed_saves=3)]
    ended = attempt(config, 2, allowed, orders=" ".join(some), folder=orders)
    assert ended.codes == [0, 0], ended.said
    events = records(tmp_path / "run", "event")
    failed = [e["reason"] for e in events if e["event"] == "save failed"]
    for word in ("no space left", "input/output error", "disk quota exceeded"):
        assert any(word in reason for reason in failed), failed
    steps = [e["step"] for e in events if e["event"] == "saved"]
    assert steps[-1] == 30 and len(steps) + len(failed) - 1 == 6  # nothing that failed was said to be saved
    assert as_calm()
    verify(latest(tmp_path / "run/checkpoints"))


@forks
def test_a_slow_disk_costs_no_step_and_saves_do_not_pile_up(config, tmp_path, as_calm):
    """F16: writes of 1 s each, a save due every second step."""
    slow = " ".join(f"save-piece:sleep:*:*:1#{number}" for number in range(5))
    words = [*WORDS, *overrides(checkpoint__asynchronous="true", checkpoint__interval=2)]
    ended = attempt(config, 2, words, orders=slow)
    assert ended.codes == [0, 0], ended.said
    open_, most, between = 0, 0, 0
    for line in (tmp_path / "run/log.txt").read_text().splitlines():
        open_ += "checkpoint is being written" in line
        open_ -= "checkpoint saved" in line
        between += open_ > 0 and "iteration " in line
        most = max(most, open_)
    assert most == 1 and between >= 1  # one under way, and steps while it was
    assert as_calm()


@pytest.mark.slow
@pytest.mark.skipif(os.getuid() != 0, reason="only root mounts a file system")
@forks
def test_a_disk_that_is_really_full_at_random_bytes(config, tmp_path, as_calm):
    """F17: a tmpfs of random sizes; then with room again."""
    rng, disk = random.Random(SEED), tmp_path / "run/checkpoints"
    disk.mkdir(parents=True)
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", disk], check=False).returncode:
        pytest.skip("this container may not mount")
    try:
        words = [*WORDS, *overrides(checkpoint__keep_last=1, checkpoint__asynchronous="true")]
        assert attempt(config, 2, [*words, *overrides(train__exit_after_seconds=2)]).codes[0] in (0, 75)
        ballast = disk.parent / "x"
        for _ in range(6):
            kept = [step_of(path) for path in candidates(disk)]
            used = sum(file.stat().st_size for file in disk.rglob("*") if file.is_file())
            size = (used >> 10) + rng.randrange(8, 2000)
            subprocess.run(["mount", "-o", f"remount,size={size}k", disk], check=True)
            ended = attempt(config, 2, words)
            assert ended.codes[0] in (0, 6), ended.said
            assert ended.codes[0] == 0 or "free" in ended.said or "no space" in ended.said
            for path in candidates(disk):
                verify(path)
            assert max([step_of(path) for path in candidates(disk)], default=-1) >= max(kept, default=-1)
        ballast.unlink(missing_ok=True)
        subprocess.run(["mount", "-o", "remount,size=8m", disk], check=True)
        attempt(config, 2, words)
        assert as_calm()
    finally:
        subprocess.run(["umount", disk], check=True)


def save_for_ever(root: str) -> None:
    step = 1
    while True:
        step += 1
        checkpoint.save(root, step, values(step), {}, Mesh.single(), {"step": step})
        checkpoint.prune(Path(root), checkpoint.CheckpointConfig(keep_last=2))
        (Path(root) / "told").write_text(str(step))


@pytest.mark.slow
@pytest.mark.skipif(os.getuid() != 0 or not shutil.which("mkfs.ext4"), reason="only root mounts a file system")
@forks
def test_fifty_power_cuts(tmp_path):
    """F05: an image of a mounted ext4 is copied as it lies on the disk, without a sync, and mounted: as after a cut."""
    rng, image, disk, after = random.Random(SEED), tmp_path / "image", tmp_path / "disk", tmp_path / "after"
    with open(image, "wb") as file:
        file.truncate(24 << 20)
    subprocess.run(["mkfs.ext4", "-q", "-F", image], check=True)
    for folder in (disk, after):
        folder.mkdir()
    if subprocess.run(["mount", "-o", "loop", image, disk], check=False).returncode:
        pytest.skip("this container may not mount")
    process = multiprocessing.get_context("forkserver").Process(target=save_for_ever, args=(str(disk / "ck"),))
    found = set()
    try:
        checkpoint.save(disk / "ck", 1, values(1), {}, Mesh.single(), {"step": 1})
        process.start()
        for number in range(50):
            time.sleep(rng.uniform(0.0, 0.3))
            with contextlib.suppress(OSError):
                told = int((disk / "ck/told").read_text() or 0)
            held = psutil.Process(process.pid)
            held.suspend()  # a copy takes a moment, in which blocks that it has passed would be given to others
            while held.status() != psutil.STATUS_STOPPED:
                time.sleep(0.001)
            shutil.copyfile(image, tmp_path / "cut")
            held.resume()
            subprocess.run(["mount", "-o", "loop", tmp_path / "cut", after], check=True)
            try:
                newest = latest(after / "ck")
                assert newest is not None, f"cut {number}: nothing loads"
                intact(after / "ck")
                found.add(step_of(newest))
            finally:
                subprocess.run(["umount", after], check=True)
        assert len(found) > 10 and told > 10
    finally:
        process.kill()
        process.join()
        subprocess.run(["umount", disk], check=True)
    print(json.dumps({"cuts": 50, "steps found": len(found)}))
