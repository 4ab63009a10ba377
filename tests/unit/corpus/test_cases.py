"""Cases that users of other tools met (docs/cases.md), tried on whole runs."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megafp8.core.errors import DataError
from megafp8.corpus import stage_run
from megafp8.corpus.parts import read_lines, read_part
from megafp8.corpus.run import preprocess
from megafp8.data import IndexedDataset
from megafp8.data.tokenizer import load_tokenizer

ROOT = Path(__file__).parents[3]


def corpus(config: Callable, path: Path, documents: list[dict], folder: str = "out", **sections: Any) -> Any:
    path.write_text("".join(json.dumps(document) + "\n" for document in documents))
    settings = {"split": {"valid_share": 0.0}, "tokenizer": {"path": "bytes"}, "source": {"files": [str(path)]}}
    return config(folder, **{**settings, **sections})


def texts(prefix: Path) -> list[str]:
    """What the ids of a dataset spell."""
    data, tokenizer = IndexedDataset(prefix), load_tokenizer("bytes")
    return [tokenizer.decode(data[i][:-1].tolist()) for i in range(len(data))]


@pytest.mark.parametrize("at", [0, 2, 4])
@pytest.mark.parametrize("empty", ["", " ", "\n"])
def test_r112_an_empty_document_anywhere(config: Callable, tmp_path: Path, at: int, empty: str) -> None:
    found = [f"text {number}" for number in range(4)]
    rows = [{"text": text} for text in [*found[:at], empty, *found[at:]]]
    counts = preprocess(corpus(config, tmp_path / "a.jsonl", rows)).manifest["counts"]
    assert (counts["num_records"], counts["num_empty"]) == (5, 1)
    assert texts(tmp_path / "out" / "train") == found


def test_r112_nothing_but_empty_documents(config: Callable, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no documents: 3 records, 3 of them without text"):
        preprocess(corpus(config, tmp_path / "a.jsonl", [{"text": text} for text in ("", " ", "\n")]))


def test_r114_ids_and_texts_stay_aligned(config: Callable, tmp_path: Path) -> None:
    rows = [{"id": f"d{i}", "text": "" if i % 7 == 0 else f"text {i}", "n": i} for i in range(100)]
    made = corpus(config, tmp_path / "a.jsonl", rows, source={"files": [f"{tmp_path}/a.jsonl"], "metadata_keys": ["n"]})
    preprocess(dataclasses.replace(made, steps=({"kind": "length"},)))  # with a step documents lie in parts
    kept = [row for row in rows if row["text"]]
    (part,) = (tmp_path / "out" / "stages" / "read").glob("*.docs.zst")
    found = [(document.id, document.text, document.metadata["n"]) for document, _ in read_part(part)]
    assert found == [(row["id"], row["text"], row["n"]) for row in kept]
    assert texts(tmp_path / "out" / "train") == [row["text"] for row in kept]
    listed = [entry["id"] for entry in read_lines(tmp_path / "out" / "dropped.jsonl.zst")]
    assert listed == [row["id"] for row in rows if not row["text"]]


PEAK = """
import sys
from megafp8.core.config import apply_overrides, build, load_toml
from megafp8.corpus.config import CorpusConfig
from megafp8.corpus.run import preprocess
if __name__ == "__main__":
    preprocess(build(CorpusConfig, load_toml(sys.argv[1])))
    print(next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_r122_memory_does_not_grow_with_documents(config: Callable, tmp_path: Path) -> None:
    """40,000 and 400,000 documents of a few tokens, read, deduplicated, tokenized, shuffled, written.

    A task may hold what belongs to its part or to `memory_bytes`; both are small here, and the same.
    """
    from megafp8.core.config import dump_toml

    (tmp_path / "peak.py").write_text(PEAK)
    peaks = []
    executor = {"shard_bytes": 1 << 20, "part_bytes": 1 << 21, "memory_bytes": 1 << 20}
    for count in (40_000, 400_000):
        rows = [{"id": str(i), "text": f"{i:06d}"} for i in range(count)]
        output = {"folder": str(tmp_path / str(count)), "workers": 1, "shuffle": True}
        made = corpus(config, tmp_path / f"{count}.jsonl", rows, str(count), output=output, executor=executor,
                      steps=[{"kind": "exact"}])  # fmt: skip
        (tmp_path / "c.toml").write_text(dump_toml(made))
        done = subprocess.run(
            [sys.executable, tmp_path / "peak.py", tmp_path / "c.toml"],
            env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=True,
        )  # fmt: skip
        peaks.append(int(done.stdout) * 1024)
        data = IndexedDataset(tmp_path / str(count) / "train")
        assert len(data) == count and data.num_tokens == 7 * count
    assert (peaks[1] - peaks[0]) / 360_000 <= 64, peaks


def test_r142_a_run_that_is_stopped_repeats_what_was_running_alone(
    config: Callable, contents: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped at 60 % of its tasks: none of those that were done is made again."""
    executor = {"shard_bytes": 12_000, "part_bytes": 8_000}
    settings = {"tokenizer": {"path": "bytes"}, "executor": executor}
    preprocess(config("whole", [{"kind": "exact"}], **settings))
    entries = (tmp_path / "whole" / "stages" / "log.jsonl").read_text().splitlines()
    done, seen = stage_run._Listener.done, [0]

    class Stopped(BaseException):
        pass

    def stop(self: Any, task: Any, record: Any) -> None:
        done(self, task, record)
        seen[0] += 1
        if seen[0] == len(entries) * 6 // 10:
            raise Stopped

    monkeypatch.setattr(stage_run._Listener, "done", stop)
    with pytest.raises(Stopped):
        preprocess(config("out", [{"kind": "exact"}], **settings))
    preprocess(config("out", [{"kind": "exact"}], **settings))
    assert contents(tmp_path / "whole") == contents(tmp_path / "out")
    log = [json.loads(line) for line in (tmp_path / "out" / "stages" / "log.jsonl").read_text().splitlines()]
    assert len(log) == len(entries) > 30
    assert set(Counter((entry["stage"], entry["task"]) for entry in log).values()) == {1}


def test_r144_order_on_and_off(config: Callable, tmp_path: Path) -> None:
    """Rank correlation of 2,000 documents: by chance 0.022 in standard deviation, so that 0.1 is 4.5 of them."""
    rows = [{"text": f"{i:04d}"} for i in range(2000)]
    found = {}
    for name, more in {"off": {}, "one": {"shuffle": True}, "two": {"shuffle": True, "workers": 2},
                       "other": {"shuffle": True, "shuffle_seed": 7}}.items():  # fmt: skip
        output = {"folder": str(tmp_path / name), "workers": 1, **more}
        made = corpus(config, tmp_path / "a.jsonl", rows, name, output=output, executor={"part_bytes": 2000})
        preprocess(made)
        found[name] = [int(text) for text in texts(tmp_path / name / "train")]
    assert found["off"] == list(range(2000)) and found["one"] == found["two"] != found["other"]
    for name in ("one", "other"):
        assert sorted(found[name]) == found["off"]
        assert abs(np.corrcoef(found[name], found["off"])[0, 1]) < 0.1
