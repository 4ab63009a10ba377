"""Saves in the background on several ranks: one checkpoint of all shares, one failure for all ranks."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import torch

from megafp8 import checkpoint
from megafp8.checkpoint import CheckpointConfig, asynchronous, commit
from megafp8.checkpoint.asynchronous import AsyncSaver
from megafp8.checkpoint.staging import Staging
from megafp8.core.errors import CheckpointError, ResourceError
from megafp8.core.layout import Layout
from megafp8.parallel.mesh import build_mesh
from megafp8.parallel.mesh_config import ParallelConfig
from tests.distributed.ranks import run_ranks

LAYOUTS = {"columns": Layout((6, 40), {0: "tp"}), "rows": Layout((9, 8), {1: "tp"})}


def state(mesh: Any, seed: int) -> dict[str, torch.Tensor]:
    """This rank's part of two cut tensors, and a replica."""
    random = torch.Generator().manual_seed(seed)
    whole = {name: torch.randn(layout.shape, generator=random) for name, layout in LAYOUTS.items()}
    cut = {name: tensor[LAYOUTS[name].local_slices(mesh)].clone() for name, tensor in whole.items()}
    return cut | {"replica": torch.randn(50, 3, generator=random)}


def outcomes(rank: int, world: int, root: str) -> list[str]:
    """One good save, one whose process is killed on the last rank, one without space, one more good one."""
    mesh = build_mesh(ParallelConfig(tp=2), world)
    staging, found = Staging(30.0), []
    saver = AsyncSaver(root, mesh, CheckpointConfig(), staging)
    for step, fault in enumerate(("", "killed", "no space", ""), start=1):
        if fault == "killed":
            os.kill(staging._process.pid, signal.SIGSTOP)
        if fault == "no space" and rank == 0:
            asynchronous.space_for = lambda *sizes: 1 << 60
        try:
            saver.begin(step, state(mesh, step), LAYOUTS, {"step": step})
            if fault == "killed" and rank == world - 1:
                time.sleep(0.1)
                os.kill(staging._process.pid, signal.SIGKILL)
            elif fault == "killed":
                os.kill(staging._process.pid, signal.SIGCONT)
            saved = saver.wait()
            found.append(f"saved {saved.step}")
        except (CheckpointError, ResourceError) as error:
            found.append(str(error))
        if fault == "no space" and rank == 0:
            asynchronous.space_for = commit.space_for
    waits = checkpoint.save(Path(root) / "waits", 4, state(mesh, 4), LAYOUTS, mesh, {"step": 4}, threads=2)
    found.append(str(waits))
    staging.close()
    return found


def test_all_ranks_hear_the_same_and_only_complete_checkpoints_appear(tmp_path):
    first, *others = run_ranks(outcomes, 2, str(tmp_path))
    assert all(other == first for other in others)
    good, killed, full, again, waits = first
    assert good == "saved 1" and again == "saved 4"
    assert "step 2 was not saved: rank 1: the process that writes checkpoints was killed (signal 9" in killed
    assert f"needs {1 << 60} bytes" in full
    assert sorted(os.listdir(tmp_path)) == ["step_00000001", "step_00000004", "waits"]
    for file in Path(waits).iterdir():  # byte for byte what a save that waits has written
        assert file.read_bytes() == (tmp_path / "step_00000004" / file.name).read_bytes()
    checkpoint.verify(tmp_path / "step_00000001")
