"""Who is where: nodes, peers of each axis, layers of each rank's stages, and the table as CSV."""

from __future__ import annotations

import csv
import io
from typing import Any

import pytest

from megafp8.parallel.mesh_config import ParallelConfig
from megafp8.plan.mesh_table import MeshPlan, mesh_csv, plan_mesh, ranks_shown


def plan(world: int, *, layers: int = 8, gpus_per_node: int = 8, **values: Any) -> MeshPlan:
    return plan_mesh(ParallelConfig(**values), world, gpus_per_node=gpus_per_node, num_layers=layers)


def test_megatron_order_by_hand() -> None:
    # 16 ranks, tp fastest, then dp, then pp: Megatron-LM's own example has tp groups (0,1) and pp groups (0,4,8,12)
    found = plan(16, pp=4, tp=2, layers=4)
    groups = {axis.name: axis.groups for axis in found.axes}
    assert groups["tp"][:2] == ((0, 1), (2, 3))
    assert groups["dp"][:2] == ((0, 2), (1, 3))
    assert groups["pp"][0] == (0, 4, 8, 12)
    place = found.places[9]
    assert (place.node, place.gpu) == (1, 1)
    assert {axis: place.coords[axis] for axis in ("pp", "dp", "tp")} == {"pp": 2, "dp": 0, "tp": 1}
    assert place.peers == {"pp": (1, 5, 9, 13), "dp": (9, 11), "tp": (8, 9)}
    assert place.layers == "2"


def test_nodes_that_a_group_spans() -> None:
    nodes = {axis.name: axis.nodes for axis in plan(32, pp=2, tp=8, gpus_per_node=8).axes}
    assert nodes == {"pp": 2, "dp": 2, "tp": 1}
    assert plan(9, dp=9, gpus_per_node=4).num_nodes == 3


def test_layers_of_stages() -> None:
    assert [p.layers for p in plan(2, pp=2, schedule="zb_v").places] == ["embedding, 0-1 | 6-7, loss", "2-3 | 4-5"]
    looped = plan(2, pp=2, schedule="interleaved", virtual_stages=2)
    assert [p.stages for p in looped.places] == [(0, 2), (1, 3)]
    uneven = plan(3, pp=3, layers_per_stage=(0, 5, 3)).places
    assert [p.layers for p in uneven] == ["embedding", "0-4", "5-7, loss"]
    assert plan(1).places[0].layers == "embedding, 0-7, loss"
    assert plan(1).axes == ()


def test_experts_and_tied_stages_have_peers() -> None:
    found = plan(8, pp=2, ep=4, tp=2, etp=1)
    assert {axis.name for axis in found.axes} >= {"ep", "pp", "dp", "tp"}
    assert found.places[0].peers["ep"] == (0, 1, 2, 3)
    tied = plan_mesh(
        ParallelConfig(pp=3), 3, gpus_per_node=8, num_layers=3, tied_embeddings=True
    )
    assert tied.places[0].peers["embedding"] == (0, 2)
    assert "embedding" not in tied.places[1].peers


def test_every_rank_is_among_its_peers_and_in_one_group_of_each_axis() -> None:
    found = plan(64, pp=2, cp=2, tp=4, ep=8, etp=2)
    for axis in found.axes:
        ranks = sorted(rank for group in axis.groups for rank in group)
        assert ranks == list(range(64))
        assert {len(group) for group in axis.groups} == {axis.size}
    assert all(place.rank in group for place in found.places for group in place.peers.values())


@pytest.mark.parametrize(
    ("ranks", "shown"),
    [
        ([3], "3"), ([0, 1], "0,1"), ([0, 1, 2], "0-2"), ([0, 8], "0,8"), ([0, 8, 16, 24], "0,8,16,24"),
        ([0, 8, 16, 24, 32], "0,8,...,32"), ([0, 1, 2, 8, 9, 10], "0-2,8-10"), ([0, 1, 4, 5], "0,1,4,5"),
    ],
)  # fmt: skip
def test_groups_in_few_letters(ranks: list[int], shown: str) -> None:
    assert ranks_shown(ranks) == shown


def test_csv_has_every_rank() -> None:
    rows = list(csv.DictReader(io.StringIO(mesh_csv(plan(512, pp=4, tp=8)))))
    assert [int(row["rank"]) for row in rows] == list(range(512))
    assert rows[8]["tp_peers"] == "8 9 10 11 12 13 14 15"
    assert rows[511]["layers"] == "6-7, loss"
