"""One corpus, every kind of step, any executor and any number of workers: the same bytes."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megafp8.corpus.run import preprocess

SHARDS = {"shard_bytes": 20_000, "part_bytes": 15_000}
STEPS = [
    {"kind": "normalise"},
    {"kind": "length", "min_characters": 60},
    {"kind": "exact"},
    {"kind": "minhash"},
    {"kind": "paragraphs", "unit": "line", "min_characters": 20},
]
KINDS = {
    "local": {},
    "slurm": {"kind": "slurm", "poll_seconds": 0.05, "lease_seconds": 2.0},
    "ray": {"kind": "ray"},
}


@pytest.fixture
def mixed(text: Path) -> Path:
    """Bad records, exact and near copies under other ids, a file for validation, beside the 600 documents."""
    lines = (text / "part-0.jsonl").read_text().splitlines()
    copies = [json.dumps({**json.loads(line), "id": f"copy-{n}"}) for n, line in enumerate(lines[100:140])]
    near = [json.loads(line) for line in lines[140:200]]  # of 40 words and more all but one are the same
    near = [json.dumps({**one, "id": f"near-{n}", "text": one["text"].replace("brown", "red", 1)})
            for n, one in enumerate(near) if one["text"].count(" ") >= 40]  # fmt: skip
    (text / "part-2.jsonl").write_text("\n".join([*copies, *near, "no json", '{"text": 1}']) + "\n")
    held = [json.dumps({**json.loads(line), "id": f"held-{n}"}) for n, line in enumerate(lines[200:230])]
    (text / "valid.jsonl").write_text("\n".join(held) + "\n")
    return text


def everything(config: Callable, tmp_path: Path, text: Path, name: str, workers: int, **executor: Any) -> Any:
    source = {"files": [f"{text}/part-*"], "valid_files": [f"{text}/valid.jsonl"]}
    output = {"folder": str(tmp_path / name), "workers": workers, "shuffle": True}
    return config(name, STEPS, source=source, output=output, executor={**SHARDS, **executor})


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
