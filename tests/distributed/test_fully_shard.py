"""ZeRO-3: what torch's fully_shard cuts over the replicas trains as one process does, on every mesh that it serves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megafp8.checkpoint import load, save
from megafp8.train.config import check_run
from megafp8.train.state import tensors_of
from megafp8.train.step import train_step
from tests.distributed.ranks import run_ranks
from tests.distributed.small_run import differences, make_parts, run_config, train_each, train_small

EXPERTS = {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 16, "aux_loss": "sequence", "aux_loss_coeff": 0.1}
TIED = {"tied_embeddings": True, "attention_bias": True, "num_kv_heads": 1}
FOUR = [
    ({"dp": 2, "tp": 2}, TIED, {"train": {"recompute": "full"}}),
    ({"dp": 2, "cp": 2}, {}, {"train": {"recompute": "selective"}}),
    ({"dp": 4, "ep": 2}, {"moe": EXPERTS}, {}),  # experts have two replicas, the rest four
    ({"dp": 2, "tp": 2, "ep": 2}, {"moe": EXPERTS}, {}),
    ({"dp": 2, "pp": 2}, TIED, {}),
    ({"dp": 2, "pp": 2, "schedule": "interleaved", "virtual_stages": 2}, {"num_layers": 4}, {}),
    ({"dp": 2, "tp": 2}, {}, {"optimizer": {"name": "muon"}}),
]
THREE = [({"dp": 3}, {}, {"train": {"global_batch": 12}})]  # nothing divides: pieces of unequal size

# Gradients are sums of 10^3 terms in another order: 1e3 * 2^-53 = 1e-13. AdamW divides by the root of the second
# moment, so that elements which cancel to a hundredth differ by 1e-11 of a step.
TOLERANCE = 1e-10


def one_process(cases: list[Any]) -> list[dict[str, Any]]:
    return run_ranks(train_each, 1, [run_config(model=model, **more) for _, model, more in cases])[0]


def sharded(cases: list[Any], world: int) -> list[dict[str, Any]]:
    configs = [run_config(model=m, parallel=p | {"dp_shard": "full"}, **more) for p, m, more in cases]
    for config in configs:
        assert not check_run(config, world)
    return run_ranks(train_each, world, configs)[0]


@pytest.mark.parametrize("world, cases", [
    (3, THREE), (4, FOUR[:2]), pytest.param(4, FOUR[2:], marks=pytest.mark.slow),
])  # fmt: skip
def test_equals_one_process(world: int, cases: list[Any]) -> None:
    for case, got, expected in zip(cases, sharded(cases, world), one_process(cases), strict=True):
        assert got["losses"] == pytest.approx(expected["losses"], rel=TOLERANCE), case
        assert got["norms"] == pytest.approx(expected["norms"], rel=TOLERANCE), case
        for kind in ("gradients", "state"):
            worst = max(differences(got[kind], expected[kind]).items(), key=lambda item: item[1])
            assert worst[1] < TOLERANCE, (case, kind, worst)


def losses(rank: int, world: int, shards: list[str], precision: dict[str, Any]) -> list[list[float]]:
    found = []
    for shard in shards:
        config = run_config(
            model={"hidden_size": 64, "ffn_hidden_size": 64},
            precision=precision,
            parallel={"dp": world, "dp_shard": shard},
            train={"micro_batch": 4, "compile": "off"},
        )
        found.append(train_small(rank, world, config, steps=3)["losses"])
    return found


@pytest.mark.parametrize("precision", [
    {"dtype": "bf16"}, {"dtype": "bf16", "recipe": "delayed", "emulation": "exact"},
])  # fmt: skip
def test_narrow_weights_are_roundings_of_the_same_masters(precision: dict[str, Any]) -> None:
    """Two replicas and one micro-batch leave one order of summation, so the bits are those of whole replicas.

    FP8: a weight is quantized anew for each pass, with the scale that it had at first, and counted once.
    """
    whole, cut = run_ranks(losses, 2, ["none", "full"], precision)[0]
    assert cut == whole


def resumed(rank: int, world: int, folder: str, first: dict[str, Any], then: dict[str, Any]) -> list[float]:
    """Two steps on one layout, saved, read and gone on with for two on another (of as many ranks)."""
    config = run_config(parallel=first)
    parts = make_parts(config, world)
    for step in (1, 2):
        train_step(parts, step, 1e-2)
    save(Path(folder), 2, *tensors_of(parts), parts.mesh, {"step": 2})
    again = make_parts(run_config(parallel=then, run={"seed": 5}), world)
    load(Path(folder) / "step_00000002", *tensors_of(again), again.mesh)
    again.optimizer.load_done()
    again.optimizer.step_count, again.loader.consumed_samples = 2, parts.loader.consumed_samples
    return [train_step(again, step, 1e-2).loss for step in (3, 4)]


def test_checkpoints_do_not_know_how_they_were_cut(tmp_path: Path) -> None:
    straight = run_ranks(train_small, 1, run_config(), 4)[0]["losses"][2:]
    full, tensor = {"dp": 2, "dp_shard": "full"}, {"tp": 2}
    for number, (first, then) in enumerate([(full, tensor), ({"dp": 2, "dp_shard": "optimizer"}, full)]):
        (got, _) = run_ranks(resumed, 2, str(tmp_path / str(number)), first, then)
        assert got == pytest.approx(straight, rel=TOLERANCE)


def memory(rank: int, world: int) -> tuple[int, int, int]:
    """Elements of this rank's masters, of its whole parameters after a step, and of the model."""
    parts = make_parts(run_config(parallel={"dp": world, "dp_shard": "full"}), world)
    train_step(parts, 1, 1e-2)
    held = sum(p.to_local().numel() for p in parts.stages[0].parameters())
    masters = sum(p.numel() for _, p in parts.named_parameters)
    return masters, held, sum(p.numel() for p in parts.stages[0].parameters())


def test_a_rank_holds_its_share() -> None:
    for masters, held, whole in run_ranks(memory, 2):
        assert masters == held == whole // 2  # every size here is even


def test_zero_bubble_schedules_are_refused() -> None:
    config = run_config(parallel={"dp": 1, "pp": 2, "schedule": "zb_h1", "dp_shard": "full"})
    problem, *hints = check_run(config, 2)
    assert 'nearest: schedule = "1f1b", or dp_shard = "optimizer"' in problem
    assert all("nearest mesh" in hint for hint in hints)
