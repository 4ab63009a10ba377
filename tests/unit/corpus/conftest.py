"""A small corpus, its configuration, and what a run of it left."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megafp8.core.config import build
from megafp8.corpus.config import CorpusConfig
from megafp8.corpus.stages import tokenize

WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "lazy", "dogs", "while", "seven", "wizards", "brew"]


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
    manifest = json.loads(files["manifest.json"])
    del manifest["config"]["output"]  # the one thing that may differ: where it lies
    return {**files, "manifest.json": json.dumps(manifest).encode()}
