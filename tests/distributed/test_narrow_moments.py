"""FP8 moments on several ranks: the same bits however replicas cut the state, and through a checkpoint."""

from __future__ import annotations

from typing import Any

import pytest

from megafp8.train.config import RunConfig, check_run
from megafp8.train.state import load_newest_run, save_run, tensors_of
from megafp8.train.step import train_step
from tests.distributed.ranks import run_ranks
from tests.distributed.small_run import MODEL, make_parts, run_config, whole

Values = dict[str, Any]
# Rows that divide by 2, and columns whose blocks a cut of rows leaves alone.
SIZES = MODEL | {"hidden_size": 64, "ffn_hidden_size": 96, "vocab_size": 64}
STEPS = 4


def config_of(folder: str, moments: tuple[str, str] = ("fp8", "fp8"), **parallel: Any) -> RunConfig:
    mean, square = moments
    return run_config(
        run={"dir": folder},
        model=SIZES,
        train={"global_batch": 4, "micro_batch": 4 // parallel.get("dp", 1), "compile": "off"},
        optimizer={"exp_avg_dtype": mean, "exp_avg_sq_dtype": square, "clip_grad": 0.0, "lr": 3e-3},
        precision={"dtype": "fp32"},
        parallel=parallel,
    )


def steps(rank: int, world: int, config: RunConfig, save: bool = False) -> tuple[list[float], Values]:
    """Losses, and the whole state at the end, on rank 0."""
    parts = make_parts(config, world)
    parts.corpus = {"fingerprint": "made"}
    losses = []
    for step in range(1, STEPS + 1):
        losses.append(train_step(parts, step, config.optimizer.lr).loss)
        if save and step == 2:
            save_run(parts, 2, {})
    return losses, state_of(parts)


def state_of(parts: Any) -> Values:
    parts.optimizer.wait()
    tensors, layouts = tensors_of(parts)
    return whole({name: t.float() for name, t in tensors.items()}, layouts, parts.mesh)


def resume(rank: int, world: int, config: RunConfig) -> tuple[Values, list[float], Values]:
    """What a fresh run has loaded, its further losses, and its state at the end."""
    parts = make_parts(config, world)
    parts.corpus = {"fingerprint": "made"}
    assert load_newest_run(parts) is not None
    loaded = state_of(parts)
    losses = [train_step(parts, step, config.optimizer.lr).loss for step in range(3, STEPS + 1)]
    return loaded, losses, state_of(parts)


def shardings(rank: int, world: int) -> list[Any]:
    return [steps(rank, world, config_of("unused", dp=2, dp_shard=s)) for s in ("none", "optimizer", "full")]


def same(a: Values, b: Values) -> list[str]:
    assert a.keys() == b.keys()
    return [name for name in a if not (a[name] == b[name]).all()]


def test_cut_over_replicas_moments_have_the_same_bits():
    # a + b = b + a: two replicas have but one order of summation. Cuts along rows leave blocks as they are, and the
    # random bits are those of an element's place in the whole tensor.
    (base, expected), *others = run_ranks(shardings, 2)[0]
    for losses, state in others:
        assert losses == base and not same(state, expected)


def test_a_resumed_run_has_the_bits_of_one_that_went_through(tmp_path):
    config = config_of(str(tmp_path), dp=2, dp_shard="optimizer")
    through, final = run_ranks(steps, 2, config, True)[0]
    loaded, losses, again = run_ranks(resume, 2, config)[0]
    assert losses == through[2:] and not same(again, final)

    # Elsewhere the values are the same where blocks are (all here but biases' and norms', which lie in one block when
    # whole): one process goes on as two did, up to the order of sums, which carries an element of a million over
    # the border of two codes: it moves that weight by a tenth of a step, 3e-4, and the loss by less than 1e-4 of it.
    alone, later, _ = run_ranks(resume, 1, config_of(str(tmp_path)))[0]
    assert not same(loaded, alone)
    assert later == pytest.approx(through[2:], rel=1e-4)

    # Moments of another dtype: bf16 holds all that FP8 does, and what FP8 makes of fp32 is the nearest it has.
    wide, later, _ = run_ranks(resume, 1, config_of(str(tmp_path), ("fp32", "bf16")))[0]
    assert not same(wide, loaded) and later == pytest.approx(through[2:], rel=2e-2)


def converted(rank: int, world: int, folder: str) -> tuple[Values, Values]:
    config = config_of(folder, ("fp32", "fp32"))
    parts = make_parts(config, world)
    parts.corpus = {"fingerprint": "made"}
    for step in (1, 2):
        train_step(parts, step, config.optimizer.lr)
    save_run(parts, 2, {})
    return state_of(parts), resume(rank, world, config_of(folder))[0]


def test_fp32_moments_of_a_checkpoint_become_the_nearest_codes(tmp_path, caplog):
    wide, narrow = converted(0, 1, str(tmp_path))
    assert 'optimizer moments are converted exp_avg_dtype="fp32 -> fp8"' in caplog.text
    for name, value in wide.items():
        # half of what lies between codes, 1/16 in E4M3 and 1/8 in E5M2, and bf16's rounding on the way; below the
        # smallest normal code of a block a part of its largest
        kind = name.split(".")[1]
        half, floor = {"master": (0.0, 0.0), "exp_avg": (2**-4, 2.0**-17), "exp_avg_sq": (2**-3, 2.0**-31)}[kind]
        assert (abs(narrow[name] - value) <= (half + (half > 0) * 2**-9) * abs(value) + floor * abs(value).max()).all()


def test_what_cannot_be_is_refused_before_anything_starts():
    config = run_config(optimizer={"exp_avg_dtype": "bf16"}, precision={"dtype": "fp64"})
    (line,) = check_run(config, 1)
    assert line.startswith("optimizer.exp_avg_dtype = 'bf16'") and 'nearest: "fp32" for both' in line
    assert not check_run(config_of("unused", dp=2, dp_shard="optimizer"), 2)
