"""A corpus with a stretch of noise in it: the run goes back, leaves those samples out, and a resume knows it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from megafp8.checkpoint import read_meta
from megafp8.data.indexed_writer import IndexedDatasetWriter
from tests.journeys.runs import megafp8, overrides, records, write_config

WORDS = overrides(
    train__steps=60, train__eval_interval=0, checkpoint__interval=20, log__interval=100, train__batch_ramp="[]",
    optimizer__warmup_steps=0, guard__spike_factor=6.0, guard__spike_window=16, guard__spike_action="rewind",
    guard__spike_skip_steps=4, guard__rerun_suspicious="true",
)  # fmt: skip


def _corpus(folder: Path) -> None:
    """Zeros and ones in turn, easily learnt; one document of random bytes as long as a few steps."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for name in ("train", "valid"):
        with IndexedDatasetWriter(folder / name, np.dtype("<u2")) as writer:
            for number in range(80):
                noise = name == "train" and number == 40
                ids = rng.integers(0, 256, 65 * 8 * 2) if noise else np.arange(65 * 8) % 7
                writer.add_document([*ids.tolist(), 256])


@pytest.mark.slow
def test_a_spike_is_left_behind_and_stays_left_out(tmp_path):
    _corpus(tmp_path / "data")
    config = write_config(tmp_path, tmp_path / "data")
    done = megafp8("pretrain", config, "--nproc", "2", *WORDS)
    run = tmp_path / "run"
    events = [e for e in records(run, "event") if e["event"] in ("spike", "rewound")]
    assert [e["event"] for e in events[:2]] == ["spike", "rewound"], done.stderr
    rewinds = [e for e in events if e["event"] == "rewound"]
    assert json.loads((run / "skipped.json").read_text())
    first = rewinds[0]
    assert first["spike_at"] > first["step"] and first["step"] % 20 == 0
    low, high = first["samples_left_out"]
    assert 8 <= high + 1 - low <= 4 * 8
    steps = [r["step"] for r in records(run)]
    assert steps == list(range(1, 61)) and not any(r.get("spike") for r in records(run))
    assert max(r["loss"] for r in records(run)[20:]) < 2.5
    meta = read_meta(run / "checkpoints/step_00000060")
    assert meta["skipped_samples"] == json.loads((run / "skipped.json").read_text())
    assert meta["consumed_samples"] == 60 * 8
