"""What can be known about a disk is said before the first step; local checkpoints belong to one run."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest

from megafp8.core.errors import ResourceError
from megafp8.train import folder
from megafp8.train.config import load_run_config

TINY = Path(__file__).resolve().parents[3] / "examples/tiny_cpu/pretrain.toml"
EACH = 12 * 5_048_576  # bytes: fp32 master and two moments of each of the example's parameters


def config(tmp_path: Path, *overrides: str):
    return load_run_config(TINY, ["--run.dir", str(tmp_path / "run"), *overrides])


@pytest.mark.parametrize(("free", "said"), [(0.9, "refused"), (1.1, "warned"), (2.9, "warned"), (3.1, "")])
def test_space_for_one_or_for_all_that_are_kept(tmp_path, monkeypatch, caplog, free, said):
    monkeypatch.setattr(logging.getLogger("megafp8"), "propagate", True)
    usage = shutil.disk_usage(tmp_path)._replace(free=int(free * EACH))
    monkeypatch.setattr(folder.shutil, "disk_usage", lambda path: usage)
    if said == "refused":
        with pytest.raises(ResourceError, match=rf"takes {EACH} bytes, {usage.free} are free"):
            folder.prepare(config(tmp_path))
        assert not (tmp_path / "run/config.toml").exists()
    else:
        folder.prepare(config(tmp_path))
        assert ("too little space" in caplog.text) == (said == "warned")


def test_local_checkpoints_are_of_one_run(tmp_path):
    local = ("--checkpoint.local_folder", str(tmp_path / "node"), "--checkpoint.local_interval", "5")
    folder.prepare(config(tmp_path))
    assert folder.local_root(config(tmp_path)) is None
    folder.prepare(config(tmp_path, *local))
    first = folder.local_root(config(tmp_path, *local))
    folder.prepare(config(tmp_path, *local))
    assert first is not None and first.parent == tmp_path / "node" == folder.local_root(config(tmp_path, *local)).parent
    assert first == folder.local_root(config(tmp_path, *local))
    shutil.rmtree(tmp_path / "run")  # begun anew in the same place
    folder.prepare(config(tmp_path, *local))
    assert folder.local_root(config(tmp_path, *local)) != first
