"""Retention keeps what it says and never the wrong last one; kill -9 at any call leaves a complete checkpoint."""

import multiprocessing
import os
import signal
import sys

import pytest
import torch

from megafp8 import checkpoint
from megafp8.checkpoint import CheckpointConfig
from megafp8.checkpoint.folders import candidates, step_of
from megafp8.core.config import build
from megafp8.core.errors import ConfigError
from megafp8.parallel.mesh import Mesh

MESH = Mesh.single()


def save(root, step):
    return checkpoint.save(root, step, {"x": torch.full((64,), float(step))}, {}, MESH, {"step": step})


def steps(root):
    return sorted(step_of(path) for path in candidates(root))


@pytest.mark.parametrize(
    ("last", "every", "kept"), [(1, 0, [60]), (2, 0, [50, 60]), (1, 20, [20, 40, 60]), (9, 0, [10, 20, 30, 40, 50, 60])]
)
def test_keeps_the_last_and_every_nth(tmp_path, last, every, kept):
    for step in range(10, 70, 10):
        save(tmp_path, step)
    checkpoint.prune(tmp_path, CheckpointConfig(keep_last=last, keep_every=every))
    assert steps(tmp_path) == kept and all(p.name.startswith("step_") for p in tmp_path.iterdir())


def test_broken_ones_do_not_count_as_the_last(tmp_path):
    for step in (1, 2, 3):
        save(tmp_path, step)
    (tmp_path / "step_00000003" / "piece_00000_00.safetensors").unlink()
    assert checkpoint.prune(tmp_path, CheckpointConfig(keep_last=1)) == [tmp_path / "step_00000001"]
    assert steps(tmp_path) == [2, 3] and checkpoint.latest(tmp_path).name == "step_00000002"


def test_what_an_earlier_attempt_has_saved_counts_too(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "step_12.old").mkdir()
    for step in (*range(10, 50, 10), 50, 60):  # the second attempt knows of the first one's only what is on disk
        save(tmp_path, step)
        checkpoint.prune(tmp_path, CheckpointConfig(keep_last=2, keep_every=30))
    assert steps(tmp_path) == [30, 50, 60]
    assert (tmp_path / "mine").is_dir() and (tmp_path / "step_12.old").is_dir()


def test_keeping_none_cannot_be_asked_for():
    with pytest.raises(ConfigError, match="keep_last"):
        build(CheckpointConfig, {"keep_last": 0})


def _die_at_call(root, number):
    """Save step 2, save it again, prune, and die at the `number`-th call that changes the disk."""
    calls = [0]
    for name in ("write", "fsync", "rename", "replace", "mkdir", "unlink", "rmdir", "open"):
        real = getattr(os, name)

        def call(*args, real=real, **kwargs):
            calls[0] += 1
            if calls[0] == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)

        setattr(os, name, call)
    save(root, 2)
    save(root, 2)
    checkpoint.prune(root, CheckpointConfig(keep_last=1))


@pytest.mark.skipif(sys.platform == "darwin", reason="fork after torch is unsafe there")
def test_kill_9_at_every_call_leaves_a_complete_checkpoint(tmp_path):
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "megafp8.checkpoint.write", "megafp8.parallel.mesh"])
    seen, number, ended = set(), 0, False
    while not ended:
        number += 1
        root = tmp_path / str(number)
        save(root, 1)
        process = context.Process(target=_die_at_call, args=(root, number))
        process.start()
        process.join(60)
        ended = process.exitcode == 0
        assert ended or process.exitcode == -signal.SIGKILL
        newest = checkpoint.latest(root)
        assert newest is not None, f"killed at call {number}: nothing loads"
        checkpoint.verify(newest)
        step = step_of(newest)
        assert torch.equal(checkpoint.load_tensors(newest)["x"], torch.full((64,), float(step)))
        seen.add(step)
        save(root, 3)  # the next run goes on, and clears what was left
        checkpoint.prune(root, CheckpointConfig(keep_last=1))
        assert sorted(p.name for p in root.iterdir()) == ["step_00000003"]
    assert seen == {1, 2} and number > 20  # the kills fell before and after the commit
