"""Local checkpoints: the newest that every rank has intact, or none of them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from megafp8.checkpoint.config import CheckpointConfig
from megafp8.checkpoint.folders import candidates, step_of
from megafp8.checkpoint.local import LocalSaveError, forget_local, load_newest_local, rank_folder, save_local
from megafp8.core.config import build
from megafp8.core.errors import ConfigError
from megafp8.core.layout import Layout
from megafp8.parallel.mesh import Mesh, build_mesh
from megafp8.parallel.mesh_config import ParallelConfig
from tests.distributed.ranks import run_ranks

LAYOUTS = {"cut": Layout((4, 6), {1: "tp"})}


def state(value: float, columns: int = 6) -> dict[str, torch.Tensor]:
    return {"cut": torch.full((4, columns), value), "whole": torch.full((3,), value)}


def keep(root: Path | str, mesh: Mesh, *steps: int) -> None:
    for step in steps:
        values = state(float(step), 6 // mesh.size("tp"))
        save_local(root, step, values, LAYOUTS, {"step": step}, mesh=mesh)


def newest(root: Path | str, mesh: Mesh, newer_than: int = -1) -> int | None:
    """The step that loads, its values looked at; None leaves everything as it was."""
    target = state(-1.0, 6 // mesh.size("tp"))
    found = load_newest_local(root, target, LAYOUTS, mesh, newer_than=newer_than)
    value = -1.0 if found is None else float(found[1]["step"])
    assert all(bool((tensor == value).all()) for tensor in target.values())
    return None if found is None else found[1]["step"]


def test_the_newest_intact_one_and_what_goes(tmp_path):
    mesh = Mesh.single()
    keep(tmp_path / "run", mesh, 5, 10, 15)
    folder = rank_folder(tmp_path / "run", mesh)
    assert [step_of(path) for path in candidates(folder)] == [15, 10]  # one more than the newest
    assert newest(tmp_path / "run", mesh) == 15 and newest(tmp_path / "run", mesh, newer_than=15) is None
    piece = folder / "step_00000015" / "piece_00000_00.safetensors"
    piece.write_bytes(piece.read_bytes()[:-1] + b"\x7f")
    assert newest(tmp_path / "run", mesh) == 10
    forget_local(tmp_path / "run", mesh, above=10)
    assert [step_of(path) for path in candidates(folder)] == [10]
    forget_local(tmp_path / "run", mesh, above=-1)
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_written_is_an_error_of_its_own(tmp_path):
    (tmp_path / "run").write_text("")
    with pytest.raises(LocalSaveError, match="step 5: no local checkpoint: .*run"):
        keep(tmp_path / "run", Mesh.single(), 5)


def test_folder_and_interval_go_together():
    for values in ({"local_folder": "/scratch"}, {"local_interval": 5}):
        with pytest.raises(ConfigError, match="go together"):
            build(CheckpointConfig, values)


def lost_pieces(rank: int, world: int, root: str) -> list[int | None]:
    """What loads on two ranks: all intact; one damaged on rank 1; one rank's disk lost; another mesh."""
    mesh, found = build_mesh(ParallelConfig(tp=2), world), []
    keep(root, mesh, 5, 10)
    found.append(newest(root, mesh))
    own = rank_folder(root, mesh)
    if rank == 1:
        piece = own / "step_00000010" / "piece_00000_00.safetensors"
        piece.write_bytes(b"\0" * piece.stat().st_size)
    found.append(newest(root, mesh))
    found.append(newest(root, build_mesh(ParallelConfig(dp=2), world)))  # the same ranks with other boxes
    if rank == 1:
        shutil.rmtree(own)
    found.append(newest(root, mesh))
    return found


def test_a_loss_on_one_rank_is_a_loss_on_all(tmp_path):
    assert run_ranks(lost_pieces, 2, str(tmp_path)) == [[10, 5, None, None]] * 2
