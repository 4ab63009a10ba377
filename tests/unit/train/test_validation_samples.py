"""Which samples an evaluation sees: the same every time, whatever training has consumed, stopped or resumed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megafp8.core.config import build
from megafp8.data import IndexedDatasetWriter
from megafp8.data.loader import Batch, Loader
from megafp8.data.tokenizer import identity, load_tokenizer
from megafp8.train.config import RunConfig
from megafp8.train.evaluate import Evaluator
from megafp8.train.loop import train

BYTES = load_tokenizer("bytes")
LENGTH = 16


@pytest.fixture
def evaluated(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Numbers of the samples of each evaluation, as they are served."""
    found: list[list[int]] = []
    call, batch = Evaluator.__call__, Evaluator._batch

    def begin(self: Evaluator, *args: Any) -> Any:
        found.append([])
        return call(self, *args)

    def note(self: Evaluator, loader: Loader, numbers: np.ndarray, num_samples: int) -> Batch:
        found[-1] += numbers.tolist()
        return batch(self, loader, numbers, num_samples)

    monkeypatch.setattr(Evaluator, "__call__", begin)
    monkeypatch.setattr(Evaluator, "_batch", note)
    return found


def run(folder: Path, name: str, **sections: dict[str, Any]) -> list[float]:
    """Losses of a run's evaluations."""
    for split in ("train", "valid"):
        if not (folder / f"{split}.idx").exists():
            with IndexedDatasetWriter(folder / split, np.uint16, metadata={"tokenizer": identity(BYTES)}) as writer:
                writer.add_document(np.random.default_rng(5).integers(0, 120, 800))
    values: dict[str, Any] = {
        "run": {"dir": str(folder / name)},
        "model": {
            "family": "llama", "num_layers": 1, "hidden_size": 32, "ffn_hidden_size": 64, "num_attention_heads": 4,
            "num_kv_heads": 2, "vocab_size": 272, "max_sequence_length": LENGTH,
        },
        "data": {
            "train": [{"path": str(folder / "train")}], "valid": [{"path": str(folder / "valid")}],
            "tokenizer": "bytes", "sequence_length": LENGTH,
        },
        "train": {
            "steps": 20, "global_batch": 2, "micro_batch": 2, "eval_interval": 5, "eval_samples": 4, "compile": "off",
        },
        "optimizer": {"lr": 1e-2, "warmup_steps": 1, "schedule": "constant"},
        "checkpoint": {"interval": 10},
        "precision": {"dtype": "fp32"},
        "log": {"tensorboard": False},
    }  # fmt: skip
    for section, keys in sections.items():
        values[section] = {**values[section], **keys}
    assert train(build(RunConfig, values)).exit_code in (0, 75)
    lines = (folder / name / "metrics.jsonl").read_text().splitlines()
    return [value["loss"] for value in map(json.loads, lines) if value["kind"] == "eval"]


def test_the_same_samples_after_a_stop(tmp_path: Path, evaluated: list[list[int]]) -> None:
    """R023: evaluations every 5 steps, straight through 20 and stopped at 10."""
    straight = run(tmp_path, "straight")
    assert evaluated == [[0, 1, 2, 3]] * 4
    run(tmp_path, "stopped", train={"steps": 10})
    assert run(tmp_path, "stopped") == straight and evaluated == [[0, 1, 2, 3]] * 8


def test_frozen_weights_have_one_loss(tmp_path: Path, evaluated: list[list[int]]) -> None:
    """R025: a rate of 1e-30 moves no fp32 weight; evaluated after each of five steps, all bits are equal."""
    losses = run(tmp_path, "frozen", train={"steps": 5, "eval_interval": 1}, optimizer={"lr": 1e-30})
    assert len(losses) == 5 and len(set(losses)) == 1 and evaluated == [[0, 1, 2, 3]] * 5
