"""A corpus of bytes, a model of 100k parameters and the real command: what the journeys share."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from megafp8.data.indexed_writer import IndexedDatasetWriter
from megafp8.data.tokenizer import load_tokenizer

ROOT = Path(__file__).resolve().parents[2]

CONFIG = """
[run]
dir = "{dir}"
[model]
num_layers = 2
hidden_size = 64
ffn_hidden_size = 128
num_attention_heads = 4
num_kv_heads = 2
vocab_size = 272
max_sequence_length = 64
[data]
train = [{{ path = "{data}/train" }}]
valid = [{{ path = "{data}/valid", name = "valid" }}]
tokenizer = "bytes"
sequence_length = 64
[train]
steps = 8
global_batch = 8
micro_batch = 2
eval_interval = 4
eval_samples = 8
compile = "off"
threads = 1
[optimizer]
lr = 3e-3
warmup_steps = 2
[checkpoint]
interval = 4
[log]
interval = 1
tensorboard = false
"""


def write_corpus(folder: Path) -> None:
    """Two small sets of documents of arithmetic, which a byte model learns quickly."""
    tokenizer = load_tokenizer("bytes")
    rng = np.random.default_rng(0)
    for name, count in (("train", 600), ("valid", 60)):
        folder.mkdir(parents=True, exist_ok=True)
        with IndexedDatasetWriter(folder / name, np.dtype("<u2")) as writer:
            for a, b in rng.integers(0, 100, (count, 2)):
                text = f"{a} plus {b} is {a + b}, and {b} plus {a} is {a + b} as well."
                writer.add_document([*tokenizer.encode(text), tokenizer.eod_id])


def write_config(folder: Path, data: Path) -> Path:
    """A run's TOML in `folder`, its run folder `folder/run`."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "pretrain.toml"
    path.write_text(CONFIG.format(dir=folder / "run", data=data))
    return path


def environment() -> dict[str, str]:
    """One thread a process; the checkout ahead of whatever is installed."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def start(*words: str | Path) -> subprocess.Popen[str]:
    """`megafp8 *words` in the background."""
    return subprocess.Popen(
        [sys.executable, "-m", "megafp8", *map(str, words)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(),
    )  # fmt: skip


def megafp8(*words: str | Path, code: int = 0, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """Run `megafp8 *words` to its end and hold its exit code against `code`."""
    done = subprocess.run(
        [sys.executable, "-m", "megafp8", *map(str, words)],
        capture_output=True, text=True, env=environment(), timeout=timeout,
    )  # fmt: skip
    assert done.returncode == code, f"exit code {done.returncode}, not {code}\n{done.stdout}\n{done.stderr}"
    return done


def records(run: Path, kind: str = "train") -> list[dict]:
    """The records of one kind in a run's metrics; a line that is being written is left out."""
    path = run / "metrics.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [r for r in map(json.loads, lines) if r["kind"] == kind]


def losses(run: Path) -> list[float]:
    """Training losses by step; every step exactly once."""
    found = records(run)
    assert [r["step"] for r in found] == list(range(1, len(found) + 1))
    return [r["loss"] for r in found]


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str], seconds: float = 60) -> None:
    """Poll until `condition` holds; fails with the process's output if it ends first."""
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.01)


def overrides(**values: object) -> Sequence[str]:
    """`train__steps=3` -> `--train.steps 3`."""
    return [word for key, value in values.items() for word in (f"--{key.replace('__', '.')}", str(value))]
