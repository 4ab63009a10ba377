"""Two checkpoints held against each other, cut as they may be."""

import math

import pytest
import torch

from megafp8 import checkpoint
from megafp8.checkpoint.compare import compare, difference
from megafp8.cli.main import main
from megafp8.core.errors import CheckpointError
from megafp8.parallel.mesh import Mesh

MESH = Mesh.single()


def state():
    random = torch.Generator().manual_seed(3)
    return {
        "layers.0.weight": torch.randn(8, 4, generator=random),
        "layers.1.weight": torch.randn(8, 4, generator=random),
        "count": torch.tensor([5, 6]),
        "small": torch.randn(5, generator=random).bfloat16(),
        "empty": torch.empty(0, 3),
    }


def save(root, step, tensors, **meta):
    return checkpoint.save(root, step, tensors, {}, MESH, {"config": {"optimizer": {"lr": 0.1}}, **meta})


def test_equal_ones_are_told_by_checksums_alone(tmp_path, monkeypatch):
    first, second = save(tmp_path / "a", 1, state()), save(tmp_path / "b", 1, state())
    monkeypatch.setattr("megafp8.checkpoint.compare.difference", None)  # nothing is read
    found = compare(first, second)
    assert found.same and found.equal == 5 and not found.meta


def test_what_differs_is_named_with_its_size(tmp_path):
    other = state()
    other["layers.0.weight"][2, 3] += 0.5
    other["count"][1] = 7
    other["small"] = other["small"].float()
    other["layers.1.weight"] = other["layers.1.weight"][:4]
    del other["empty"]
    other["new"] = torch.ones(1)
    config = {"optimizer": {"lr": 0.2}, "run": {"name": "b"}}
    found = compare(save(tmp_path / "a", 1, state()), save(tmp_path / "b", 2, other, config=config))
    by_name = {one.name: one for one in found.tensors}
    assert set(by_name) == {"layers.0.weight", "layers.1.weight", "count", "small"} and found.equal == 0
    one = by_name["layers.0.weight"]
    assert (one.differing, one.elements) == (1, 32) and one.largest == pytest.approx(0.5, abs=1e-6)
    assert one.relative == pytest.approx(0.5 / float(state()["layers.0.weight"].norm()), rel=1e-6)
    assert by_name["count"].largest == 1 and by_name["small"].what == "bfloat16 and float32"
    assert by_name["small"].differing == 0 and by_name["layers.1.weight"].what == "F32 8 x 4 and F32 4 x 4"
    assert found.first_only == ("empty",) and found.second_only == ("new",) and not found.same
    assert found.meta == {"step": (1, 2), "config.optimizer.lr": (0.1, 0.2), "config.run": (None, {"name": "b"})}


def test_bits_count_not_only_values():
    zero, nan = torch.tensor([0.0, 1.0]), torch.tensor([math.nan, 1.0])
    assert difference("x", zero, zero.clone()) is None and difference("x", nan, nan.clone()) is None
    found = difference("x", zero, torch.tensor([-0.0, 1.0]))
    assert found is not None and found.differing == 1 and found.relative == 0
    found = difference("x", zero, torch.tensor([math.inf, 1.0]))
    assert found is not None and found.relative == math.inf and found.largest == 0


def test_damage_is_not_a_difference(tmp_path):
    other = state()
    other["small"] += 1
    first, second = save(tmp_path / "a", 1, state()), save(tmp_path / "b", 1, other)
    piece = second / "piece_00000_00.safetensors"
    data = bytearray(piece.read_bytes())
    entry = checkpoint.folders.check(second).tensors["small"].pieces[0]
    data[entry.start] ^= 1
    piece.write_bytes(data)
    with pytest.raises(CheckpointError, match="small does not match its checksum"):
        compare(first, second)


def test_the_command(tmp_path, capsys):
    other = state()
    other["layers.0.weight"][0, 0] += 1
    for name, tensors in (("a", state()), ("b", state()), ("c", other)):
        save(tmp_path / name / "checkpoints", 3, tensors)
    a, b, c = (str(tmp_path / name) for name in "abc")
    assert main(["checkpoint", "diff", a, b]) == 0
    assert "5 tensors are equal bit for bit, 0 differ" in capsys.readouterr().out
    assert main(["checkpoint", "diff", a, c]) == 4
    said = capsys.readouterr().out
    assert "layers.0.weight" in said and "1 of 32" in said and "4 tensors are equal bit for bit, 1 differ" in said
    for words in (["diff", a], ["ls", a, b]):
        assert main(["checkpoint", *words]) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1
