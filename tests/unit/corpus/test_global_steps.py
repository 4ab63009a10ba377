"""Steps over the whole corpus inside a run: what is dropped and why, each document accounted for, same bytes always."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megafp8.corpus.global_steps import segments
from megafp8.corpus.parts import read_lines, read_part
from megafp8.corpus.run import preprocess

SMALL = {"shard_bytes": 12_000, "part_bytes": 8_000}
TINY = {"memory_bytes": 1 << 20}


@pytest.fixture
def doubled(text: Path) -> Path:
    """A third file repeats 40 documents of the first under other ids, and 20 of them with other white space."""
    lines = [json.loads(line) for line in (text / "part-0.jsonl").read_text().splitlines()[100:140]]
    for number, line in enumerate(lines):
        line["id"] = f"copy-{number}"
        line["text"] = line["text"].replace("\n", "\n\n") if number % 2 else line["text"]
    (text / "part-2.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return text


def dropped(folder: Path) -> list[dict[str, Any]]:
    return list(read_lines(folder / "dropped.jsonl.zst"))


@pytest.mark.parametrize("executor", [{}, SMALL])
def test_exact_duplicates_go_and_say_whose(config: Callable, tmp_path: Path, doubled: Path, executor: dict) -> None:
    steps = [{"kind": "exact"}, {"kind": "length", "min_characters": 60}]
    counts = preprocess(config("out", steps, tokenizer={"path": "bytes"}, executor=executor)).manifest["counts"]
    entries = dropped(tmp_path / "out")
    copies = {entry["id"]: entry for entry in entries if entry["step"] == "exact"}
    assert {f"copy-{number}" for number in range(40)} <= set(copies), "of two the first stays"
    assert copies["copy-7"]["detail"] == "of 0-107" and copies["copy-7"]["reason"] == "exact duplicate"
    assert counts["dropped"]["exact"] == {"exact duplicate": len(copies)}
    assert sum(entry["reason"] == "empty" for entry in entries) == counts["num_empty"] == 2
    total = counts["num_bad"] + len(entries)
    assert total + sum(split["documents"] for split in counts["splits"].values()) == counts["num_records"] == 640
    assert len({entry["id"] for entry in entries if entry["step"] == "length"}) == sum(
        counts["dropped"]["length"].values()
    )


def test_same_bytes_for_any_workers_and_memory(
    config: Callable, contents: Callable, tmp_path: Path, doubled: Path
) -> None:
    steps = [{"kind": "exact"}, {"kind": "paragraphs", "unit": "line", "min_characters": 20}]
    settings = {"tokenizer": {"path": "bytes"}}
    preprocess(config("one", steps, **settings, executor=SMALL))
    two = {"workers": 2, "folder": str(tmp_path / "two")}
    preprocess(config("two", steps, **settings, executor={**SMALL, **TINY}, output=two))
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    preprocess(config("large", steps, **settings))
    for split in ("train", "valid"):
        assert (tmp_path / "one" / f"{split}.bin").read_bytes() == (tmp_path / "large" / f"{split}.bin").read_bytes()


def test_repeated_lines_are_taken_out(config: Callable, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    texts = ["a line that is long enough\nfirst", "a line that is long enough\nsecond", "a line that is long enough"]
    path.write_text("".join(json.dumps({"id": str(n), "text": text}) + "\n" for n, text in enumerate(texts)))
    steps = [{"kind": "paragraphs", "unit": "line", "min_characters": 10}]
    settings = {"source": {"files": [str(path)]}, "tokenizer": {"path": "bytes"}, "split": {"valid_share": 0.0}}
    counts = preprocess(config("out", steps, **settings)).manifest["counts"]
    (part,) = (tmp_path / "out" / "stages" / "map").glob("*.docs.zst")
    assert [document.text for document, _ in read_part(part)] == ["a line that is long enough\nfirst", "second"]
    assert [entry["id"] for entry in dropped(tmp_path / "out")] == ["2"]
    assert counts["changed"] == {"paragraphs": 2} and counts["dropped"] == {"paragraphs": {"repeated": 1}}


def test_added_file_signs_only_itself(config: Callable, tmp_path: Path, doubled: Path) -> None:
    steps = [{"kind": "exact"}]
    settings = {"tokenizer": {"path": "bytes"}, "executor": {"shard_bytes": 12_000}}
    preprocess(config("out", steps, **settings))
    log = tmp_path / "out" / "stages" / "log.jsonl"
    before = len(log.read_text().splitlines())
    (doubled / "part-3.jsonl").write_text('{"id": "new", "text": "new"}\n{"id": "again", "text": "new"}\n')
    preprocess(config("out", steps, **settings))
    stages = [json.loads(line)["stage"] for line in log.read_text().splitlines()[before:]]
    assert stages.count("read") == stages.count("signatures") == 1 and "again" in {
        entry["id"] for entry in dropped(tmp_path / "out")
    }


def test_segments() -> None:
    tables = [{"kind": "length"}, {"kind": "exact"}, {"kind": "length"}, {"kind": "paragraphs"}]
    found = segments(tables)
    assert [(s.global_step and s.global_step["kind"], len(s.steps)) for s in found] == [
        (None, 1),
        ("exact", 1),
        ("paragraphs", 0),
    ]


@pytest.mark.parametrize("kind", ["exact", "minhash"])
def test_held_out_documents_stay_and_their_twins_go(config: Callable, tmp_path: Path, text: Path, kind: str) -> None:
    """Files for validation come last by name; some of their texts are in the training files too, or twice in theirs."""
    rest = [json.loads(line) for line in (text / "part-0.jsonl").read_text().splitlines()[100:140]]
    held = [{**line, "id": f"held-{n}"} for n, line in enumerate([*rest, rest[0]])]
    (text / "valid.jsonl").write_text("".join(json.dumps(line) + "\n" for line in held))
    settings = {
        "source": {"files": [f"{text}/part-*"], "valid_files": [f"{text}/valid.jsonl"], "max_bad_share": 0.5},
        "tokenizer": {"path": "bytes"},
        "split": {"valid_share": 0.0},
    }
    for name, executor in (("one", {}), ("small", {**SMALL, **TINY})):  # mixed shards, and shards of their own
        counts = preprocess(config(name, [{"kind": kind}], **settings, executor=executor)).manifest["counts"]
        gone = {entry["id"]: entry["detail"] for entry in dropped(tmp_path / name) if entry["step"] == kind}
        assert counts["splits"]["valid"]["documents"] == 40 and gone["held-40"] == "of held-0"
        assert [held_id for held_id in gone if held_id.startswith("held")] == ["held-40"]
        assert {line["id"] for line in rest} <= set(gone) and gone[rest[7]["id"]] == "of held-7"
    for name in ("valid.bin", "valid.idx", "train.bin"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "small" / name).read_bytes()
