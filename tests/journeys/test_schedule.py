"""A batch ramp and a schedule in tokens by the real command: a resumed run, on other layouts, has the same steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.journeys.runs import losses, megafp8, overrides, records, write_config, write_corpus

pytestmark = pytest.mark.slow


def test_ramp_and_tokens_resume_on_other_layouts(tmp_path: Path) -> None:
    """resume-lr-schedule (R007): rates, batches and losses of the straight run."""
    write_corpus(tmp_path / "data")
    common = overrides(
        precision__dtype="fp64", train__micro_batch=1, train__batch_ramp="[4, 2, 16]", optimizer__name="muon",
        optimizer__warmup_steps=0, optimizer__warmup_tokens=700, optimizer__decay_tokens=3500,
    )  # fmt: skip
    straight, resumed = (write_config(tmp_path / name, tmp_path / "data") for name in ("straight", "resumed"))
    megafp8("pretrain", straight, *common, *overrides(train__steps=8))
    full = overrides(train__steps=3, parallel__dp=2, parallel__dp_shard="full")
    megafp8("pretrain", resumed, "--nproc", "2", *common, *full)
    megafp8("pretrain", resumed, "--nproc", "2", *common, *overrides(train__steps=5, parallel__tp=2))
    pieces = overrides(train__steps=8, parallel__dp=2, parallel__dp_shard="optimizer")
    megafp8("pretrain", resumed, "--nproc", "2", *common, *pieces)
    keys = ("step", "lr", "global_batch", "consumed_samples", "consumed_tokens")
    one, other = ([[r[key] for key in keys] for r in records(tmp_path / n / "run")] for n in ("straight", "resumed"))
    assert one == other
    assert [row[2] for row in one] == [4, 4, 6, 6, 8, 8, 8, 8]
    assert one[-1][1] < max(row[1] for row in one)
    # fp64 sums in another order, eight steps of Muon
    assert losses(tmp_path / "resumed/run") == pytest.approx(losses(tmp_path / "straight/run"), rel=1e-9)
