"""The mesh's process groups hold the ranks that arithmetic says they do, in every basis, and data goes round them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from megafp8.parallel.collectives import all_gather
from megafp8.parallel.mesh import build_mesh
from megafp8.parallel.mesh_config import ParallelConfig, axis_sizes, coordinates, peers
from tests.distributed.ranks import run_ranks

WANTED = [
    ("tp",), ("cp",), ("dp",), ("pp",), ("dp", "cp"), ("dp", "cp", "tp"), ("tp", "cp", "dp", "pp"), ("etp",), ("ep",),
    ("edp",), ("ep", "etp"), ("edp", "ep", "etp"), ("kvrep",), ("dp", "cp", "kvrep"), ("embedding",),
    ("dp", "embedding"),
]  # fmt: skip
MESHES: list[dict[str, Any]] = [
    {"pp": 2, "tp": 2, "dp": 2, "ep": 2},
    {"cp": 2, "tp": 4, "ep": 4, "etp": 1},
    {"pp": 2, "cp": 2, "tp": 2, "order": "tp-cp-ep-pp-dp"},
]


def members(rank: int, world: int, axes: dict[str, Any]) -> dict[tuple[str, ...], list[int] | None]:
    mesh = build_mesh(ParallelConfig(**axes), world, kv_heads=1, tied_embeddings=True)
    found: dict[tuple[str, ...], list[int] | None] = {}
    for wanted in WANTED:
        if "embedding" in wanted and mesh.size("embedding") > 1 and mesh.coord("pp") not in (0, mesh.size("pp") - 1):
            continue
        group = mesh.group_of(wanted)
        found[wanted] = None if group is None else all_gather(torch.tensor([rank]), group).tolist()
        if group is not None:
            assert mesh.place(wanted) == (dist.get_rank(group), dist.get_world_size(group))
    return found


@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_groups_are_those_of_the_arithmetic(axes: dict[str, Any]) -> None:
    config = ParallelConfig(**axes)
    sizes = axis_sizes(config, 8, kv_heads=1, tied_embeddings=True)
    for rank, found in enumerate(run_ranks(members, 8, axes)):
        assert coordinates(sizes, rank, config.order)["tp"] == rank % sizes["tp"]
        for wanted, ranks in found.items():
            large = tuple(axis for axis in wanted if sizes[axis] > 1)
            expected = [group for group in peers(sizes, large, config.order) if rank in group] if large else []
            assert ranks == (expected[0] if large else None), (wanted, rank)
