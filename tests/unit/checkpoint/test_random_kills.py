"""500 kills at random moments of saves and prunes, waiting and in the background: a complete checkpoint is always left.

Slow; run with `pytest --run-slow` as `make test-all` does. The moments of the quick tests are chosen, these are not.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import signal
import sys
import time
from pathlib import Path

import pytest
import torch

from megafp8 import checkpoint
from megafp8.checkpoint import CheckpointConfig
from megafp8.checkpoint.asynchronous import AsyncSaver
from megafp8.checkpoint.folders import candidates, step_of
from megafp8.checkpoint.staging import Staging
from megafp8.core.errors import CheckpointError
from megafp8.parallel.mesh import Mesh

KILLS = 250  # in each mode
NAMES = [f"layer.{i}" for i in range(8)]


def trainer(root: str, mode: str, pipe: object) -> None:
    """Save a step after the other until killed; the values tell the step."""
    kept = checkpoint.latest(Path(root))
    step, mesh, config = 0 if kept is None else step_of(kept), Mesh.single(), CheckpointConfig(keep_last=1)
    staging = Staging(60.0)
    saver = AsyncSaver(root, mesh, config, staging)
    while True:
        step += 1
        tensors = {name: torch.full((40_000,), float(step)) for name in NAMES}
        pipe.send(-1 if staging._process is None else staging._process.pid)  # type: ignore[attr-defined]
        if mode == "waits":
            checkpoint.save(root, step, tensors, {}, mesh, {"step": step}, threads=2)
            checkpoint.prune(Path(root), config)
        else:
            saver.begin(step, tensors, {}, {"step": step})
            try:
                saver.wait()
            except CheckpointError as error:
                assert "signal 9" in str(error)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "darwin", reason="fork after torch is unsafe there")
@pytest.mark.parametrize("mode", ["waits", "background"])
def test_random_kills(tmp_path, mode):
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "megafp8.checkpoint.asynchronous", "megafp8.parallel.mesh"])
    random_, steps = random.Random(20261130), set()
    checkpoint.save(tmp_path, 1, {name: torch.ones(40_000) for name in NAMES}, {}, Mesh.single(), {"step": 1})
    for number in range(KILLS):
        ours, theirs = context.Pipe()
        process = context.Process(target=trainer, args=(str(tmp_path), mode, theirs), daemon=True)
        process.start()
        pid = ours.recv()  # it has begun
        while mode == "background" and pid < 0:  # and its writer has
            pid = ours.recv()
        time.sleep(random_.uniform(0, 0.3))
        while ours.poll():
            pid = ours.recv()
        if pid > 0 and number % 3 == 0:  # the writer alone, and some time for what comes of it
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            time.sleep(random_.uniform(0, 0.2))
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        newest = checkpoint.latest(tmp_path)
        assert newest is not None, f"kill {number}: nothing loads"
        for path in candidates(tmp_path):  # also the one that was on its way out
            checkpoint.verify(path)
            for tensor in checkpoint.load_tensors(path).values():
                assert bool((tensor == step_of(path)).all()), f"kill {number}: a mix of steps"
        steps.add(step_of(newest))
    assert len(steps) > KILLS // 8  # it saved in between
