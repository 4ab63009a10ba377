"""Bugs of other codebases under tensor and sequence parallelism, tried here (docs/cases.md)."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megafp8.core.errors import CheckpointError
from megafp8.train.state import load_newest_run, save_run
from megafp8.train.step import train_step
from tests.distributed.ranks import run_ranks
from tests.distributed.small_run import make_parts, run_config, train_small


def small(mesh: dict[str, Any], dtype: str, **optimizer: Any) -> Any:
    return run_config(
        model={"family": "qwen3", "head_dim": 8, "init_std": 0.1},
        parallel=mesh,
        precision={"dtype": dtype},
        train={"global_batch": 4, "micro_batch": 4},
        optimizer=optimizer,
    )


def test_norms_see_all_tokens_under_sequence_parallelism() -> None:
    """R056: gradients of all norms, the final one and those of query and key heads among them, and ten steps on.

    fp64 sums in another order: 1e-13 relative, 10^2 more by cancellation. That all ranks hold the same bits is
    asserted where the copies are joined (`small_run.whole`).
    """
    alone = run_ranks(train_small, 1, small({}, "fp64"), 10)[0]
    split = run_ranks(train_small, 2, small({"tp": 2}, "fp64"), 10)[0]
    norms = [name for name in alone["gradients"] if "norm" in name]
    assert len(norms) == 2 * 4 + 1
    for name in norms:
        expected = alone["gradients"][name]
        assert np.linalg.norm(split["gradients"][name] - expected) < 1e-10 * np.linalg.norm(expected), name
    assert split["losses"] == pytest.approx(alone["losses"], rel=1e-9)


def test_sequence_parallelism_changes_nothing_but_memory() -> None:
    """R058: 50 steps in fp32 with and without it. The case's bound; the runs differ by rounding only."""
    with_it, without = (
        run_ranks(train_small, 2, small({"tp": 2, "sequence_parallel": on}, "fp32", lr=1e-3), 50)[0]["losses"]
        for on in (True, False)
    )
    assert len(with_it) == 50 and with_it[-1] != with_it[0]
    assert with_it == pytest.approx(without, rel=1e-5)


def parts_in(folder: str, world: int, mesh: dict[str, Any], recipe: str) -> Any:
    config = run_config(
        run={"dir": folder},
        model={"hidden_size": 64, "ffn_hidden_size": 64, "head_dim": 16, "init_std": 0.1},
        parallel=mesh,
        precision={"dtype": "fp32", "recipe": recipe, "emulation": "exact", "warmup_steps": 1},
    )
    parts = make_parts(config, world)
    parts.corpus = {"fingerprint": "0" * 64}
    return parts


def fp8_resumed(rank: int, world: int, folder: str) -> tuple[list[float], list[float], bool, int]:
    """Losses of six FP8 steps, and of the last three after a resume; whether the FP8 state is equal, and its size."""
    mesh = {"tp": 2}
    straight = parts_in(folder, world, mesh, "delayed")
    losses = []
    for step in range(1, 7):
        losses.append(train_step(straight, step, 1e-2).loss)
        if step == 3:
            save_run(straight, step, {})
    again = parts_in(folder, world, mesh, "delayed")
    load_newest_run(again)
    resumed = [train_step(again, step, 1e-2).loss for step in range(4, 7)]
    pairs = [
        (tensor, again.fp8_states[name].tensors()[key])
        for name, state in straight.fp8_states.items()
        for key, tensor in state.tensors().items()
    ]
    return losses, resumed, all(torch.equal(a, b) for a, b in pairs), len(pairs)


def test_fp8_state_is_restored(tmp_path: Path) -> None:
    """R172, with the scales shared over two ranks."""
    for losses, resumed, equal, count in run_ranks(fp8_resumed, 2, str(tmp_path)):
        assert resumed == losses[3:] and len(set(losses)) == 6
        assert equal and count == 2 * 4 * 3 * 2  # layers, linears, tensors, history and scale


@pytest.mark.parametrize("saved, loaded", [("delayed", "none"), ("none", "delayed"), ("delayed", "current")])
def test_a_run_goes_on_in_another_recipe(
    tmp_path: Path, saved: str, loaded: str, caplog: pytest.LogCaptureFixture
) -> None:
    """R174: the weights are the checkpoint's, scales start afresh, and the log says so."""
    before = parts_in(str(tmp_path), 1, {}, saved)
    train_step(before, 1, 1e-2)
    save_run(before, 1, {})
    other = parts_in(str(tmp_path), 1, {}, loaded)
    with caplog.at_level(logging.WARNING, logger="megafp8"):
        load_newest_run(other)
    assert f"recipe={saved} -> {loaded}" in caplog.text.replace('"', "")
    for (name, mine), (_, theirs) in zip(before.named_parameters, other.named_parameters):
        assert torch.equal(mine, theirs), name
    assert train_step(other, 2, 1e-2).finite


def test_fp8_state_that_is_missing_is_not_made_up(tmp_path: Path) -> None:
    """A checkpoint that says delayed scaling and has none of its state is refused."""
    other = parts_in(str(tmp_path), 1, {}, "none")
    object.__setattr__(other.config.precision, "recipe", "delayed")
    save_run(other, 1, {})
    with pytest.raises(CheckpointError, match="tensors of FP8 state are missing"):
        load_newest_run(parts_in(str(tmp_path), 1, {}, "delayed"))
