"""Checkpoints over real processes: any tp and dp between save and load, replicas once, failures on all ranks."""

import errno
import json
import os
from pathlib import Path

import pytest
import torch

from megafp8 import checkpoint
from megafp8.checkpoint import storage_writer
from megafp8.core.errors import CheckpointError, ResourceError
from megafp8.core.layout import Layout
from megafp8.parallel.mesh import build_mesh
from megafp8.parallel.mesh_config import ParallelConfig
from tests.distributed.ranks import run_ranks

LAYOUTS = {
    "rows": Layout((8, 6), {0: "tp"}),
    "columns": Layout((6, 8), {1: "tp"}),
    "gate_up": Layout((2, 4, 3), {1: "tp"}),
    "norm": Layout((5,)),
}


def whole():
    """Every element has its own value, so that a piece in the wrong place shows."""
    tensors = {
        n: torch.arange(torch.Size(s.shape).numel()).float().reshape(s.shape) + i
        for i, (n, s) in enumerate(LAYOUTS.items())
    }
    tensors["norm"] = tensors["norm"].bfloat16()
    return tensors


def local(mesh):
    return {name: tensor[LAYOUTS[name].local_slices(mesh)].clone() for name, tensor in whole().items()}


def _mesh(world, tp):
    return build_mesh(ParallelConfig(tp=tp), world)


def _save(rank, world, root, tp):
    mesh = _mesh(world, tp)
    return str(checkpoint.save(root, 5, local(mesh), LAYOUTS, mesh, {"tp": tp}))


def _load(rank, world, path, tp):
    mesh = _mesh(world, tp)
    want = local(mesh)
    got = {name: torch.zeros_like(tensor) for name, tensor in want.items()}
    meta = checkpoint.load(path, got, LAYOUTS, mesh)
    return meta, all(torch.equal(got[name], want[name]) for name in want)


@pytest.mark.parametrize("saved", [(1, 1), (2, 2), (2, 1), (4, 2)], ids=str)
def test_any_mesh_loads_what_any_mesh_saved(tmp_path, saved):
    world, tp = saved
    (path, *others) = run_ranks(_save, world, str(tmp_path), tp)
    assert all(other == path for other in others)
    for name, tensor in checkpoint.load_tensors(path).items():
        assert torch.equal(tensor, whole()[name])
    for load_world, load_tp in [(1, 1), (2, 2), (2, 1)]:
        assert run_ranks(_load, load_world, path, load_tp) == [({"tp": tp}, True)] * load_world


def test_replicas_are_written_once_and_shared_out(tmp_path):
    path = Path(run_ranks(_save, 2, str(tmp_path), 1)[0])
    value = json.loads((path / "manifest.json").read_text())
    assert all(len(entry["pieces"]) == 1 for entry in value["tensors"].values())
    data = sum(file["bytes"] - file["header_bytes"] for file in value["files"].values())
    assert data == sum(t.numel() * t.element_size() for t in whole().values())
    assert len(value["files"]) == 2  # both ranks wrote a part


def _full_disk(path, boxes):
    path.write_bytes(b"half")
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


def _fail_on_rank_1(rank, world, root):
    mesh = _mesh(world, 2)
    if rank == 1:
        storage_writer.write_piece_file = _full_disk
    try:
        checkpoint.save(root, 6, local(mesh), LAYOUTS, mesh, {})
    except ResourceError as error:
        return str(error)
    return "saved"


def test_one_ranks_full_disk_fails_on_all_and_leaves_the_old_one(tmp_path):
    path = run_ranks(_save, 2, str(tmp_path), 2)[0]
    first, second = run_ranks(_fail_on_rank_1, 2, str(tmp_path))
    assert first == second and "no space left" in first
    assert os.listdir(tmp_path) == [Path(path).name]


def _load_newest(rank, world, root):
    mesh = _mesh(world, 2)
    got = {name: torch.zeros_like(tensor) for name, tensor in local(mesh).items()}
    found = checkpoint.load_newest(root, got, LAYOUTS, mesh)
    return str(found[0]) if found else None


def test_damage_that_one_rank_meets_makes_all_take_the_older_one(tmp_path):
    old = run_ranks(_save, 2, str(tmp_path), 2)[0]
    new = Path(old).with_name("step_00000007")
    os.rename(old, new)
    run_ranks(_save, 2, str(tmp_path), 2)
    piece = new / "piece_00001_00.safetensors"
    data = bytearray(piece.read_bytes())
    data[-1] ^= 1
    piece.write_bytes(data)
    assert run_ranks(_load_newest, 2, str(tmp_path)) == [old, old]


def _other_shape(rank, world, path):
    mesh = _mesh(world, 2)
    tensors, layouts = local(mesh), dict(LAYOUTS)
    tensors["rows"], layouts["rows"] = torch.zeros(5, 6), Layout((10, 6), {0: "tp"})
    try:
        checkpoint.load(path, tensors, layouts, mesh)
    except CheckpointError as error:
        return str(error)
    return "loaded"


def test_a_mismatch_is_the_same_line_on_all_ranks(tmp_path):
    path = run_ranks(_save, 2, str(tmp_path), 2)[0]
    first, second = run_ranks(_other_shape, 2, path)
    assert first == second and "rows has shape (10, 6) here, (8, 6) there" in first


def passed_over(rank: int, world: int, root: str) -> str:
    """The folder that every rank has loaded when the newest two are damaged."""
    mesh = build_mesh(ParallelConfig(dp=2), world)
    target = {"w": torch.zeros(6)}
    for step in (1, 2, 3):
        checkpoint.save(root, step, {"w": torch.full((6,), float(step))}, {}, mesh, {"step": step})
    if rank == 0:
        for step in (2, 3):
            piece = next(Path(f"{root}/step_{step:08d}").glob("*.safetensors"))
            data = bytearray(piece.read_bytes())
            data[-3] ^= 8
            piece.write_bytes(data)
    torch.distributed.barrier()
    found = checkpoint.load_newest(root, target, {}, mesh)
    assert found is not None and torch.equal(target["w"], torch.ones(6))
    return found[0].name


def test_all_ranks_pass_over_the_same_damage_and_one_sets_it_aside(tmp_path):
    assert run_ranks(passed_over, 2, str(tmp_path)) == ["step_00000001"] * 2
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "step_00000001", "step_00000002.damaged-1", "step_00000003.damaged-1"
    ]  # fmt: skip
