"""Input and places that are not as they should be: one line, an exit code, nothing lost."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from megafp8.core.errors import DataError
from megafp8.corpus.parts import read_lines, read_part
from megafp8.corpus.run import preprocess

BYTES = {"tokenizer": {"path": "bytes"}, "split": {"valid_share": 0.0}}


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture
def one(tmp_path: Path, config: Callable) -> Callable:
    """A corpus of one file with the given bytes."""

    def make(data: bytes, name: str = "a.jsonl", **sections: dict[str, Any]) -> Any:
        (tmp_path / name).write_bytes(data)
        source = {"files": [str(tmp_path / name)], "max_bad_share": 1.0, **sections.pop("source", {})}
        return config(source=source, **{**BYTES, **sections})

    return make


def test_halves_of_surrogate_pairs_cost_their_records(one: Callable, tmp_path: Path) -> None:
    """JSON's escapes allow them everywhere, not in texts alone; no file can hold one."""
    records = [
        r'{"text": "good"}', r'{"\ud800": 1}', r'{"id": "\ud800", "text": "x"}', r'{"lang": "\udfff", "text": "x"}',
        r'{"source": "\udc00", "text": "x"}', r'{"m": {"a": ["\ud800"]}, "text": "x"}', r'{"text": "a\ud800"}',
        r'{"id": "\ud83d\ude00", "text": "a pair", "m": NaN}',
    ]  # fmt: skip
    counts = preprocess(one("\n".join(records).encode(), source={"metadata_keys": ["m"]})).manifest["counts"]
    assert (counts["num_records"], counts["num_bad"]) == (8, 6)
    found = lines_of(tmp_path / "out" / "quarantine.jsonl")
    assert [entry["line"] for entry in found] == [2, 3, 4, 5, 6, 7]
    for entry, word in zip(found, (r"\ud800", "its id", "its language", "its source", "its metadata", "character 1")):
        assert word in entry["reason"]


def test_values_of_tables_that_json_does_not_know(one: Callable, tmp_path: Path) -> None:
    """Dates and decimal numbers in columns of metadata become text; bytes that are no text make their row bad."""
    import datetime
    import decimal

    rows = {
        "text": ["one", "two"],
        "day": [datetime.datetime(2024, 5, 6), None],
        "price": [decimal.Decimal("1.50"), None],
        "list": [[datetime.date(2024, 5, 6)], [datetime.date(1999, 1, 1)]],
    }
    made = one(b"", "a.parquet", source={"kind": "parquet", "metadata_keys": ["day", "price", "list"]})
    pyarrow.parquet.write_table(pyarrow.table(rows), tmp_path / "a.parquet")
    assert preprocess(made).manifest["counts"]["num_bad"] == 0
    (part,) = (tmp_path / "out" / "stages" / "read").glob("*.docs.zst")
    assert [dict(document.metadata) for document, _ in read_part(part)] == [
        {"day": "2024-05-06 00:00:00", "price": "1.50", "list": ["2024-05-06"]},
        {"day": None, "price": None, "list": ["1999-01-01"]},
    ]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda folder: (folder / "b.jsonl").symlink_to("/nowhere/b"), "a link to what is not there.*/nowhere/b"),
        (lambda folder: os.mkfifo(folder / "b.jsonl"), "neither a file nor a folder"),
        (lambda folder: open(os.fsencode(folder) + b"/\xff.jsonl", "w").close(), r"\\udcff.jsonl: its name is not UTF"),
    ],
)
def test_what_a_glob_finds_and_nobody_can_read(config: Callable, text: Path, make: Callable, words: str) -> None:
    make(text)
    with pytest.raises(DataError, match=words):
        preprocess(config(**BYTES))


def test_the_first_bad_record_stops_if_so_told(config: Callable, tmp_path: Path, text: Path) -> None:
    with open(text / "part-0.jsonl", "ab") as file:
        file.write(b"no json\n")
    stop = {"on_error": "stop"}
    for _ in range(2):
        with pytest.raises(DataError, match=r"part-0.jsonl:301: not JSON.*on_error quarantine"):
            preprocess(config(source=stop, **BYTES))
    log = lines_of(tmp_path / "out" / "stages" / "log.jsonl")
    assert [entry["event"] for entry in log] == ["set aside", "set aside"]
    assert preprocess(config(**BYTES)).manifest["counts"]["num_bad"] == 1
    with pytest.raises(DataError, match="part-0.jsonl:301: not JSON"):  # judged again, though all is there
        preprocess(config(source=stop, **BYTES))
    path = text / "part-0.jsonl"
    path.write_bytes(path.read_bytes().removesuffix(b"no json\n"))
    assert preprocess(config(source=stop, **BYTES)).manifest["counts"]["num_bad"] == 0


def test_a_file_that_is_all_bad_is_no_small_share(config: Callable, text: Path) -> None:
    """One of many files with another key: few records among all, and all of that file."""
    (text / "other.jsonl").write_text('{"content": "x"}\n' * 12)
    settings = {"source": {"max_bad_share": 0.1}, **BYTES}
    with pytest.raises(DataError, match=r"other.jsonl: all 12 records are bad, the first: no key 'text'.*keep_damaged"):
        preprocess(config(**settings))
    settings["source"]["keep_damaged_files"] = True
    assert preprocess(config(**settings)).manifest["counts"]["num_bad"] == 12


def test_another_corpus_is_not_replaced(config: Callable, tmp_path: Path, text: Path) -> None:
    preprocess(config(**BYTES))
    before = (tmp_path / "out" / "train.bin").read_bytes()
    (tmp_path / "b.jsonl").write_text('{"text": "other"}\n')
    other = {"source": {"files": [str(tmp_path / "b.jsonl")]}, **BYTES}
    with pytest.raises(DataError, match=r"a corpus made from other files \(.*part-0.jsonl ...\); choose") as caught:
        preprocess(config(**other))
    assert "\n" not in str(caught.value) and (tmp_path / "out" / "train.bin").read_bytes() == before
    made = config(output={"folder": str(tmp_path / "out"), "replace": True}, **other)
    assert preprocess(made).manifest["counts"]["num_records"] == 1
    assert preprocess(config(**other)).was_done, "replacing changes no byte"


def test_documents_that_are_not_written_are_listed(one: Callable, tmp_path: Path) -> None:
    """Also without any step: those without text and in other languages, by id."""
    records = [{"id": f"{i}", "text": "x" * (i % 2), "lang": "en" if i % 3 else "fr"} for i in range(12)]
    made = one("".join(json.dumps(r) + "\n" for r in records).encode(), source={"languages": ["en"]})
    assert preprocess(made).manifest["counts"]["num_other_language"] == 2
    found = list(read_lines(tmp_path / "out" / "dropped.jsonl.zst"))
    assert {entry["id"] for entry in found if entry["reason"] == "empty"} == {f"{i}" for i in range(0, 12, 2)}
    assert [entry["id"] for entry in found if entry["reason"] == "other language"] == ["3", "9"]
    assert {entry["step"] for entry in found} == {"read"}
    preprocess(one(b'{"text": "y"}\n'))
    assert list(read_lines(tmp_path / "out" / "dropped.jsonl.zst")) == []
