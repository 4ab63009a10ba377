"""One corpus, every kind of step, any executor and any number of workers: the same bytes."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest

from megafp8.corpus.run import preprocess
from tests.unit.corpus.conftest import everything

KINDS = {
    "local": {},
    "slurm": {"kind": "slurm", "poll_seconds": 0.05, "lease_seconds": 2.0},
    "ray": {"kind": "ray"},
}


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("kind", KINDS)
def test_same_bytes_for_1_2_5_workers(
    config: Callable, contents: Callable, tmp_path: Path, mixed: Path, kind: str
) -> None:
    if kind == "ray" and importlib.util.find_spec("ray") is None:
        pytest.skip("ray is not installed; pip install ray")
    whole = preprocess(everything(config, tmp_path, mixed, "whole", 1)).manifest
    assert whole["counts"]["num_bad"] == 2 and set(whole["counts"]["dropped"]) >= {"length", "exact", "minhash"}
    for workers in (1, 2, 5):
        preprocess(everything(config, tmp_path, mixed, f"w{workers}", workers, **KINDS[kind]))
        assert contents(tmp_path / f"w{workers}") == contents(tmp_path / "whole"), workers
