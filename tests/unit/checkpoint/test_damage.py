"""No damage loads silently: flips, cuts, missing and swapped files, planted pickles, crafted manifests."""

import copy
import json
import os
import pickle
import random
import shutil

import pytest
import torch

from megafp8 import checkpoint
from megafp8.checkpoint.manifest import MANIFEST_NAME, MismatchError, _seal, read_manifest
from megafp8.core.errors import CheckpointError
from megafp8.parallel.mesh import Mesh

MESH = Mesh.single()
PIECE = "piece_00000_00.safetensors"


def state(step):
    random_ = torch.Generator().manual_seed(step)
    return {"w": torch.randn(16, 8, generator=random_), "b": torch.randn(9, generator=random_).bfloat16()}


@pytest.fixture
def path(tmp_path):
    checkpoint.save(tmp_path / "ck", 1, state(1), {}, MESH, {"step": 1})
    return checkpoint.save(tmp_path / "ck", 2, state(2), {}, MESH, {"step": 2})


def all_readers_refuse(path, match):
    """load, load_tensors and verify each raise one line; the next older checkpoint is what a run resumes from."""
    target = {name: torch.zeros_like(tensor) for name, tensor in state(0).items()}
    for read in (lambda: checkpoint.load(path, target, {}, MESH), lambda: checkpoint.load_tensors(path)):
        with pytest.raises(CheckpointError, match=match) as caught:
            read()
        assert "\n" not in str(caught.value)
    with pytest.raises(CheckpointError):
        checkpoint.verify(path)
    found = checkpoint.load_newest(path.parent, target, {}, MESH)
    assert found is not None and found[1] == {"step": 1} and torch.equal(target["w"], state(1)["w"])
    aside = path.with_name("step_00000002.damaged-1")
    assert aside.is_dir() and not path.exists()  # so that nothing takes it for a checkpoint again
    aside.rename(path)


def regions(path):
    """(file, first byte, end) of every class of bytes that a checkpoint has."""
    manifest = read_manifest(path)
    file = manifest.files[PIECE]
    size = (path / MANIFEST_NAME).stat().st_size
    seal = len(_seal(b""))
    yield PIECE, 0, 8  # header length
    yield PIECE, 8, file.header_bytes  # header JSON
    for entry in manifest.tensors.values():
        yield PIECE, entry.pieces[0].start, entry.pieces[0].start + entry.pieces[0].bytes
    yield MANIFEST_NAME, 0, size - seal
    yield MANIFEST_NAME, size - seal, size


def test_no_single_bit_flip_is_silent(path):
    seed = 20
    rng = random.Random(seed)
    places = [(name, start, end) for name, start, end in regions(path) for _ in range(12)]  # 72 flips
    for name, start, end in places:
        file = path / name
        good = file.read_bytes()
        at, bit = rng.randrange(start, end), rng.randrange(8)
        bad = bytearray(good)
        bad[at] ^= 1 << bit
        file.write_bytes(bad)
        target = {k: torch.zeros_like(v) for k, v in state(0).items()}
        with pytest.raises(CheckpointError, match=name):
            checkpoint.load(path, target, {}, MESH)
            pytest.fail(f"flip of bit {bit} of byte {at} of {name} (seed {seed}) was silent")
        with pytest.raises(CheckpointError, match=name):
            checkpoint.verify(path)
        file.write_bytes(good)
    checkpoint.verify(path)


def test_verify_names_the_tensor(path):
    piece = read_manifest(path).tensors["b"].pieces[0]
    data = bytearray((path / PIECE).read_bytes())
    data[piece.start] ^= 1
    (path / PIECE).write_bytes(data)
    with pytest.raises(CheckpointError, match=f"{PIECE}: damaged: b does not match"):
        checkpoint.verify(path)


@pytest.mark.parametrize("keep", [0, 7, 100, -1])
def test_cut_short(path, keep):
    for name in (PIECE, MANIFEST_NAME):
        good = (path / name).read_bytes()
        (path / name).write_bytes(good[:keep])
        all_readers_refuse(path, name)
        assert checkpoint.latest(path.parent).name == "step_00000001"
        (path / name).write_bytes(good)


def test_zero_filled_tail(path):
    good = (path / PIECE).read_bytes()
    (path / PIECE).write_bytes(good[:-64] + bytes(64))
    all_readers_refuse(path, PIECE)


def test_missing_piece_or_manifest(path):
    for name in (PIECE, MANIFEST_NAME):
        os.rename(path / name, path.parent / "aside")
        all_readers_refuse(path, name)
        os.rename(path.parent / "aside", path / name)


def test_extra_piece(path):
    shutil.copy(path / PIECE, path / "piece_00001_00.safetensors")
    all_readers_refuse(path, "is not in the manifest")


def test_piece_of_another_step_has_the_same_size_and_is_refused(path):
    other = path.with_name("step_00000001") / PIECE
    assert other.stat().st_size == (path / PIECE).stat().st_size
    shutil.copy(other, path / PIECE)
    all_readers_refuse(path, PIECE)


class Bomb:
    """Runs when it is unpickled."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


@pytest.mark.parametrize("name", [PIECE, MANIFEST_NAME, ".metadata", "__0_0.distcp", "common.pt", "rng.pkl"])
def test_planted_pickles_are_never_run(path, name):
    marker = path.parent / "owned"
    (path / name).write_bytes(pickle.dumps(Bomb(marker)))
    all_readers_refuse(path, name)
    assert not marker.exists()


def reseal(path, change):
    """Rewrite the manifest as someone would who knows the format."""
    value = json.loads((path / MANIFEST_NAME).read_bytes())
    value.pop("checksum")
    change(value)
    body = json.dumps(value).encode()[:-1]
    (path / MANIFEST_NAME).write_bytes(body + _seal(body))


CRAFTED = {
    "leaves the folder": lambda v: v["files"].update({"../x.safetensors": v["files"][PIECE]}),
    "file not listed": lambda v: v["tensors"]["w"]["pieces"][0].update(file="other.safetensors"),
    "start past the end": lambda v: v["tensors"]["w"]["pieces"][0].update(start=1 << 60),
    "negative start": lambda v: v["tensors"]["w"]["pieces"][0].update(start=-8),
    "start inside header": lambda v: v["tensors"]["w"]["pieces"][0].update(start=0),
    "huge shape": lambda v: v["tensors"]["w"].update(shape=[1 << 50, 8]),
    "huge piece": lambda v: v["tensors"]["w"]["pieces"][0].update(sizes=[1 << 50, 8], bytes=1 << 55),
    "box outside": lambda v: v["tensors"]["w"]["pieces"][0].update(offsets=[8, 0]),
    "dims differ": lambda v: v["tensors"]["w"]["pieces"][0].update(offsets=[0], sizes=[128]),
    "unknown dtype": lambda v: v["tensors"]["w"].update(dtype="OBJECT"),
    "other dtype": lambda v: v["tensors"]["w"].update(dtype="F64"),
    "float size": lambda v: v["files"][PIECE].update(bytes=1e3),
    "bool shape": lambda v: v["tensors"]["b"].update(shape=[True]),
    "no pieces": lambda v: v["tensors"]["w"].update(pieces=[]),
    "twice the same piece": lambda v: v["tensors"]["w"]["pieces"].append(v["tensors"]["w"]["pieces"][0]),
    "tensors is a list": lambda v: v.update(tensors=[]),
    "no step": lambda v: v.pop("step"),
    "meta is a list": lambda v: v.update(meta=[]),
    "zero hides a huge dim": lambda v: v["tensors"]["w"].update(shape=[0, 1 << 62, 1 << 62], pieces=[]),
    "unknown field": lambda v: v["files"][PIECE].update(command="rm"),
}


@pytest.mark.parametrize("name", CRAFTED)
def test_crafted_manifests_are_refused(path, name):
    reseal(path, CRAFTED[name])
    all_readers_refuse(path, MANIFEST_NAME)


def mutate(value, rng):
    """Replace, drop or double one random part of a JSON value."""
    places = []

    def walk(node):
        for key in node if isinstance(node, dict) else range(len(node)):
            places.append((node, key))
            if isinstance(node[key], (dict, list)):
                walk(node[key])

    walk(value)
    node, key = rng.choice(places)
    action = rng.randrange(4)
    if action == 0:
        del node[key]
    elif action == 1:
        node[key] = rng.choice(
            [None, -1, 0, 1, 2**31, 2**63, 2**80, 0.5, "", "F8", "../x", [], {}, [0], True, "é" * 99]
        )
    elif action == 2 and isinstance(node[key], int):
        node[key] += rng.choice([-1, 1, 8, 1 << 40])
    else:
        other, name = rng.choice(places)
        node[key] = copy.deepcopy(other[name]) if name in other or isinstance(other, list) else None


def test_fuzzed_manifests_end_in_one_line_or_in_sound_tensors(path):
    seed = 7
    good = (path / MANIFEST_NAME).read_bytes()
    refused = 0
    for number in range(400):
        rng = random.Random(f"{seed} {number}")
        reseal(path, lambda v, rng=rng: mutate(v, rng))
        try:
            for tensor in checkpoint.load_tensors(path).values():
                assert tensor.numel() <= 144
        except CheckpointError as error:
            refused += 1
            assert "\n" not in str(error), f"seed {seed}, number {number}"
        (path / MANIFEST_NAME).write_bytes(good)
    assert 300 < refused < 400  # some mutations change nothing that matters, such as a tensor's name


def test_deep_json_is_refused(path):
    body = b'{"meta": ' + b"[" * 200_000
    (path / MANIFEST_NAME).write_bytes(body + _seal(body))
    all_readers_refuse(path, MANIFEST_NAME)


@pytest.mark.parametrize(("key", "value"), [("version", 2), ("format", "other")])
def test_another_format_is_told_from_damage_and_not_passed_over(path, key, value):
    reseal(path, lambda v: v.update({key: value}))
    with pytest.raises(MismatchError, match=f"format .*{value}"):
        checkpoint.load_tensors(path)
    with pytest.raises(MismatchError):
        checkpoint.load_newest(path.parent, {}, {}, MESH)
