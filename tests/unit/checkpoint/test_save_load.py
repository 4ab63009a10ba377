"""What is saved comes back bit for bit; what differs is refused, all of it listed; nothing is half-written."""

import errno
import json
import mmap
import os
import shutil
import stat
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megafp8 import checkpoint
from megafp8.checkpoint import commit, direct, planners, storage_writer
from megafp8.checkpoint.folders import candidates, step_of
from megafp8.checkpoint.manifest import MismatchError
from megafp8.checkpoint.planners import grouped
from megafp8.checkpoint.storage_reader import PieceReader
from megafp8.core.errors import CheckpointError, ResourceError
from megafp8.core.layout import Layout
from megafp8.parallel.mesh import Mesh

MESH = Mesh.single()


def state(seed=0):
    random = torch.Generator().manual_seed(seed)
    return {
        "a.weight": torch.randn(4, 6, generator=random),
        "b.weight": torch.randn(5, 3, generator=random).bfloat16(),
        "double": torch.randn(3, generator=random, dtype=torch.float64),
        "scalar": torch.tensor(3.5),
        "bytes": torch.arange(7, dtype=torch.uint8),
        "long": torch.tensor([2**40, -1]),
        "empty": torch.empty(0, 3),
        "transposed": torch.randn(3, 8, generator=random).T,
        "nan": torch.tensor([float("nan"), float("inf"), -0.0]),
    }


def zeros(tensors):
    return {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}


def same(a, b):
    """Equal bit for bit, NaN and -0 included."""
    return a.keys() == b.keys() and all(
        a[k].dtype == b[k].dtype
        and a[k].shape == b[k].shape
        and torch.equal(
            a[k].contiguous().reshape(-1).view(torch.uint8), b[k].contiguous().reshape(-1).view(torch.uint8)
        )
        for k in a
    )


def save(root, step=10, tensors=None, meta=None):
    return checkpoint.save(root, step, tensors or state(), {}, MESH, meta if meta is not None else {"step": step})


def test_round_trip(tmp_path):
    meta = {"step": 10, "config": {"name": "größe", "lr": 1e-3}, "list": [1, None, True]}
    path = save(tmp_path / "ck", meta=meta)
    assert path == tmp_path / "ck" / "step_00000010" == checkpoint.latest(tmp_path / "ck")
    target = zeros(state())
    assert checkpoint.load(path, target, {}, MESH) == meta == checkpoint.read_meta(path)
    assert same(target, state()) and same(checkpoint.load_tensors(path), state())
    assert set(checkpoint.load_tensors(path, "a.")) == {"a.weight"}
    checkpoint.verify(path)


def test_pieces_are_plain_safetensors(tmp_path):
    path = save(tmp_path)
    files = sorted(p for p in path.iterdir() if p.suffix == ".safetensors")
    assert len(files) == 1 and same(load_file(files[0]), state())
    assert {p.name for p in path.iterdir()} == {"manifest.json", files[0].name}
    assert json.loads((path / "manifest.json").read_text())["tensors"]["a.weight"]["shape"] == [4, 6]


def test_large_shares_are_split_over_files(tmp_path, monkeypatch):
    monkeypatch.setattr(storage_writer, "PIECE_FILE_BYTES", 100)
    path = save(tmp_path)
    assert len(list(path.glob("*.safetensors"))) > 2
    assert same(checkpoint.load_tensors(path), state())


def test_modes_exclude_the_world(tmp_path):
    old = os.umask(0)
    try:
        path = save(tmp_path / "ck")
    finally:
        os.umask(old)
    assert stat.S_IMODE(path.stat().st_mode) == 0o750
    assert {stat.S_IMODE(p.stat().st_mode) for p in path.iterdir()} == {0o640}


def test_every_file_and_folder_is_synced_before_the_commit(tmp_path, monkeypatch):
    done = []
    for name in ("fsync", "rename", "replace"):
        real = getattr(os, name)

        def call(*args, name=name, real=real):
            inode = os.fstat(args[0]).st_ino if name == "fsync" else None
            done.append((name, inode, Path(args[1]).name if inode is None else ""))
            return real(*args)

        monkeypatch.setattr(os, name, call)
    path = save(tmp_path / "run" / "ck")
    commit = done.index(("rename", None, path.name))
    synced = {inode for name, inode, _ in done[:commit] if name == "fsync"}
    assert {p.stat().st_ino for p in [tmp_path, tmp_path / "run", path, *path.iterdir()]} <= synced
    assert ("fsync", path.parent.stat().st_ino, "") in done[commit:]


def test_a_step_saved_again_replaces_the_old_one(tmp_path):
    save(tmp_path)
    path = save(tmp_path, tensors=state(1), meta={"second": True})
    assert os.listdir(tmp_path) == [path.name]
    assert same(checkpoint.load_tensors(path), state(1)) and checkpoint.read_meta(path) == {"second": True}


def test_differences_are_listed_and_nothing_is_touched(tmp_path):
    path = save(tmp_path)
    target = zeros(state())
    target["a.weight"] = torch.zeros(4, 5)
    target["b.weight"] = torch.zeros(5, 3)
    with pytest.raises(
        MismatchError, match=r"a.weight has shape \(4, 5\) here, \(4, 6\) there; b.weight is float32 here"
    ):
        checkpoint.load(path, target, {}, MESH)
    assert all(not t.any() for t in target.values())
    target = {"a.weight": torch.zeros(4, 6), "c": torch.zeros(1)}
    with pytest.raises(MismatchError, match=r"c is not in the checkpoint; b.weight is in the checkpoint only"):
        checkpoint.load(path, target, {}, MESH)
    assert not target["a.weight"].any()
    checkpoint.load(path, target, {}, MESH, strict=False)
    assert torch.equal(target["a.weight"], state()["a.weight"]) and not target["c"].any()


def test_meta_that_is_no_json_fails_before_anything_is_written(tmp_path):
    with pytest.raises(TypeError):
        save(tmp_path / "ck", meta={"x": {1, 2}})
    assert not (tmp_path / "ck").exists()


def test_too_little_space_is_told_before_writing(tmp_path, monkeypatch):
    old = save(tmp_path, 1)
    usage = commit.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(commit.shutil, "disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(ResourceError, match=r"the checkpoint needs \d+ bytes, 1000 are free"):
        save(tmp_path, 2)
    assert os.listdir(tmp_path) == [old.name]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
def test_a_write_that_fails_leaves_nothing_half_written(tmp_path, monkeypatch, code):
    old = save(tmp_path, 1)
    monkeypatch.setattr(direct, "_CHUNK", mmap.PAGESIZE)  # several writes even of this little
    real, calls = os.write, []

    def write(fd, data):
        calls.append(fd)
        if len(calls) == 2:
            raise OSError(code, os.strerror(code))
        return real(fd, data)

    monkeypatch.setattr(os, "write", write)
    with pytest.raises(ResourceError):
        save(tmp_path, 2, state() | {"long": torch.arange(2000)})
    monkeypatch.undo()
    assert os.listdir(tmp_path) == [old.name]
    assert same(checkpoint.load_tensors(old), state())


def test_a_path_that_is_a_file(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(ResourceError, match="is a file, not a folder"):
        save(tmp_path / "file")
    with pytest.raises(ResourceError, match="not a folder"):
        save(tmp_path / "file" / "ck")
    assert checkpoint.latest(tmp_path / "file") is None


def test_find_takes_a_checkpoint_a_run_or_its_folder(tmp_path):
    path = save(tmp_path / "run" / "checkpoints")
    for given in (path, tmp_path / "run", tmp_path / "run" / "checkpoints", str(path)):
        assert checkpoint.find(given) == path
    with pytest.raises(CheckpointError, match="no such folder"):
        checkpoint.find(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="holds no complete checkpoint"):
        checkpoint.find(tmp_path)


def test_load_newest_starts_from_nothing_only_where_there_is_nothing(tmp_path):
    assert checkpoint.load_newest(tmp_path, zeros(state()), {}, MESH) is None
    paths = [save(tmp_path, step, state(step)) for step in (1, 2)]
    target = zeros(state())
    assert checkpoint.load_newest(tmp_path, target, {}, MESH) == (paths[1], {"step": 2})
    with pytest.raises(MismatchError):  # the older one would be no better answer for another model
        checkpoint.load_newest(tmp_path, {"other": torch.zeros(1)}, {}, MESH)
    for path in paths:
        (path / "piece_00000_00.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="none of 2 checkpoints is intact"):
        checkpoint.load_newest(tmp_path, target, {}, MESH)


def test_steps_order_by_number_and_foreign_names_do_not_count(tmp_path):
    for step in (9, 10, 123456789, 99):
        save(tmp_path, step, {"x": torch.ones(1)})
    for name in ("step_1", "step_00000011.bak", ".step_00000012.ab.tmp"):
        (tmp_path / name).mkdir()
    (tmp_path / "step_00000013").write_text("a file")
    assert [step_of(path) for path in candidates(tmp_path)] == [123456789, 99, 10, 9]


def damage(path):
    data = bytearray((path / "piece_00000_00.safetensors").read_bytes())
    data[-1] ^= 1
    (path / "piece_00000_00.safetensors").write_bytes(data)


def test_damaged_checkpoints_are_set_aside_whole_and_never_taken_for_nothing(tmp_path, caplog):
    first, *later = [save(tmp_path, step, state(step)) for step in (1, 2, 3)]
    target = zeros(state())
    for round_ in (1, 2):
        for path in later:
            damage(path)
        kept = {path.name: sorted(f.name for f in path.iterdir()) for path in later}
        assert checkpoint.load_newest(tmp_path, target, {}, MESH) == (first, {"step": 1})
        for path in later:
            aside = path.with_name(f"{path.name}.damaged-{round_}")
            assert not path.exists() and sorted(f.name for f in aside.iterdir()) == kept[path.name]
        for step in (2, 3):  # the run comes by there again
            save(tmp_path, step, state(step))
        checkpoint.prune(tmp_path, checkpoint.CheckpointConfig(keep_last=9))
    damage(tmp_path / first.name)
    for path in later:
        damage(path)
    before = sorted(os.listdir(tmp_path))
    for _ in range(2):  # none is left: all stay where they are, and no start from nothing, the second time neither
        with pytest.raises(CheckpointError, match="none of 3 checkpoints is intact"):
            checkpoint.load_newest(tmp_path, target, {}, MESH)
    assert sorted(os.listdir(tmp_path)) == before
    for path in (first, *later):
        shutil.rmtree(path)
    with pytest.raises(CheckpointError, match="all 4 were damaged"):
        checkpoint.load_newest(tmp_path, target, {}, MESH)


def test_what_cannot_be_read_is_passed_over_and_left_alone(tmp_path, monkeypatch):
    """A disk that fails, a permission that is missing: the checkpoint may be whole."""
    first, second = (save(tmp_path, step, state(step)) for step in (1, 2))
    real = Path.read_bytes

    def read_bytes(self):
        if second in self.parents:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(self)

    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    target = zeros(state())
    assert checkpoint.load_newest(tmp_path, target, {}, MESH) == (first, {"step": 1})
    monkeypatch.undo()
    assert checkpoint.load_newest(tmp_path, target, {}, MESH) == (second, {"step": 2})


def test_a_rename_that_is_refused_costs_nothing(tmp_path, monkeypatch):
    first, second = (save(tmp_path, step, state(step)) for step in (1, 2))
    damage(second)

    def rename(*_):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "rename", rename)
    assert checkpoint.load_newest(tmp_path, zeros(state()), {}, MESH) == (first, {"step": 1})
    assert second.is_dir()


def test_differences_of_many_layers_are_one_line_with_their_number():
    problems = [f"layers.{i}.mlp.up.weight has shape (4,) here, (2,) there" for i in range(50)]
    found = grouped([*problems, "output.weight is not in the checkpoint"])
    assert found == [
        "layers.*.mlp.up.weight has shape (4,) here, (2,) there (50 of them)",
        "output.weight is not in the checkpoint",
    ]


class _Place:
    """One rank of a tensor-parallel mesh on paper, to load what that rank would."""

    rank, world = 0, 1

    def __init__(self, coord, size):
        self._coord, self._size = coord, size

    def size(self, axis):
        return self._size if axis == "tp" else 1

    def coord(self, axis):
        return self._coord if axis == "tp" else 0

    def place(self, axes):
        return (self._coord, self._size) if "tp" in axes else (0, 1)


@pytest.mark.parametrize("dim", [0, 1])
def test_a_resharding_load_reads_only_what_it_needs(tmp_path, monkeypatch, dim):
    monkeypatch.setattr(planners, "SMALLEST_PIECE", 1 << 12)
    layouts = {"cut": Layout((96, 256), {dim: "tp"}), "whole": Layout((5, 999))}
    whole = {name: torch.randn(layout.shape) for name, layout in layouts.items()}
    path = checkpoint.save(tmp_path, 1, whole, layouts, MESH, {}, threads=2)
    assert same(checkpoint.load_tensors(path), whole)
    read = []
    real = PieceReader.read
    monkeypatch.setattr(
        PieceReader, "read", lambda self, piece, out: read.append(piece.bytes) or real(self, piece, out)
    )
    for size in (1, 2, 4, 8):
        for coord in {0, size - 1}:
            place = _Place(coord, size)
            mine = {name: tensor[layouts[name].local_slices(place)].contiguous() for name, tensor in whole.items()}
            target = zeros(mine)
            read.clear()
            checkpoint.load(path, target, layouts, place)
            assert same(target, mine) and sum(read) == sum(tensor.nbytes for tensor in mine.values())
