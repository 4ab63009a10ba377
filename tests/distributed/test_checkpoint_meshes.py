"""Optimizer state between meshes of every kind, every pair: pipelines, experts, pieces of replicas, tied copies.

Sizes are primes where they may be, so that pieces are uneven and some are empty.
"""

from __future__ import annotations

import json
import os
import signal
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from megafp8 import checkpoint
from megafp8.checkpoint import commit, storage_writer
from megafp8.core.errors import CheckpointError
from megafp8.core.layout import Layout, stamp
from megafp8.optim.adamw import AdamW
from megafp8.optim.config import OptimizerConfig
from megafp8.parallel.buckets import GradBuckets
from megafp8.parallel.mesh import Mesh, build_mesh
from megafp8.parallel.mesh_config import ParallelConfig
from tests.distributed.ranks import run_ranks

LAYERS, EXPERTS = 4, 4
MESHES: dict[str, tuple[int, dict[str, Any]]] = {
    "single": (1, {}),
    "dp2 zero": (2, {"dp": 2, "dp_shard": "optimizer"}),
    "dp5 zero": (5, {"dp": 5, "dp_shard": "optimizer"}),
    "tp2": (2, {"tp": 2}),
    "pp2": (2, {"pp": 2}),
    "ep2": (2, {"dp": 2, "ep": 2}),
    "ep2 zero": (4, {"dp": 4, "ep": 2, "dp_shard": "optimizer"}),
    "cp2 zero": (2, {"cp": 2, "dp_shard": "optimizer"}),
    "pp2 dp2 zero": (4, {"pp": 2, "dp": 2, "dp_shard": "optimizer"}),
    "tp2 pp2 etp1": (4, {"tp": 2, "pp": 2, "ep": 2, "etp": 1}),
}


def layouts_of(mesh: Mesh) -> dict[str, Layout]:
    """What a rank of `mesh` holds of a small model with experts, tied embeddings and one kv head."""
    stages, stage = mesh.size("pp"), mesh.coord("pp")
    first, last = stage == 0, stage == stages - 1
    found = {}
    if first or last:
        found["embedding.weight"] = Layout((503, 6), {0: "tp"}, grad_sum=("embedding",), uneven=True)
    each = LAYERS // stages
    for i in range(stage * each, (stage + 1) * each):
        found |= {
            f"layers.{i}.attention.qkv.weight": Layout((1, 5, 7), {0: "kvtp"}, grad_sum=("kvrep",)),
            f"layers.{i}.attention.out.weight": Layout((67, 8), {1: "tp"}),
            f"layers.{i}.mlp_norm.weight": Layout((3,), grad_sum=("tp",)),
            f"layers.{i}.mlp.experts.down": Layout((EXPERTS, 7, 2), {0: "ep", 2: "etp"}),
        }
    if last:
        found["final_norm.weight"] = Layout((67,), grad_sum=("tp",))
    return found


def value(key: str, layout: Layout) -> torch.Tensor:
    """The whole tensor of that name; every element of every tensor has its own value."""
    seed = sum(ord(letter) * 31**i for i, letter in enumerate(key)) % 9973
    return torch.arange(torch.Size(layout.shape).numel(), dtype=torch.float32).reshape(layout.shape) + seed


def optimizer_on(mesh: Mesh, shard: bool) -> tuple[AdamW, list[tuple[str, nn.Parameter]]]:
    named = []
    for name, layout in layouts_of(mesh).items():
        param = nn.Parameter(torch.zeros(layout.local_shape(mesh), dtype=torch.bfloat16))
        stamp(param, layout)
        named.append((name, param))
    GradBuckets(named, mesh, shard=shard)
    return AdamW(named, OptimizerConfig(kernel="torch"), mesh), named


def mesh_of(kind: str, world: int) -> tuple[Mesh, bool]:
    config = ParallelConfig(**MESHES[kind][1])
    return build_mesh(config, world, kv_heads=1, tied_embeddings=True), config.dp_shard == "optimizer"


def saved(rank: int, world: int, kind: str, root: str) -> str:
    warnings.simplefilter("error")
    mesh, shard = mesh_of(kind, world)
    optimizer, _ = optimizer_on(mesh, shard)
    layouts = optimizer.layouts()
    for key, tensor in optimizer.tensors().items():
        tensor.copy_(value(key, layouts[key])[layouts[key].local_slices(mesh)])
    return str(checkpoint.save(f"{root}/{kind}", 5, optimizer.tensors(), layouts, mesh, {"from": kind}))


def loaded(rank: int, world: int, kind: str, paths: dict[str, str]) -> list[str]:
    """Load each; what is wrong then, in words."""
    warnings.simplefilter("error")
    mesh, shard = mesh_of(kind, world)
    optimizer, named = optimizer_on(mesh, shard)
    layouts, wrong = optimizer.layouts(), []
    for source, path in paths.items():
        for tensor in optimizer.tensors().values():
            tensor.fill_(-1)
        meta = checkpoint.load(path, optimizer.tensors(), layouts, mesh)
        optimizer.load_done()
        wrong += [] if meta == {"from": source} else [f"{source}: meta {meta}"]
        for key, tensor in optimizer.tensors().items():
            if not torch.equal(tensor, value(key, layouts[key])[layouts[key].local_slices(mesh)]):
                wrong.append(f"{source} -> {kind}: {key} on rank {rank}")
        for name, param in named:  # whole again, in the compute dtype
            want = value(f"optimizer.master.{name}", layouts_of(mesh)[name])[layouts_of(mesh)[name].local_slices(mesh)]
            if not torch.equal(param, want.bfloat16()):
                wrong.append(f"{source} -> {kind}: weight {name} on rank {rank}")
    return wrong


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = str(tmp_path_factory.mktemp("meshes"))
    paths = {}
    for kind, (world, _) in MESHES.items():
        (paths[kind], *others) = run_ranks(saved, world, kind, root)
        assert all(other == paths[kind] for other in others)
    return paths


@pytest.mark.parametrize("kind", MESHES)
def test_every_mesh_loads_what_every_mesh_saved(checkpoints, kind):
    for wrong in run_ranks(loaded, MESHES[kind][0], kind, checkpoints):
        assert not wrong


def test_a_checkpoint_holds_every_tensor_once_whole(checkpoints):
    single = Mesh.single()
    wanted = {f"optimizer.{kind}.{n}": s for n, s in layouts_of(single).items()
              for kind in ("master", "exp_avg", "exp_avg_sq")}  # fmt: skip
    for kind, path in checkpoints.items():
        found = checkpoint.load_tensors(path)
        assert found.keys() == wanted.keys(), kind
        for key, layout in wanted.items():
            assert torch.equal(found[key], value(key, layout)), f"{kind}: {key}"
        entries = json.loads((Path(path) / "manifest.json").read_text())["tensors"]
        for key, entry in entries.items():
            boxes = Counter((tuple(p["offsets"]), tuple(p["sizes"])) for p in entry["pieces"])
            assert set(boxes.values()) == {1}, f"{kind}: {key} is written twice"
            assert all(0 not in sizes for _, sizes in boxes), f"{kind}: {key} has an empty piece"


def lacking(rank: int, world: int, path: str) -> str:
    """Two stages that both have names and shapes of their own that the checkpoint has not."""
    mesh, _ = mesh_of("pp2", world)
    optimizer, _ = optimizer_on(mesh, False)
    tensors, layouts = optimizer.tensors(), optimizer.layouts()
    tensors[f"extra.{rank}"] = tensors["extra.both"] = torch.zeros(2)
    name = f"optimizer.master.layers.{2 * rank}.mlp_norm.weight"
    tensors[name], layouts[name] = torch.zeros(9), Layout((9,))
    del tensors["optimizer.exp_avg.embedding.weight"]  # on both stages that have it
    if rank == 0:
        del tensors["optimizer.exp_avg_sq.embedding.weight"]  # the other stage asks for it
    try:
        checkpoint.load(path, tensors, layouts, mesh)
    except CheckpointError as error:
        return str(error)
    return "loaded"


def test_differences_are_those_of_all_ranks_together_each_named_once(checkpoints):
    first, second = run_ranks(lacking, 2, checkpoints["dp2 zero"])
    assert first == second
    for name in ("extra.0", "extra.1", "extra.both"):
        assert first.count(f"{name} is not in the checkpoint") == 1
    # one line for what differs alike in both stages, and how many tensors that is
    assert first.count("layers.*.mlp_norm.weight has shape (9,) here, (3,) there (2 ") == 1
    assert first.count("optimizer.exp_avg.embedding.weight is in the checkpoint only") == 1
    assert "exp_avg_sq" not in first


def killed(rank: int, world: int, root: str, victim: int, moment: str) -> str:
    """Save a second step; `victim` is killed at a moment of it."""
    mesh, shard = mesh_of("tp2 pp2 etp1", world)
    optimizer, _ = optimizer_on(mesh, shard)
    room, name = (commit, "write_atomic") if moment == "commit" else (storage_writer, "write_piece_file")
    real = getattr(room, name)

    def die(*arguments: Any) -> None:
        if moment == "after writing":
            real(*arguments)
        os.kill(os.getpid(), signal.SIGKILL)

    if rank == victim:
        setattr(room, name, die)
    return str(checkpoint.save(root, 6, optimizer.tensors(), optimizer.layouts(), mesh, {}))


@pytest.mark.parametrize(
    ("victim", "moment"),
    [
        pytest.param(3, "before writing", marks=pytest.mark.slow),
        (2, "after writing"),
        pytest.param(0, "commit", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_dies_while_saving_costs_no_checkpoint(tmp_path, victim, moment):
    kind, world = "tp2 pp2 etp1", 4
    old = run_ranks(saved, world, kind, str(tmp_path))[0]
    root = Path(old).parent
    with pytest.raises(AssertionError, match=f"rank {victim} died with exit code -9"):
        run_ranks(killed, world, str(root), victim, moment)
    assert str(checkpoint.latest(root)) == old  # nothing that looks like a newer one
    checkpoint.verify(Path(old))
    new = run_ranks(killed, world, str(root), -1, moment)[0]
    assert checkpoint.verify(Path(new)).step == 6
    assert sorted(os.listdir(root)) == [Path(old).name, Path(new).name]  # and the leftovers are gone
