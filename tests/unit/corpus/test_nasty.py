"""The nasty set through the command: what its manifest says comes out, into the output, the lists and the exit code."""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from megafp8.cli.main import main
from megafp8.corpus.parts import read_lines, read_part
from megafp8.data import IndexedDataset
from megafp8.data.tokenizer import load_tokenizer

ROOT = Path(__file__).parents[3]
SET = ROOT / "tests" / "nasty"
SHARED = ROOT.parent / "shared" / "data" / "nasty"
MANIFEST = json.loads((SET / "MANIFEST.json").read_text(encoding="utf-8"))
ALL = json.loads((SHARED / "MANIFEST.json").read_text(encoding="utf-8")) if SHARED.is_dir() else {}
DAMAGED = (
    "utf16.jsonl", "pretty.json", "truncated.jsonl.gz", "truncated.jsonl.zst", "bitflip.jsonl.gz", "bitflip.jsonl.zst",
)  # fmt: skip
# Python's json takes 3,000 brackets or not, by its version; the manifest allows both
EITHER = {"deep.jsonl": ((2, 0), (1, 1)), "gz_named_plain.jsonl.gz": ((2, 0),), "plain_named_gz.jsonl": ((1, 0),)}


def write_toml(folder: Path, files: Sequence[Path], kind: str) -> Path:
    toml = folder / "corpus.toml"
    toml.write_text(
        f'[source]\nkind = "{kind}"\nfiles = {json.dumps([str(path) for path in files])}\nmax_bad_share = 1\n'
        f'[split]\nvalid_share = 0\n[tokenizer]\npath = "bytes"\n[output]\nfolder = "{folder / "out"}"\nworkers = 1\n'
    )
    return toml


def command(words: Sequence[str]) -> tuple[int, list[str]]:
    """Exit code, and the error lines."""
    with contextlib.redirect_stderr(io.StringIO()) as err, contextlib.redirect_stdout(io.StringIO()):
        code = main(words)
    return code, [line for line in err.getvalue().splitlines() if "error:" in line]


def found(folder: Path) -> dict[str, Any]:
    """What a run left: documents, bad and empty records by file; the texts out of the ids."""
    out = folder / "out"
    kept = [document for path in sorted(out.glob("stages/read/*.docs.zst")) for document, _ in read_part(path)]
    train, tokenizer = IndexedDataset(out / "train"), load_tokenizer("bytes")
    texts = [tokenizer.decode(train[i][:-1].tolist()) for i in range(len(train))]
    if (out / "stages" / "read").is_dir():  # JSON lines go without, where there are no steps
        assert texts == [document.text for document in kept], "tokens are the texts, in the order of the input"
    bad = [json.loads(line) for line in (out / "quarantine.jsonl").read_text(encoding="utf-8").splitlines()]
    assert all(one["reason"] and one["line"] > 0 for one in bad)
    listed = list(read_lines(out / "dropped.jsonl.zst"))
    counts = json.loads((out / "manifest.json").read_text(encoding="utf-8"))["counts"]
    assert counts["num_records"] == len(texts) + len(bad) + len(listed)
    return {"kept": len(texts), "bad": Counter(Path(one["file"]).name for one in bad), "empty": len(listed)}


def test_the_set_as_one_corpus(tmp_path: Path) -> None:
    names = [name for name in MANIFEST if ".json" in name and name not in DAMAGED]
    code, errors = command(["preprocess", str(write_toml(tmp_path, [SET / name for name in names], "jsonl"))])
    assert (code, errors) == (0, [])
    got = found(tmp_path)
    deep = got["bad"].pop("deep.jsonl", 0)
    right = {name: MANIFEST[name] for name in names if name not in EITHER}
    assert got["bad"] == {name: entry["bad"] for name, entry in right.items() if entry["bad"]}
    assert got["empty"] == sum(entry.get("empty", 0) for entry in right.values())
    valid = sum(entry["valid"] - entry.get("empty", 0) for entry in right.values())
    assert got["kept"] == valid + (2 - deep) + 2 + 1
    stepped = ["preprocess", str(tmp_path / "corpus.toml"), "--output.folder", str(tmp_path / "parts" / "out")]
    with open(tmp_path / "corpus.toml", "a", encoding="utf-8") as toml:
        toml.write('[[steps]]\nkind = "length"\n')  # of no document, but its texts lie in parts
    assert command(stepped) == (0, []) and found(tmp_path / "parts")["kept"] == got["kept"]
    assert len({(folder / "out" / "train.bin").read_bytes() for folder in (tmp_path, tmp_path / "parts")}) == 1


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("empty.jsonl.gz", "no documents: 0 records"),
        ("utf16.jsonl", "utf16.jsonl:1: UTF-16 text"),
        ("pretty.json", "pretty.json:1: a JSON array"),
        ("truncated.jsonl.gz", "truncated.jsonl.gz:1319: compressed stream is cut short"),
        ("truncated.jsonl.zst", "truncated.jsonl.zst:1: compressed stream is cut short"),
        ("bitflip.jsonl.gz", "damaged compressed stream"),
        ("bitflip.jsonl.zst", "damaged compressed stream"),
        ("two_per_line.jsonl", "1 bad, first: {}two_per_line.jsonl:1: not JSON"),
        ("cp932.txt", "1 bad, first: {}cp932.txt:1: not utf-8 at byte"),
    ],
)
def test_what_yields_no_corpus_is_one_line(tmp_path: Path, name: str, line: str) -> None:
    toml = str(write_toml(tmp_path, [SET / name], "jsonl" if ".json" in name else "text"))
    code, errors = command(["preprocess", toml])
    assert code == 3 and len(errors) == 1 and line.format(f"{SET}/") in errors[0]
    assert not (tmp_path / "out" / "manifest.json").exists()
    if ".gz" in name and name in DAMAGED:  # what could be read is there, if so told, and the cut is on the list
        assert command(["preprocess", toml, "--source.keep_damaged_files", "true"]) == (0, [])
        assert found(tmp_path)["bad"][name] >= 1


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(ALL))
def test_each_file_of_the_whole_set_by_itself(tmp_path: Path, name: str) -> None:
    entry, kind = ALL[name], "jsonl" if ".json" in name else "text"
    words = ["preprocess", str(write_toml(tmp_path, [SHARED / name], kind))]
    if kind == "text":
        words += ["--source.encoding", {"cp932.txt": "cp932", "latin1.txt": "latin-1"}[name]]
    code, errors = command(words)
    if name in DAMAGED or name == "two_per_line.jsonl" or name.startswith("empty.jsonl"):
        assert code == 3 and len(errors) == 1
        return
    assert (code, errors) == (0, [])
    got = found(tmp_path)
    bad = got["bad"][name]
    if name in EITHER:
        assert (got["kept"], bad) in EITHER[name]
    else:
        assert (got["kept"] + got["empty"], bad) == (entry.get("valid", 1), entry.get("bad", 0))
    assert got["empty"] == entry.get("empty", 0)


@pytest.mark.slow
@pytest.mark.skipif(not ALL, reason="../shared/data/nasty is not there")
def test_the_whole_set_through_a_process(tmp_path: Path) -> None:
    """With damaged files allowed, two workers and a trained tokenizer."""
    names = [name for name in ALL if ".json" in name]
    toml = str(write_toml(tmp_path, [SHARED / name for name in names], "jsonl"))
    more = ["--source.keep_damaged_files", "true", "--output.workers", "2", "--tokenizer.path", "",
            "--tokenizer.vocab_size", "1000", "--executor.shard_bytes", "100000"]  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "megafp8", "preprocess", toml, *more],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    counts = json.loads((tmp_path / "out" / "manifest.json").read_text(encoding="utf-8"))["counts"]
    whole = [name for name in names if name not in DAMAGED and name not in EITHER]
    assert counts["num_empty"] == sum(ALL[name].get("empty", 0) for name in whole)
    bad = Counter(Path(json.loads(line)["file"]).name for line in (tmp_path / "out" / "quarantine.jsonl").open())
    assert {name: bad[name] for name in whole} == {name: ALL[name]["bad"] for name in whole}
    assert all(bad[name] >= 1 for name in DAMAGED)
    listed = list(read_lines(tmp_path / "out" / "dropped.jsonl.zst"))
    documents = sum(len(IndexedDataset(tmp_path / "out" / split)) for split in ("train", "valid"))
    assert documents + len(listed) + sum(bad.values()) == counts["num_records"]
