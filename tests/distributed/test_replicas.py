"""Replicas that differ, and ranks that are slow: found and named, and nothing where all is well."""

from __future__ import annotations

import time

import pytest
import torch

from megafp8.core.errors import CorruptionError
from megafp8.parallel.collectives import all_reduce_
from megafp8.parallel.mesh import build_mesh
from megafp8.parallel.mesh_config import ParallelConfig
from megafp8.train import stragglers
from megafp8.train.replicas import check_replicas, explain, fingerprint
from megafp8.train.step import train_step
from megafp8.train.stragglers import StragglerWatch, slow_ranks
from tests.distributed.ranks import run_ranks
from tests.distributed.small_run import make_parts, run_config


def test_every_single_bit_changes_a_fingerprint():
    torch.manual_seed(0)
    for shape, dtype in (((3, 700), torch.float32), ((2049,), torch.bfloat16), ((5,), torch.float64)):
        tensor = torch.randn(shape).to(dtype)
        bits = tensor.view(-1).view(torch.uint8)
        clean = fingerprint(tensor)
        for place in torch.randint(bits.numel(), (64,)).tolist():
            bits[place] ^= 1 << (place % 8)
            assert fingerprint(tensor)[0] != clean[0]
            bits[place] ^= 1 << (place % 8)
        assert torch.equal(fingerprint(tensor), clean)
    rows = torch.randn(4, 2048)
    assert not torch.equal(fingerprint(rows), fingerprint(rows[[1, 0, 2, 3]]))
    assert torch.equal(fingerprint(torch.empty(0)), torch.zeros(2, dtype=torch.int64))


def _flip(tensor: torch.Tensor, bit: int) -> None:
    tensor.detach().view(-1).view(torch.uint8)[5] ^= 1 << bit


def _broken(rank: int, world: int, config, guilty: int, kind: str) -> tuple[str, str]:
    """A clean step passes; then one bit of one rank; what is said of it, and of a clean state before."""
    torch.set_num_threads(1)
    parts = make_parts(config, world)
    for step in (1, 2):
        train_step(parts, step, 1e-2)
        check_replicas(parts, step, None)
    name = next(name for name, _ in parts.named_parameters if name.endswith("qkv.weight"))
    if rank == guilty:
        tensors = {"weight": dict(parts.named_parameters)[name], "moment": parts.optimizer.tensors()[
            f"optimizer.exp_avg.{name}"]}  # fmt: skip
        _flip(tensors[kind], 3)
    with pytest.raises(CorruptionError) as caught:
        check_replicas(parts, 3, 2)
    return name, str(caught.value)


@pytest.mark.parametrize(
    ("world", "parallel", "dtype", "kind", "guilty", "says"),
    [
        (3, {"dp": 3}, "fp64", "weight", 1, "rank 1 (host"),
        (4, {"dp": 2, "tp": 2, "dp_shard": "optimizer"}, "fp64", "weight", 3, "one of ranks 1, 3 (host"),
        (2, {"dp": 2}, "bf16", "weight", 1, "rank 1 (host"),  # its own master says so
        pytest.param(3, {"cp": 3}, "fp64", "moment", 2, "rank 2 (host", marks=pytest.mark.slow),
        pytest.param(4, {"dp": 2, "pp": 2}, "fp64", "moment", 0, "one of ranks 0, 1 (host", marks=pytest.mark.slow),
    ],
    ids=["dp3", "dp2-tp2-zero", "own-master", "cp3-moment", "dp2-pp2-moment"],
)
def test_one_bit_on_one_replica_is_found_and_named(world, parallel, dtype, kind, guilty, says):
    batch = {"steps": 5, "global_batch": 12, "micro_batch": 2, "compile": "off"}
    data = {"tokenizer": "bytes", "train": [{"path": "unused"}], "sequence_length": 12}
    config = run_config(parallel=parallel, precision={"dtype": dtype}, train=batch, data=data)
    told = run_ranks(_broken, world, config, guilty, kind)
    name = told[guilty][0]  # pipeline stages have others
    what = f"weight {name}" if kind == "weight" else f"optimizer.exp_avg.{name}"
    for _, text in told:
        assert f"step 3: copies of the same values differ: {what}" in text and says in text, text
        assert "the newest checkpoint is of step 2" in text
        assert text.count("on one of ranks") + text.count("on rank") == 1, text


def _paced(
    rank: int, world: int, slow: int, steps: int, least_span: float = 0.2
) -> list[tuple[int, list[int], list[int]]]:
    stragglers._LEAST_SPAN_SECONDS = least_span  # steps here are of 10 ms
    mesh = build_mesh(ParallelConfig(), world)
    watch = StragglerWatch(mesh, torch.device("cpu"), interval=5, ratio=2.0)
    told = []
    for step in range(1, steps + 1):
        watch.begin(step)
        lagging = rank == slow and 8 < step <= 30
        time.sleep(0.03 if lagging else 0.01)
        all_reduce_(torch.ones(4), mesh.group("dp"))
        found, gone = watch.end(step)
        if found or gone:
            told.append((step, [one.rank for one in found], gone))
        assert all(one.ratio > 2 and one.host for one in found)
    return told


def test_a_slow_rank_is_named_within_twenty_steps_and_no_other_ever():
    for told in run_ranks(_paced, 3, 1, 45):
        (step, found, gone), (end, none, over) = told
        assert (found, gone, none, over) == ([1], [], [], [1]) and 8 < step <= 28 and 30 < end <= 40


def test_a_burst_is_no_slow_rank():
    """The same 22 steps, which are over within 2 s."""
    assert run_ranks(_paced, 3, 1, 45, stragglers._LEAST_SPAN_SECONDS) == [[]] * 3


def test_only_ranks_that_do_the_same_work_are_compared():
    assert slow_ranks([1.0, 1.1, 3.0, 3.1], [0, 0, 1, 1], 2.0) == {}
    assert slow_ranks([1.0, 1.0, 1.0, 2.5], [0, 0, 0, 0], 2.0) == {3: 1.0}
    assert slow_ranks([1.0, 9.0], [0, 1], 2.0) == {}


def test_before_the_first_checkpoint_that_is_said():
    assert "nothing was saved yet" in explain(3, None, [])
