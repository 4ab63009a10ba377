"""F19, F35: what may lie where checkpoints are looked for; eight ranks that open one corpus at once."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch

from megafp8 import checkpoint
from megafp8.core.errors import MegaError
from megafp8.data.indexed import IndexedDataset
from megafp8.parallel.mesh import Mesh
from tests.distributed.ranks import run_ranks


def _odd(newest: Path, kind: str) -> None:
    """Do `kind` to the newest of three checkpoints."""
    whole = newest.with_name("whole")
    newest.rename(whole)
    if kind == "dangling link":
        newest.symlink_to(newest.with_name("nowhere"))
    elif kind == "empty folder":
        newest.mkdir()
    elif kind == "file":
        newest.write_bytes(os.urandom(64))
    elif kind == "future step":
        shutil.copytree(whole, newest.with_name("step_99999999"))
    elif kind == "pointers":
        for name in ("latest", "latest.txt", "latest_checkpointed_iteration.txt"):
            newest.with_name(name).write_text("99999999")
    shutil.rmtree(whole)


@pytest.mark.parametrize("kind", ["removed", "dangling link", "empty folder", "file", "future step", "pointers"])
def test_what_is_no_checkpoint_is_passed_over_and_never_a_start_from_nothing(tmp_path, kind):
    for step in (1, 2, 3):
        checkpoint.save(tmp_path, step, {"x": torch.full((5,), float(step))}, {}, Mesh.single(), {"step": step})
    _odd(tmp_path / "step_00000003", kind)
    target = {"x": torch.zeros(5)}
    found = checkpoint.load_newest(tmp_path, target, {}, Mesh.single())
    assert found is not None and found[1] == {"step": 2} and target["x"].tolist() == [2.0] * 5
    for name in ("step_00000001", "step_00000002"):
        (tmp_path / name / "manifest.json").write_text("{}")
    with pytest.raises(MegaError):  # all there are do not load: that is no new run
        checkpoint.load_newest(tmp_path, target, {}, Mesh.single())


def test_retention_goes_by_the_step_and_not_by_the_clock(tmp_path):
    for step in (1, 2, 3):
        path = checkpoint.save(tmp_path, step, {"x": torch.ones(5)}, {}, Mesh.single(), {"step": step})
        os.utime(path, (1e9 - step, 1e9 - step))
    checkpoint.prune(tmp_path, checkpoint.CheckpointConfig(keep_last=1))
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000003"]


def _opens(rank: int, world: int, prefix: str) -> list[int]:
    found = []
    for _ in range(50):
        found.append(int(IndexedDataset(prefix).num_tokens))
    return found


def test_eight_ranks_open_one_corpus_and_build_nothing(data):
    """F34, F35: there is no cache of indexes that could be cut, stale or built twice."""
    before = {path.name: path.stat().st_mtime_ns for path in data.iterdir()}
    told = run_ranks(_opens, 8, str(data / "train"))
    assert len({number for rank in told for number in rank}) == 1
    assert before == {path.name: path.stat().st_mtime_ns for path in data.iterdir()}
