"""A small corpus, its configuration, what a run of it left, and a Slurm that can be told to fail."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megafp8.core.config import build
from megafp8.corpus.config import CorpusConfig
from megafp8.corpus.stages import tokenize

ROOT = Path(__file__).parents[3]
WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "lazy", "dogs", "while", "seven", "wizards", "brew"]
SHARDS = {"shard_bytes": 20_000, "part_bytes": 15_000}
STEPS = [
    {"kind": "normalise"},
    {"kind": "length", "min_characters": 60},
    {"kind": "exact"},
    {"kind": "minhash"},
    {"kind": "paragraphs", "unit": "line", "min_characters": 20},
]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """600 documents in two files, with an empty one and a control string among them."""
    rng = random.Random(7)
    folder = tmp_path / "text"
    folder.mkdir()
    for part in range(2):
        lines = []
        for i in range(300):
            body = "\n".join(" ".join(rng.choices(WORDS, k=8)) for _ in range(rng.randrange(1, 9)))
            lines.append(json.dumps({"id": f"{part}-{i}", "text": body, "lang": rng.choice(["en", "de"])}))
        lines[5] = '{"text": ""}'
        lines[6] = json.dumps({"text": "a </s> b"})
        (folder / f"part-{part}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture
def config(tmp_path: Path, text: Path) -> Callable[..., CorpusConfig]:
    def make(folder: str = "out", steps: tuple | list = (), **sections: dict[str, Any]) -> CorpusConfig:
        values: dict[str, Any] = {
            "source": {"kind": "jsonl", "files": [f"{text}/*.jsonl"]},
            "split": {"valid_share": 0.1},
            "tokenizer": {"vocab_size": 330},
            "output": {"folder": str(tmp_path / folder), "workers": 1},
        }
        for name, keys in sections.items():
            values[name] = {**values.get(name, {}), **keys}
        if steps:
            values["steps"] = steps
        return build(CorpusConfig, values)

    return make


@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenize, "_BATCH_DOCUMENTS", 16)


@pytest.fixture
def contents() -> Callable[[Path], dict[str, bytes]]:
    """All files of an output folder, but for where it lies."""
    return _contents


def _contents(folder: Path) -> dict[str, bytes]:
    files = {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}
    files.pop("report.html", None)  # the command draws it from the rest, and it names the folder
    manifest = json.loads(files["manifest.json"])
    del manifest["config"]["output"], manifest["checksum"]  # the one thing that may differ: where it lies
    return {**files, "manifest.json": json.dumps(manifest).encode()}


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


class Cluster:
    """The folder of a queue of our own (`fake_slurm.py`)."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "jobs").mkdir(parents=True)
        self.faults()

    def faults(self, **counts: int) -> None:
        (self.folder / "faults.json").write_text(json.dumps(counts))

    @property
    def calls(self) -> list[str]:
        return (self.folder / "calls").read_text().split()

    def elements(self) -> list[Path]:
        return sorted(self.folder.glob("jobs/*/*.pid"))


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    found = Cluster(tmp_path / "slurm")
    commands = tmp_path / "bin"
    commands.mkdir()
    for name in ("sbatch", "squeue", "scancel", "scontrol"):
        script = commands / name
        script.write_text(f'#!/bin/sh\nexec {sys.executable} {Path(__file__).parent}/fake_slurm.py {name} "$@"\n')
        script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{commands}:{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_SLURM", str(found.folder))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    yield found
    subprocess.run(["scancel", *(path.name for path in (found.folder / "jobs").iterdir())], check=False)
