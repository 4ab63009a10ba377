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
        ({"tp": 4}, 6, "parallel tp 4 does not divide 6 processes; nearest: tp = 3 or 6"),
        ({"tp": 3}, 1, "parallel tp 3 does not divide 1 processes; nearest: tp = 1"),
        (
            {"pp": 2, "cp": 2, "tp": 3},
            8,
            "parallel pp 2 x cp 2 x tp 3 = 12 does not divide 8 processes; nearest: tp = 2",
        ),
        (
            {"pp": 3, "tp": 3},
            8,
            "parallel pp 3 x tp 3 = 9 does not divide 8 processes; nearest: tp = 2, cp = 1, pp = 2",
        ),
        (
            {"dp": 3, "tp": 2},
            8,
            "parallel dp 3 x tp 2 = 6, but there are 8 processes; "
            "use dp = 4 (or 0 for all that are left), or start 6 processes",
        ),
        (
            {"dp": 2, "tp": 3},
            8,
            "parallel dp 2 x tp 3 = 6, but there are 8 processes; "
            "use dp = 0 with nearest: tp = 2 or 4, or start 6 processes",
        ),
        (
            {"ep": 3},
            4,
            "parallel.ep 3 x etp 1 does not divide the 4 ranks of dp x cp x tp; nearest: ep = 2 or 4",
        ),
        ({"etp": 3}, 4, "parallel.etp = 3 does not divide the 4 ranks of dp x cp x tp; nearest: etp = 2 or 4"),
        (
            {"pp": 2, "cp": 2, "ep": 2, "order": "tp-cp-pp-ep-dp"},
            8,
            "parallel.order = 'tp-cp-pp-ep-dp': with ep 2 the experts' ranks would lie across pipeline stages; "
            "put pp last, as in 'tp-cp-ep-dp-pp'",
        ),
        (
            {"order": "tp-cp-dp-pp"},
            1,
            "parallel.order = 'tp-cp-dp-pp' must name each of tp, cp, ep, dp, pp once, joined by -; "
            "nearest: tp-cp-ep-dp-pp",
        ),
        ({}, 0, "world = 0: at least one process is needed"),
    ],
)
def test_each_rule_says_the_value_and_the_way_out(sizes, world, line):
    assert check_mesh(ParallelConfig(**sizes), world) == [line]


def test_all_problems_come_at_once() -> None:
    problems = check_mesh(ParallelConfig(tp=3, order="tp"), 4)
    assert len(problems) == 2
    with pytest.raises(ConfigError) as caught:
        build_mesh(ParallelConfig(tp=3, order="tp"), 4)
    assert str(caught.value).splitlines() == problems


def test_a_word_that_is_no_choice_is_refused_by_the_config() -> None:
    with pytest.raises(ConfigError, match=r"dp_shard"):
        build(ParallelConfig, {"dp_shard": "optimiser"})


def test_wrong_types_and_signs_are_refused_by_the_config():
    with pytest.raises(ConfigError, match=r"tp: 0 is refused(.|\n)*dp: -1 is refused|dp: -1(.|\n)*tp: 0"):
        build(ParallelConfig, {"tp": 0, "dp": -1})


def sizes_of(world: int, *, kv_heads: int | None = None, tied: bool = False, **axes) -> dict[str, int]:
    return axis_sizes(ParallelConfig(**axes), world, kv_heads=kv_heads, tied_embeddings=tied)


def test_rank_order_is_megatrons():
    sizes = sizes_of(16, pp=2, cp=2, tp=2)
    assert {a: coordinates(sizes, 1)[a] for a in ("tp", "cp", "dp", "pp")} == {"tp": 1, "cp": 0, "dp": 0, "pp": 0}
    assert {a: coordinates(sizes, 14)[a] for a in ("tp", "cp", "dp", "pp")} == {"tp": 0, "cp": 1, "dp": 1, "pp": 1}
    assert peers(sizes, ("tp",))[0] == [0, 1] and peers(sizes, ("pp",))[0] == [0, 8]
    assert peers(sizes, ("dp", "tp"))[0] == [0, 1, 4, 5]


def test_another_order():
    sizes = sizes_of(8, pp=2, tp=2)
    assert peers(sizes, ("pp",), "tp-cp-ep-pp-dp")[0] == [0, 2]
    assert peers(sizes, ("dp",), "tp-cp-ep-pp-dp")[0] == [0, 4]
    sizes = sizes_of(8, pp=2, cp=2)
    found = [coordinates(sizes, rank, "tp-cp-ep-pp-dp") for rank in range(8)]
    assert [c["cp"] for c in found] == [0, 1] * 4
    assert [c["pp"] for c in found] == [0, 0, 1, 1] * 2
    assert [c["edp"] for c in found] == [0, 1, 0, 1, 2, 3, 2, 3]


def test_experts_reuse_the_ranks_of_dp_and_cp():
    # Megatron's docs: world 8, tp 2, dp 4, ep 2, etp = tp: expert groups are strided by tp
    sizes = sizes_of(8, tp=2, ep=2)
    assert (sizes["etp"], sizes["ep"], sizes["edp"]) == (2, 2, 2)
    assert peers(sizes, ("etp",)) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert peers(sizes, ("ep",))[:2] == [[0, 2], [1, 3]]
    assert peers(sizes, ("edp",))[:2] == [[0, 4], [1, 5]]


def test_experts_may_be_split_otherwise_than_the_dense_layers():
    sizes = sizes_of(8, tp=4, ep=8, etp=1)
    assert (sizes["etp"], sizes["ep"], sizes["edp"], sizes["dp"]) == (1, 8, 1, 2)
    assert peers(sizes, ("ep",)) == [list(range(8))]
    sizes = sizes_of(16, pp=2, cp=2, tp=2, ep=4, etp=1)
    assert peers(sizes, ("ep",))[0] == [0, 1, 2, 3] and peers(sizes, ("edp",))[0] == [0, 4]


def test_ranks_share_kv_heads_where_these_are_fewer_than_tp():
    sizes = sizes_of(8, tp=8, kv_heads=2)
    assert (sizes["kvtp"], sizes["kvrep"]) == (2, 4)
    assert peers(sizes, ("kvrep",)) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert coordinates(sizes, 5)["kvtp"] == 1 and coordinates(sizes, 5)["kvrep"] == 1
    sizes = sizes_of(4, tp=2, kv_heads=1)
    assert peers(sizes, ("dp", "cp", "kvrep")) == [[0, 1, 2, 3]]


def test_a_tied_weight_lies_on_the_first_and_the_last_stage():
    sizes = sizes_of(8, pp=4, tied=True)
    assert sizes["embedding"] == 2
    assert peers(sizes, ("embedding",)) == [[0, 6], [1, 7]]
    assert peers(sizes, ("embedding", "dp")) == [[0, 1, 6, 7]]
    assert coordinates(sizes, 6)["embedding"] == 1
    assert sizes_of(8, pp=4)["embedding"] == sizes_of(8, tied=True)["embedding"] == 1
    # a V brings the last stage back to the first rank
    assert sizes_of(8, pp=4, schedule="zb_v", tied=True)["embedding"] == 1


@pytest.mark.parametrize(
    "axes", [("tp",), ("dp",), ("cp", "dp"), ("tp", "cp", "dp", "pp"), ("ep",), ("edp", "pp"), ("kvrep",)]
)
def test_every_rank_is_in_exactly_one_group(axes):
    sizes = sizes_of(24, pp=2, tp=4)
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
