"""Copies are verified, whole or not there, and of a part as good as of all."""

import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megafp8 import checkpoint
from megafp8.checkpoint.copies import copy
from megafp8.cli.main import main
from megafp8.core.errors import CheckpointError, ResourceError
from megafp8.parallel.mesh import Mesh


@pytest.fixture
def path(tmp_path):
    random = torch.Generator().manual_seed(0)
    state = {f"optimizer.{kind}.layers.{i}.weight": torch.randn(5, 3, generator=random)
             for kind in ("master", "exp_avg") for i in range(3)}  # fmt: skip
    state |= {"odd": torch.arange(3, dtype=torch.uint8), "wide": torch.ones(2, dtype=torch.float64)}
    state["empty"] = torch.empty(0, 4)
    return checkpoint.save(tmp_path / "run" / "checkpoints", 7, state, {}, Mesh.single(), {"step": 7, "name": "größe"})


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) and a[name].dtype == b[name].dtype for name in a)


def test_a_whole_copy_is_the_same_byte_for_byte(path, tmp_path):
    made = copy(path, tmp_path / "deep" / "er")
    assert made == tmp_path / "deep" / "er" / path.name and checkpoint.verify(made).step == 7
    assert {f.name: f.read_bytes() for f in made.iterdir()} == {f.name: f.read_bytes() for f in path.iterdir()}


def test_a_part_is_a_checkpoint(path, tmp_path):
    made = copy(path, tmp_path / "part", ["optimizer.master.*", "odd", "empty", "wide"])
    checkpoint.verify(made)
    found, whole = checkpoint.load_tensors(made), checkpoint.load_tensors(path)
    assert same(found, {n: t for n, t in whole.items() if "exp_avg" not in n}) and len(found) == 6
    assert checkpoint.read_meta(made) == checkpoint.read_meta(path)
    plain = load_file(made / "piece_00000_00.safetensors")  # any reader opens it
    assert torch.equal(plain["wide"], whole["wide"])


@pytest.mark.parametrize("only", [[], ["*"]])
def test_damage_is_found_on_the_way_and_nothing_remains(path, tmp_path, only):
    piece = path / "piece_00000_00.safetensors"
    data = bytearray(piece.read_bytes())
    data[-1] ^= 1
    piece.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"piece_00000_00.safetensors: damaged"):
        copy(path, tmp_path / "out", only)
    assert os.listdir(tmp_path / "out") == []


def test_what_is_refused(path, tmp_path, capsys):
    copy(path, tmp_path / "out")
    with pytest.raises(ResourceError, match="is there already"):
        copy(path, tmp_path / "out")
    with pytest.raises(CheckpointError, match="'optimizer.mister.*' matches no tensor"):
        copy(path, tmp_path / "other", ["optimizer.mister.*"])
    assert not (tmp_path / "other").exists()
    (tmp_path / "file").write_text("x")
    with pytest.raises(ResourceError, match="is a file"):
        copy(path, tmp_path / "file")
    real = shutil.disk_usage
    try:
        shutil.disk_usage = lambda _: type(real("/"))(100, 99, 1)
        with pytest.raises(ResourceError, match=r"needs \d+ bytes, 1 are free"):
            copy(path, tmp_path / "full")
    finally:
        shutil.disk_usage = real


def test_the_command(path, tmp_path, capsys):
    assert main(["checkpoint", "copy", str(tmp_path / "run"), str(tmp_path / "a"), "--only", "optimizer.master.*"]) == 0
    assert "every byte verified" in capsys.readouterr().out
    assert len(checkpoint.load_tensors(tmp_path / "a" / path.name)) == 3
    assert main(["checkpoint", "copy", str(tmp_path / "run"), str(tmp_path / "a")]) == 6
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_the_reader_of_the_documentation_reads(path):
    text = (Path(__file__).parents[3] / "docs" / "checkpoints.md").read_text(encoding="utf-8")
    (code,) = (block for block in text.split("```python")[1:] if "safe_open" in block)
    names: dict = {}
    exec(code.split("```")[0], names)
    for name, tensor in checkpoint.load_tensors(path).items():
        if tensor.numel():
            assert torch.equal(names["load_tensor"](path, name), tensor)
