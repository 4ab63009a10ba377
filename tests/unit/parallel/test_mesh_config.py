"""The mesh as arithmetic: who stands where, and what is refused before any process starts."""

from __future__ import annotations

import subprocess
import sys

import pytest

from megafp8.core.config import build
from megafp8.core.errors import ConfigError
from megafp8.parallel.mesh import Mesh, build_mesh
from megafp8.parallel.mesh_config import ParallelConfig, axis_sizes, check_mesh, coordinates, peers


@pytest.mark.parametrize(
    ("sizes", "world"), [({}, 1), ({}, 8), ({"tp": 4}, 8), ({"tp": 2, "dp": 4}, 8), ({"tp": 8}, 8)]
)
def test_a_mesh_that_fits_has_no_problems(sizes, world):
    config = ParallelConfig(**sizes)
    assert check_mesh(config, world) == []
    found = axis_sizes(config, world)
    assert found["dp"] * found["tp"] == world


@pytest.mark.parametrize(
    ("sizes", "world", "line"),
    [
        ({"pp": 2}, 2, "parallel.pp = 2: pipeline parallelism comes later; use pp = 1"),
        ({"cp": 4}, 4, "parallel.cp = 4: context parallelism comes later; use cp = 1"),
        ({"ep": 2}, 2, "parallel.ep = 2: expert parallelism comes later; use ep = 1"),
        ({"dp_shard": "nome"}, 2, "parallel.dp_shard = 'nome' is not one of: none; nearest: none"),
        ({"dp_shard": "optimizer"}, 2, "parallel.dp_shard = 'optimizer' is not one of: none"),
        ({"tp": 4}, 6, "parallel.tp = 4 does not divide 6 processes; nearest: 3 or 6"),
        ({"tp": 3}, 1, "parallel.tp = 3 does not divide 1 processes; nearest: 1"),
        (
            {"dp": 3, "tp": 2},
            8,
            "parallel.dp 3 x tp 2 = 6, but there are 8 processes; "
            "use dp = 4 (or 0 for all that are left), or start 6 processes",
        ),
        (
            {"dp": 2, "tp": 3},
            8,
            "parallel.dp 2 x tp 3 = 6, but there are 8 processes; "
            "use dp = 0 with tp = 2 or 4, or start 6 processes",
        ),
        ({}, 0, "world = 0: at least one process is needed"),
    ],
)
def test_each_rule_says_the_value_and_the_way_out(sizes, world, line):
    assert check_mesh(ParallelConfig(**sizes), world) == [line]


def test_all_problems_come_at_once_and_their_hints_work_together():
    problems = check_mesh(ParallelConfig(pp=2, cp=2, ep=2, tp=3, dp_shard="full"), 4)
    assert len(problems) == 5
    assert check_mesh(ParallelConfig(tp=2), 4) == []  # what the five lines lead to
    with pytest.raises(ConfigError) as caught:
        build_mesh(ParallelConfig(pp=2, tp=3), 4)
    assert len(str(caught.value).splitlines()) == 2


def test_wrong_types_and_signs_are_refused_by_the_config():
    with pytest.raises(ConfigError, match=r"tp: 0 is refused(.|\n)*dp: -1 is refused|dp: -1(.|\n)*tp: 0"):
        build(ParallelConfig, {"tp": 0, "dp": -1})


def test_rank_order_is_megatrons():
    sizes = {"pp": 2, "dp": 2, "cp": 2, "tp": 2, "ep": 1}
    assert coordinates(sizes, 1) == {"ep": 0, "tp": 1, "cp": 0, "dp": 0, "pp": 0}
    assert coordinates(sizes, 14) == {"ep": 0, "tp": 0, "cp": 1, "dp": 1, "pp": 1}
    assert peers(sizes, ("tp",))[0] == [0, 1] and peers(sizes, ("pp",))[0] == [0, 8]
    assert peers(sizes, ("dp", "tp"))[0] == [0, 1, 4, 5]


@pytest.mark.parametrize("axes", [("tp",), ("dp",), ("cp", "dp"), ("tp", "cp", "dp", "pp")])
def test_every_rank_is_in_exactly_one_group(axes):
    sizes = {"pp": 2, "dp": 3, "cp": 1, "tp": 4, "ep": 1}
    assert sorted(rank for group in peers(sizes, axes) for rank in group) == list(range(24))


def test_one_process_needs_no_torch_distributed():
    for mesh in (Mesh.single(), build_mesh(ParallelConfig(), 1)):
        assert mesh.size("tp") == 1 and mesh.coord("dp") == 0 and mesh.world == 1
        assert mesh.group("dp") is None and mesh.group_of(("dp", "tp")) is None
        assert not mesh.sequence_parallel
    assert str(Mesh.single()) == "Mesh(pp=1 dp=1 cp=1 tp=1 ep=1; rank 0 of 1)"


@pytest.mark.parametrize(
    "module", ["megafp8.parallel.mesh_config", "megafp8.optim.config", "megafp8.optim.lr"]
)
def test_configuration_needs_no_torch(module):
    code = f"import {module}, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
