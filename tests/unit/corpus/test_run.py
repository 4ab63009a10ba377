"""`preprocess` as a whole: what it leaves, what it refuses, same bytes for any number of workers."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megafp8.core.errors import DataError, ResourceError
from megafp8.core.jsonio import read_json
from megafp8.corpus.documents import Document
from megafp8.corpus.parts import read_lines, read_part
from megafp8.corpus.run import preprocess, train_into
from megafp8.corpus.steps.length import Length
from megafp8.data import IndexedDataset
from megafp8.data.tokenizer import load_tokenizer
from megafp8.data.verify import problems, stats

pytestmark = pytest.mark.usefixtures("small_batches")


FILES = {
    "figures.json", "manifest.json", "quarantine.jsonl", "dropped.jsonl.zst", "tokenizer.model", "tokenizer_info.json",
    "train.bin", "train.idx", "train.json", "valid.bin", "valid.idx", "valid.json", "stages",
}  # fmt: skip


def test_what_a_run_leaves(config: Callable, tmp_path: Path) -> None:
    result = preprocess(config())
    out = tmp_path / "out"
    assert {path.name for path in out.iterdir()} == FILES
    train, valid = IndexedDataset(out / "train"), IndexedDataset(out / "valid")
    assert problems(train) == problems(valid) == []
    assert len(train) + len(valid) == 598 and 30 < len(valid) < 95  # 60 expected, sd 7.3
    counts = result.manifest["counts"]
    assert (counts["num_records"], counts["num_empty"], counts["num_bad"]) == (600, 2, 0)
    assert result.manifest["unigram_entropy_nats"] == pytest.approx(stats(train).unigram_entropy_nats, abs=1e-6)
    assert train.side["unigram_entropy_nats"] == result.manifest["unigram_entropy_nats"]
    assert sum(train.side["languages"].values()) == len(train)
    tokenizer = load_tokenizer(out / "tokenizer.model")
    assert train.side["tokenizer"]["fingerprint"] == tokenizer.fingerprint
    assert all(document[-1] == tokenizer.eod_id for document in (train[i] for i in range(len(train))))
    decoded = {tokenizer.decode(d[i].tolist()) for d in (train, valid) for i in range(len(d))}
    assert "a </s> b" in decoded, "a control string in a document stays text"


@pytest.mark.parametrize("workers", [2, 5])
def test_bytes_do_not_depend_on_workers(contents: Callable, config: Callable, tmp_path: Path, workers: int) -> None:
    executor = {"shard_bytes": 12_000, "part_bytes": 8_000}
    steps = [{"kind": "length", "min_characters": 100}]
    preprocess(config("one", steps, executor=executor))
    preprocess(config("more", steps, output={"workers": workers, "folder": str(tmp_path / "more")}, executor=executor))
    assert contents(tmp_path / "one") == contents(tmp_path / "more")
    preprocess(config("large", steps))
    one, large = contents(tmp_path / "one"), contents(tmp_path / "large")
    assert {name for name in one if one[name] != large[name]} <= {
        "manifest.json",
        "tokenizer_info.json",
        "dropped.jsonl.zst",
    }
    assert {entry["reason"] for entry in read_lines(tmp_path / "one" / "dropped.jsonl.zst")} == {"empty", "too short"}


def test_every_document_is_somewhere_by_id(config: Callable, tmp_path: Path, text: Path) -> None:
    """Kept, dropped with a reason, quarantined, empty, in another language: once each, and nothing else."""
    with open(text / "part-1.jsonl", "ab") as file:
        file.write(b'{"text": 3}\nnot json\n\n')
    steps = [{"kind": "length", "min_characters": 100}, {"kind": "length", "max_characters": 300}]
    made = config("out", steps, source={"languages": ["de"]}, executor={"shard_bytes": 12_000, "part_bytes": 8_000})
    counts = preprocess(made).manifest["counts"]
    lines = [(path, number, line) for path in sorted(text.iterdir())
             for number, line in enumerate(path.read_bytes().split(b"\n"), start=1) if line]  # fmt: skip
    ids, empty, other = [], [], []
    for path, number, line in lines:
        try:
            value = json.loads(line)
            name, body = value.get("id", f"{path}:{number}"), value["text"].strip()
        except (ValueError, AttributeError):
            continue
        ids.append(name)
        empty += [name] if not body else []
        other += [name] if body and value.get("lang") != "de" else []
    parts = sorted((tmp_path / "out" / "stages" / "read").glob("*.docs.zst"))
    kept = [document.id for path in parts for document, _ in read_part(path)]
    listed = list(read_lines(tmp_path / "out" / "dropped.jsonl.zst"))
    dropped = [entry["id"] for entry in listed if entry["step"] == "length"]
    assert [entry["id"] for entry in listed if entry["reason"] == "empty"] == empty
    assert [entry["id"] for entry in listed if entry["reason"] == "other language"] == other
    assert len(listed) == len(dropped + empty + other)
    assert sorted(kept + dropped + empty + other) == sorted(ids) and dropped and kept
    assert (counts["num_records"], counts["num_bad"]) == (len(lines), 2)
    assert (counts["num_empty"], counts["num_other_language"]) == (len(empty), len(other))
    reasons = counts["dropped"]["length"]
    assert sum(reasons.values()) == len(dropped) and set(reasons) == {"too short", "too long"}
    train, valid = (IndexedDataset(tmp_path / "out" / split) for split in ("train", "valid"))
    assert len(train) + len(valid) == len(kept)


def test_a_step_that_fails_on_a_document_costs_that_document(
    config: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def apply(self: Length, document: Document) -> Document:
        if document.id in ("0-7", "1-9"):
            raise KeyError("gone")
        return replace(document, text=document.text + "!", metadata={"count:marks": 1, "kept": 2})

    monkeypatch.setattr(Length, "apply", apply)
    counts = preprocess(config("out", [{"kind": "length"}])).manifest["counts"]
    assert counts["num_bad"] == 2 and "step length failed: KeyError: 'gone'" in counts["first_bad"]
    assert counts["changed"] == {"length": 596} and counts["counted"] == {"length": {"marks": 596}}
    (part,) = (tmp_path / "out" / "stages" / "read").glob("*.docs.zst")
    assert {json.dumps(dict(document.metadata)) for document, _ in read_part(part)} == {'{"kept": 2}'}


@pytest.mark.parametrize(
    ("steps", "stages"), [((), ["check", "tokenize"]), ([{"kind": "length"}], ["read", "check", "tokenize"])]
)
def test_added_files_cost_only_themselves(
    contents: Callable, config: Callable, tmp_path: Path, text: Path, steps: Sequence, stages: list[str]
) -> None:
    settings = {"tokenizer": {"path": "bytes"}, "executor": {"shard_bytes": 12_000}}
    preprocess(config("out", steps, **settings))
    log = tmp_path / "out" / "stages" / "log.jsonl"
    before = len(log.read_text().splitlines())
    (text / "part-2.jsonl").write_text("".join(f'{{"text": "new {i}"}}\n' for i in range(100)))
    preprocess(config("out", steps, **settings))
    entries = [json.loads(line) for line in log.read_text().splitlines()[before:]]
    assert [entry["stage"] for entry in entries if entry["stage"] != "write"] == stages
    preprocess(config("fresh", steps, **settings))
    assert contents(tmp_path / "out") == contents(tmp_path / "fresh")
    before = len(log.read_text().splitlines())
    preprocess(config("out", steps, **{**settings, "split": {"valid_share": 0.2}}))
    entries = [json.loads(line) for line in log.read_text().splitlines()[before:]]
    assert "read" not in {entry["stage"] for entry in entries}, "another split reads no part again"


@pytest.mark.parametrize("workers", [1, 2])
def test_one_pass_and_two_give_the_same(
    contents: Callable, config: Callable, tmp_path: Path, text: Path, workers: int
) -> None:
    """Without steps, tokens are made right from the input; with a step that changes nothing, through parts."""
    with open(text / "part-0.jsonl", "ab") as file:
        file.write(b'no json\n{"text": "", "lang": "fr"}\n{"text": "a </s> b", "lang": "fr"}\n')
    (text / "held.jsonl").write_text("".join(f'{{"text": "held out {i}"}}\n' for i in range(9)))
    (text / "part-1.jsonl").write_bytes(gzip.compress((text / "part-1.jsonl").read_bytes(), mtime=0))
    source = {"languages": ["en", "de", ""], "valid_files": [f"{text}/held.jsonl"], "max_bad_share": 0.1}
    executor = {"shard_bytes": 30_000}
    for name, steps in (("one", ()), ("two", [{"kind": "length"}])):
        output = {"workers": workers, "folder": str(tmp_path / name), "shuffle": True}
        preprocess(config(name, steps, source=source, tokenizer={"path": "bytes"}, executor=executor, output=output))
    one, two = contents(tmp_path / "one"), contents(tmp_path / "two")
    assert not (tmp_path / "one" / "stages" / "read").exists() and (tmp_path / "two" / "stages" / "read").exists()
    assert all(one.pop(name) == two.pop(name) for name in list(one) if name not in ("manifest.json", "report.html"))
    manifests = [json.loads((tmp_path / name / "manifest.json").read_text()) for name in ("one", "two")]
    for key in ("inputs", "outputs", "checksums", "counts", "tokenizer"):
        assert manifests[0][key] == manifests[1][key], key
    assert manifests[0]["counts"]["num_bad"] == 1 and manifests[0]["counts"]["num_other_language"] == 1


def test_stages_need_not_be_kept(contents: Callable, config: Callable, tmp_path: Path) -> None:
    preprocess(config())
    preprocess(config("bare", output={"folder": str(tmp_path / "bare"), "keep_stages": False}))
    assert not (tmp_path / "bare" / "stages").exists()
    assert contents(tmp_path / "out") == contents(tmp_path / "bare")
    assert preprocess(config(output={"folder": str(tmp_path / "bare")})).was_done


def test_done_is_done(config: Callable, tmp_path: Path) -> None:
    preprocess(config())
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    start = time.perf_counter()
    assert preprocess(config(output={"workers": 3})).was_done  # workers change no byte
    assert time.perf_counter() - start < 2
    assert {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()} == before


def test_a_touched_but_equal_file_is_the_same_input(config: Callable, text: Path) -> None:
    preprocess(config())
    os.utime(text / "part-0.jsonl", (1, 1))
    assert preprocess(config()).was_done


def test_changes_are_noticed(contents: Callable, config: Callable, tmp_path: Path, text: Path) -> None:
    preprocess(config())
    path = text / "part-1.jsonl"
    path.write_text(path.read_text().replace("quick", "quack"))
    assert not preprocess(config()).was_done
    (text / "part-2.jsonl").write_text('{"text": "one more"}\n')
    assert not preprocess(config()).was_done
    assert not preprocess(config(tokenizer={"vocab_size": 340})).was_done
    (tmp_path / "out" / "valid.bin").unlink()
    assert not preprocess(config(tokenizer={"vocab_size": 340})).was_done
    assert preprocess(config(tokenizer={"vocab_size": 340})).was_done
    preprocess(config("fresh", tokenizer={"vocab_size": 340}))
    assert contents(tmp_path / "out") == contents(tmp_path / "fresh"), "made again, not mixed"


def test_growing_moves_no_document(config: Callable, tmp_path: Path, text: Path) -> None:
    def documents(split: str) -> set[bytes]:
        dataset = IndexedDataset(tmp_path / "out" / split)
        return {dataset[i].tobytes() for i in range(len(dataset))}

    byte_level = {"tokenizer": {"path": "bytes"}}
    preprocess(config(**byte_level))
    train, valid = documents("train"), documents("valid")
    (text / "part-0a.jsonl").write_text("".join(f'{{"text": "new {i}"}}\n' for i in range(100)))
    preprocess(config(**byte_level))
    assert train <= documents("train") and valid <= documents("valid")


def test_bad_records_are_listed_and_counted(config: Callable, tmp_path: Path, text: Path) -> None:
    with open(text / "part-1.jsonl", "ab") as file:
        file.write(b'{"text": 3}\nnot json\n{"text": "\xff"}\n')
    counts = preprocess(config()).manifest["counts"]
    assert counts["num_bad"] == 3
    lines = [json.loads(line) for line in (tmp_path / "out" / "quarantine.jsonl").read_text().splitlines()]
    assert [line["line"] for line in lines] == [301, 302, 303]
    assert all(line["file"] == str(text / "part-1.jsonl") and line["reason"] for line in lines)


def test_too_many_bad_records_fail_with_evidence(config: Callable, tmp_path: Path, text: Path) -> None:
    (text / "part-1.jsonl").write_text('{"content": "x"}\n' * 60)
    with pytest.raises(
        DataError, match=r"60 of 360 records are bad \(16.7%, allowed 1%\), first: .*part-1.jsonl:1: no"
    ):
        preprocess(config())
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"quarantine.jsonl", "stages"}
    assert len((tmp_path / "out" / "quarantine.jsonl").read_text().splitlines()) == 60
    allowed = {"max_bad_share": 0.2, "keep_damaged_files": True}  # all of that file is bad
    assert preprocess(config(source=allowed)).manifest["counts"]["num_bad"] == 60
    with pytest.raises(DataError, match="60 of 360"):  # judged again, not "already done"
        preprocess(config())


def test_damaged_file_fails_unless_allowed(config: Callable, text: Path) -> None:
    import gzip

    whole = gzip.compress((text / "part-1.jsonl").read_bytes())
    (text / "part-2.jsonl").write_bytes(whole[: len(whole) * 2 // 3])
    with pytest.raises(DataError, match=r"part-2.jsonl.*cut short; make the file whole again"):
        preprocess(config())
    assert preprocess(config(source={"keep_damaged_files": True})).manifest["counts"]["num_bad"] == 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"source": {"files": ["/nowhere/*.jsonl"]}}, "matches no file"),
        ({"split": {"valid_share": 0.0001}}, "valid split"),
        ({"split": {"valid_share": 0.9999}}, "validation split|train split"),
        ({"tokenizer": {"vocab_size": 30000}}, "largest that works"),
        ({"tokenizer": {"path": "/nowhere.model"}}, "no such tokenizer"),
        ({"source": {"text_key": "body"}}, "no key 'body'"),
        ({"source": {"text_key": "body"}, "tokenizer": {"path": "bytes"}}, "no key 'body'"),
    ],
)
def test_refusals_are_one_line_and_leave_no_outputs(
    config: Callable, tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    with pytest.raises(DataError, match=words) as caught:
        preprocess(config(**change))
    assert "\n" not in str(caught.value)
    left = {path.name for path in (tmp_path / "out").glob("*")}
    assert left <= {"tokenizer.model", "tokenizer_info.json", "quarantine.jsonl", "stages"}


def test_empty_files_are_no_corpus(config: Callable, text: Path) -> None:
    for path in text.iterdir():
        path.write_text("\n \n")
    with pytest.raises(DataError, match="no documents"):
        preprocess(config())
    with pytest.raises(DataError, match="no documents: 0 records"):
        preprocess(config(tokenizer={"path": "bytes"}))


def test_foreign_folder_is_not_touched(config: Callable, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "train.bin").write_bytes(b"mine")
    for call in (lambda: preprocess(config()), lambda: train_into(config(), out)):
        with pytest.raises(DataError, match=r"holds train.bin, which `megafp8 preprocess` did not write"):
            call()
    assert (out / "train.bin").read_bytes() == b"mine" and len(list(out.iterdir())) == 1


def test_folder_in_use(config: Callable, tmp_path: Path) -> None:
    from megafp8.corpus.folder import locked

    with locked(tmp_path / "out"), pytest.raises(ResourceError, match="another process"):
        preprocess(config())


def test_read_only_folder(config: Callable) -> None:
    with pytest.raises(ResourceError):
        preprocess(config(output={"folder": "/proc/nothing"}))


def test_trained_tokenizer_is_found_by_preprocess(contents: Callable, config: Callable, tmp_path: Path) -> None:
    spec = Path(train_into(config(), tmp_path / "out"))
    before = spec.stat().st_mtime_ns
    assert train_into(config(), tmp_path / "out") == str(spec)
    preprocess(config())
    assert spec.stat().st_mtime_ns == before
    preprocess(config("direct"))
    assert contents(tmp_path / "out") == contents(tmp_path / "direct")
    with pytest.raises(DataError, match="written with another tokenizer"):
        train_into(config(tokenizer={"vocab_size": 350}), tmp_path / "out")


def test_tokenizer_sees_the_train_split_only(config: Callable, tmp_path: Path) -> None:
    train_into(config(), tmp_path / "out")
    info = read_json(tmp_path / "out" / "tokenizer_info.json")
    preprocess(config())
    assert info["train_documents"] == len(IndexedDataset(tmp_path / "out" / "train"))


def test_languages_and_files_for_validation(config: Callable, tmp_path: Path, text: Path) -> None:
    rest = [json.loads(line) for path in sorted(text.iterdir()) for line in path.read_text().splitlines()]
    (text / "heldout.jsonl").write_text("".join(json.dumps(d) + "\n" for d in rest[:40]))
    for path in text.glob("part-*"):  # the same texts in both would be no held-out text
        lines = path.read_text().splitlines()
        path.write_text("\n".join(lines[40:] if path.name == "part-0.jsonl" else lines) + "\n")
    german = sum(document.get("lang") == "de" for document in rest)
    source = {"valid_files": [f"{text}/heldout*"], "languages": ["de"]}
    counts = preprocess(config(source=source, split={"valid_share": 0.0})).manifest["counts"]
    assert counts["splits"]["valid"]["documents"] == sum(document.get("lang") == "de" for document in rest[:40])
    assert counts["splits"]["train"]["documents"] + counts["splits"]["valid"]["documents"] == german
    assert counts["num_other_language"] == 600 - german - counts["num_empty"]
    assert counts["splits"]["train"]["languages"] == {"de": counts["splits"]["train"]["documents"]}
    again = preprocess(config(source=source, split={"valid_share": 0.0}))
    assert again.was_done and again.manifest["counts"] == counts
    with pytest.raises(DataError, match=r"598 not in source.languages \(fr\)"):
        preprocess(config("none", source={"languages": ["fr"]}, tokenizer={"path": "bytes"}))
    info = read_json(tmp_path / "out" / "tokenizer_info.json")
    assert info["train_documents"] == counts["splits"]["train"]["documents"], "the tokenizer sees none of the rest"


def test_text_files_and_named_tokenizer(config: Callable, tmp_path: Path) -> None:
    for i in range(40):
        (tmp_path / f"doc{i}.txt").write_text(f"document {i}\n" * 10)
    source = {"kind": "text", "files": [f"{tmp_path}/doc*.txt"], "language": "en"}
    made = preprocess(config(source=source, tokenizer={"path": "bytes"}))
    assert made.manifest["counts"]["num_records"] == 40
    assert not (tmp_path / "out" / "tokenizer.model").exists()
    train = IndexedDataset(tmp_path / "out" / "train")
    assert train.dtype == np.uint16 and train.side["languages"] == {"en": len(train)}


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ({"kind": "jsonl", "files": []}, "files is empty"),
        ({"kind": "python_stdlib"}, "remove it"),
        ({"kind": "orc"}, "orc"),
        ({"encoding": "utf-9"}, "not known to Python"),
        ({"fils": ["x"]}, "nearest: files"),
    ],
)
def test_configuration_errors(config: Callable, source: dict[str, Any], words: str) -> None:
    from megafp8.core.errors import ConfigError

    with pytest.raises(ConfigError, match=words):
        config(source=source)


def test_no_torch_in_preprocessing() -> None:
    code = "import sys, megafp8.corpus.run, megafp8.corpus.executors.local\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[3])
