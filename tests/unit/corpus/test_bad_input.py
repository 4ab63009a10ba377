"""Input and places that are not as they should be: one line, an exit code, nothing lost."""

from __future__ import annotations

import errno
import gzip
import io
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from megafp8.core import log
from megafp8.core.config import dump_toml
from megafp8.core.errors import DataError, ResourceError
from megafp8.corpus import compressed, shards, tokenizer_check
from megafp8.corpus.dedup import exact
from megafp8.corpus.documents import Document
from megafp8.corpus.parts import read_lines, read_part
from megafp8.corpus.readers import stream_records
from megafp8.corpus.run import preprocess
from megafp8.corpus.steps.length import Length
from megafp8.corpus.tasks import Work
from megafp8.data import tokenizer

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
    assert [entry["event"] for entry in log if entry["stage"] != "check"] == ["set aside", "set aside"]
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


def test_what_a_run_writes_is_not_read_by_the_next(config: Callable, tmp_path: Path, text: Path) -> None:
    """A glob that reaches into the output folder would find quarantine.jsonl there."""
    with open(text / "part-0.jsonl", "ab") as file:
        file.write(b"no json\n")
    made = config(source={"files": [f"{tmp_path}/**/*.jsonl"]}, **BYTES)
    assert preprocess(made).manifest["counts"]["num_bad"] == 1
    with pytest.raises(DataError, match=r"out/quarantine.jsonl: an input inside output.folder; .*out of reach"):
        preprocess(made)


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


@pytest.mark.parametrize("shard_bytes", [1 << 26, 12_000])
def test_a_file_that_grows_while_it_is_read(
    config: Callable, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shard_bytes: int
) -> None:
    """A record that is half written would be a bad one, and a file cut by lines would be cut by the lines it had."""
    report, grown = Work.report, []

    def grow(self: Work, **counts: int) -> None:
        if not grown:
            grown.append(self.task.stage)
            with open(text / "part-1.jsonl", "ab") as file:
                file.write(b'{"text": "more"}\n{"text": "ha')
        report(self, **counts)

    monkeypatch.setattr(Work, "report", grow)
    settings = {**BYTES, "executor": {"shard_bytes": shard_bytes}}
    with pytest.raises(DataError, match=r"part-1.jsonl: was written to while it was being read \(\d+ bytes before"):
        preprocess(config(**settings))
    assert grown == ["tokenize" if shard_bytes > 1 << 20 else "split"]
    with open(text / "part-1.jsonl", "ab") as file:
        file.write(b'lf"}\n')
    counts = preprocess(config(**settings)).manifest["counts"]
    assert (counts["num_records"], counts["num_bad"]) == (602, 0)


@pytest.mark.parametrize("in_sample", [True, False])
def test_the_document_on_which_the_tokenizer_fails_is_named(
    config: Callable, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, in_sample: bool
) -> None:
    encode = tokenizer.ByteTokenizer.encode_batch

    def fail(self: Any, texts: list[str]) -> list[list[int]]:
        if any("</s>" in text for text in texts):
            raise ValueError("no piece")
        return encode(self, texts)

    monkeypatch.setattr(tokenizer.ByteTokenizer, "encode_batch", fail)
    if not in_sample:  # the check before the work looks at the first document of each part alone
        monkeypatch.setattr(tokenizer_check, "_SAMPLE_BYTES", 1)
    with pytest.raises(DataError, match=r"document '.*part-0.jsonl:7' of .*: the tokenizer fails on it \(ValueError"):
        preprocess(config(**BYTES))
    if in_sample:
        return
    assert list((tmp_path / "out" / "stages" / "tokenize").glob("*.log"))
    assert not (tmp_path / "out" / "manifest.json").exists()


class PanicException(BaseException):
    """Stands for a panic of a package written in Rust, whose class is no `Exception` either."""


def test_a_panic_costs_a_document_or_a_task(config: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    def step(self: Length, document: Document) -> Document:
        if document.id == "0-8":
            raise PanicException("index out of bounds")
        return document

    def signature(self: Any, texts: Any, first: int) -> Any:
        raise PanicException("index out of bounds")

    monkeypatch.setattr(Length, "apply", step)
    counts = preprocess(config("out", [{"kind": "length"}], **BYTES)).manifest["counts"]
    assert counts["num_bad"] == 1 and "PanicException: index out of bounds" in counts["first_bad"]
    monkeypatch.setattr(exact.Exact, "records", signature)
    with pytest.raises(ResourceError, match="1 tasks were set aside.*PanicException: index out of bounds"):
        preprocess(config("out", [{"kind": "exact"}], **BYTES))


def without_part_1(path: str, *rest: Any) -> Any:
    """`stream_records`, but for a file that cannot be read."""
    if path.endswith("part-1.jsonl"):
        raise RuntimeError("a segment fault of a library")
    return stream_records(path, *rest)


def test_what_can_be_made_without_a_task_is_made(
    config: Callable, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of two files cannot be read: the other one's signatures, or tokens, are there, and the run says so."""
    executor = {"shard_bytes": 2000, "retries": 0}
    (text / "part-0.jsonl").write_bytes(gzip.compress((text / "part-0.jsonl").read_bytes(), mtime=0))  # not cut
    (text / "part-1.jsonl").write_bytes(gzip.compress((text / "part-1.jsonl").read_bytes(), mtime=0))
    for name, steps, last in (("a", [], ["check", "tokenize"]), ("b", [{"kind": "exact"}], ["check", "signatures"])):
        with monkeypatch.context() as patch, pytest.raises(ResourceError, match="1 tasks were set aside.*part-1.*stay"):
            patch.setattr(shards, "stream_records", without_part_1)
            preprocess(config(name, steps, **BYTES, executor=executor))
        log = lines_of(tmp_path / name / "stages" / "log.jsonl")
        found = [(entry["event"], entry["stage"]) for entry in log]
        assert found == [("done", "read"), ("set aside", "read"), *(("done", stage) for stage in last)]
        assert not (tmp_path / name / "manifest.json").exists()
        assert preprocess(config(name, steps, **BYTES, executor=executor)).manifest["counts"]["num_records"] == 600


def test_a_shard_that_cannot_be_read_stops_no_other(
    config: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor where tokens are made right from the input, and the check before that meets it first."""
    executor = {"shard_bytes": 40_000, "retries": 0}
    with monkeypatch.context() as patch, pytest.raises(ResourceError, match="set aside.*part-1.*stay"):
        patch.setattr(shards, "stream_records", without_part_1)
        preprocess(config(**BYTES, executor=executor))
    found = [entry for entry in lines_of(tmp_path / "out" / "stages" / "log.jsonl") if entry["stage"] == "tokenize"]
    assert {(entry["event"], "part-1" in entry["name"]) for entry in found} == {("done", False), ("set aside", True)}
    assert preprocess(config(**BYTES, executor=executor)).manifest["counts"]["num_records"] == 600


def test_a_disk_that_fails_once_costs_an_attempt(config: Callable, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And one that always fails costs that file's task alone."""
    opened, errors = compressed.open_binary, [0]

    class Sick(io.FileIO):
        def read(self, size: int = -1) -> bytes:
            if errors[0] and "part-1" in str(self.name):
                errors[0] -= 1
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return super().read(size)

    monkeypatch.setattr(compressed, "open_binary", lambda path: Sick(path) if "part-" in str(path) else opened(path))
    settings = {**BYTES, "executor": {"shard_bytes": 12_000, "retries": 1}}
    errors[0] = 1
    preprocess(config("once", **settings))
    errors[0] = 1000
    with pytest.raises(ResourceError, match=r"tasks were set aside.*part-1.jsonl: cannot be read: Input/output error"):
        preprocess(config("always", **settings))


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that everybody may enter; pytest's own are root's alone."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@pytest.mark.skipif(os.getuid() != 0, reason="only root becomes someone else")
def test_no_permission_is_one_line(config: Callable, text: Path, open_folder: Path) -> None:
    """As nobody: a folder of someone else's, a corpus of someone else's, a file of someone else's."""
    shutil.copytree(text, open_folder / "text")
    for path, mode in (("text", 0o755), ("text/part-0.jsonl", 0o644), ("text/part-1.jsonl", 0o600)):
        (open_folder / path).chmod(mode)
    (open_folder / "mine").mkdir()
    os.chown(open_folder / "mine", 65534, 65534)

    def command(name: str, part: str) -> str:
        source = {"files": [f"{open_folder}/text/{part}"]}
        made = config(source=source, output={"folder": f"{open_folder}/{name}"}, **BYTES)
        (open_folder / f"{name}.toml").write_text(dump_toml(made))
        (open_folder / f"{name}.toml").chmod(0o644)
        return f"main(['preprocess', '{open_folder}/{name}.toml'])\n"

    # one run as root: nobody may not read this Python's modules, where it is installed in root's home
    code = "import os\nfrom megafp8.cli.main import main\n" + command("theirs", "part-0*")
    code += "print('=')\nos.setgid(65534)\nos.setuid(65534)\n"
    for name, part in (("new", "part-0*"), ("mine", "part-1*")):
        code += f"print({command(name, part).strip()})\n"
    code += f"print(main(['preprocess', '{open_folder}/theirs.toml', '--split.valid_share', '0.5']))\n"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    lines = [line for line in done.stderr.splitlines() if "error:" in line]
    assert done.stdout.rpartition("=")[2].split() == ["6", "3", "6"] and len(lines) == 3, done
    assert all("ermission denied" in line for line in lines) and "part-1.jsonl: cannot be read" in lines[1]


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


def test_a_file_system_without_locks(config: Callable, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    """Lustre without its flock option says ENOSYS: that is nobody else at work."""

    def none(*_: Any) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr("megafp8.corpus.folder.fcntl.flock", none)
    # log.set_up of another test may have ended both
    monkeypatch.setattr(logging.getLogger("megafp8"), "propagate", True)
    monkeypatch.setitem(log._state, "rank", 0)
    with caplog.at_level("WARNING"):
        assert preprocess(config(**BYTES)).manifest["counts"]["num_records"] == 600
    assert "no locks here" in caplog.text
