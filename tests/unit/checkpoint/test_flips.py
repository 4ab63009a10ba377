"""A thousand single-bit flips over every file of a checkpoint: none loads silently."""

import random

import pytest
import torch

from megafp8 import checkpoint
from megafp8.checkpoint import storage_writer
from megafp8.core.errors import CheckpointError
from megafp8.parallel.mesh import Mesh

MESH = Mesh.single()
FLIPS, SEED = 1000, 2026


def state(step):
    rng = torch.Generator().manual_seed(step)
    named = {f"optimizer.{kind}.layers.{i}.weight": torch.randn(12, 8, generator=rng)
             for kind in ("master", "exp_avg", "exp_avg_sq") for i in range(4)}  # fmt: skip
    named |= {"fp8.layers.0.input.scale": torch.rand(1, generator=rng), "moe.bias": torch.zeros(4)}
    return named | {"optimizer.exp_avg.norm.weight": torch.randn(7, generator=rng).bfloat16()}


def test_none_of_a_thousand_flips_is_silent(tmp_path, monkeypatch):
    monkeypatch.setattr(storage_writer, "PIECE_FILE_BYTES", 1500)  # several files
    meta = {"step": 2, "consumed_samples": 16, "config": {"run": {"name": "größe"}}}
    path = checkpoint.save(tmp_path, 2, state(2), {}, MESH, meta)
    files = sorted(path.iterdir())
    assert len(files) >= 4
    rng = random.Random(SEED)
    target = state(0)
    for number in range(FLIPS):
        file = files[number % len(files)]
        good = file.read_bytes()
        at, bit = rng.randrange(len(good)), rng.randrange(8)
        bad = bytearray(good)
        bad[at] ^= 1 << bit
        file.write_bytes(bad)
        reads = [lambda: checkpoint.load(path, target, {}, MESH), lambda: checkpoint.load_tensors(path)]
        for read in (reads[number % 2], lambda: checkpoint.verify(path)):
            with pytest.raises(CheckpointError, match=file.name):
                read()
                pytest.fail(f"flip {number}: bit {bit} of byte {at} of {file.name} (seed {SEED}) was silent")
        file.write_bytes(good)
    checkpoint.verify(path)
    assert checkpoint.load(path, target, {}, MESH) == meta
    assert all(torch.equal(target[name], tensor) for name, tensor in state(2).items())
