"""Merging and splitting datasets: ids and cuts stay, equal documents go together, nothing is left half-written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from megafp8.cli.main import main
from megafp8.core.errors import ConfigError, DataError, ResourceError
from megafp8.data import IndexedDataset, IndexedDatasetWriter
from megafp8.data import split as split_module
from megafp8.data.indexed_writer import checksum_file
from megafp8.data.merge import merge
from megafp8.data.output_lock import output_lock
from megafp8.data.sources import find_tokenizer
from megafp8.data.split import Amount, parse_amount, split
from megafp8.data.tokenizer import ByteTokenizer, identity
from megafp8.data.verify import problems, stats

BYTES = identity(ByteTokenizer())
EOD = BYTES["eod_id"]
ADDED = {"id": 1, "content": "<|endoftext|>", "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": False, "special": True}  # fmt: skip


def documents_of(dataset: IndexedDataset) -> list[list[int]]:
    return [dataset.document(i).tolist() for i in range(dataset.num_documents)]


def made(seed: int, count: int, longest: int = 30) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [[*rng.integers(4, 250, size=rng.integers(0, longest)).tolist(), EOD] for _ in range(count)]


def write(prefix: Path, documents: list[list[int]], *, dtype: str = "u2", pieces: bool = False, **side: object) -> Path:
    """A dataset; `pieces`: documents of several sequences."""
    with IndexedDatasetWriter(prefix, dtype, metadata={"tokenizer": BYTES, **side}) as writer:
        for document in documents:
            cut = len(document) // 3
            writer.add_document(document, [cut, 0, len(document) - cut] if pieces else None)
    return prefix


def without_side(prefix: Path) -> Path:
    Path(f"{prefix}.json").unlink()
    return prefix


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_merge_is_what_one_writer_would_have_written(tmp_path: Path) -> None:
    sets = [made(1, 50), [], made(2, 30), [[EOD]]]
    paths = [write(tmp_path / f"s{i}", documents) for i, documents in enumerate(sets)]
    together = write(tmp_path / "together", [document for documents in sets for document in documents])
    dataset = merge(paths, tmp_path / "out" / "all")
    for suffix in ("bin", "idx"):
        assert checksum_file(Path(f"{together}.{suffix}")) == checksum_file(tmp_path / "out" / f"all.{suffix}")
    assert problems(dataset) == [] and dataset.side["tokenizer"] == BYTES
    assert dataset.side["unigram_entropy_nats"] == pytest.approx(stats(dataset).unigram_entropy_nats, abs=1e-6)
    assert [one["num_documents"] for one in dataset.side["merged_from"]] == [50, 0, 30, 1]
    assert names_in(tmp_path / "out") == {"all.bin", "all.idx", "all.json"}


def test_merge_keeps_sequences_and_adds_counts(tmp_path: Path) -> None:
    side = {"languages": {"en": 20}, "sources": {"a": 20}, "text_bytes": 100}
    first = write(tmp_path / "a", made(1, 20), pieces=True, **side)
    second = write(tmp_path / "b", made(2, 5), **{**side, "languages": {"en": 2, "de": 3}})
    dataset = merge([first, second], tmp_path / "all")
    a, b = IndexedDataset(first), IndexedDataset(second)
    assert dataset.sequence_lengths.tolist() == [*a.sequence_lengths.tolist(), *b.sequence_lengths.tolist()]
    assert documents_of(dataset) == documents_of(a) + documents_of(b) and len(dataset) == 65
    assert dataset.side["languages"] == {"en": 22, "de": 3} and dataset.side["text_bytes"] == 200
    assert dataset.side["bytes_per_token"] == pytest.approx(200 / dataset.num_tokens, abs=1e-6)


def test_merge_of_foreign_sets(tmp_path: Path) -> None:
    """Megatron's sets have no side file: all may be silent, or what wrote them is named, and is checked."""
    plain = [without_side(write(tmp_path / name, made(i, 9))) for i, name in enumerate("ab")]
    assert "tokenizer" not in merge(plain, tmp_path / "silent").side
    ours = write(tmp_path / "c", made(3, 9))
    with pytest.raises(DataError, match="no side file says which tokenizer wrote it"):
        merge([*plain, ours], tmp_path / "out")
    assert merge([*plain, ours], tmp_path / "out", tokenizer=ByteTokenizer()).side["tokenizer"] == BYTES
    wild = without_side(write(tmp_path / "wild", [[5000, EOD]]))
    with pytest.raises(DataError, match=r"wild\.bin: id 5000, outside of 260 ids"):
        merge([wild, ours], tmp_path / "other", tokenizer=ByteTokenizer())
    assert not list(tmp_path.glob("*other*"))


def test_merge_of_two_dtypes(tmp_path: Path) -> None:
    small, large = write(tmp_path / "a", made(1, 9)), write(tmp_path / "b", made(2, 9), dtype="i4")
    with pytest.raises(DataError, match="a uint16, .*b int32; write all as --dtype int32"):
        merge([small, large], tmp_path / "out")
    dataset = merge([small, large], tmp_path / "out", dtype="int32")
    assert dataset.dtype == np.int32 and documents_of(dataset) == made(1, 9) + made(2, 9)
    big = without_side(write(tmp_path / "big", [[70000, EOD]], dtype="i4"))
    with pytest.raises(DataError, match="token id 70000 does not fit uint16"):
        merge([without_side(small), big], tmp_path / "wrapped", dtype="uint16")


def test_merge_refuses_and_leaves_nothing(tmp_path: Path) -> None:
    a = write(tmp_path / "a", made(1, 9))
    b = write(tmp_path / "b", made(2, 9), tokenizer={**BYTES, "fingerprint": "f" * 64})
    before = names_in(tmp_path)
    with pytest.raises(DataError, match="written with tokenizer bytes ffffffffffff of 260 ids, but .*a is"):
        merge([a, b], tmp_path / "out")
    begun = write(tmp_path / "begun", made(2, 9), tokenizer={**BYTES, "add_bos": True})
    before |= names_in(tmp_path)
    with pytest.raises(DataError, match="its documents are written as begin id, text, end id"):
        merge([a, begun], tmp_path / "out")
    with pytest.raises(ConfigError, match="named twice"):
        merge([a, tmp_path / "." / "a"], tmp_path / "out")
    with pytest.raises(ConfigError, match="two datasets at least"):
        merge([a], tmp_path / "out")
    c = write(tmp_path / "c", made(3, 9))
    for out, words in ((a, "is read as well"), (b, r"b\.idx: is there already; choose another name, or --overwrite")):
        with pytest.raises(DataError, match=words):
            merge([a, c], out)
    data = bytearray(Path(f"{c}.bin").read_bytes())
    data[3] ^= 8
    Path(f"{c}.bin").write_bytes(data)
    with pytest.raises(DataError, match=r"c\.bin: checksum"):
        merge([a, c], tmp_path / "out")
    assert names_in(tmp_path) == before | {"c.bin", "c.idx", "c.json"}


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a", made(1, 9)), write(tmp_path / "b", made(2, 9))
    with output_lock(tmp_path / "out"), pytest.raises(ResourceError, match="out: another process is writing it"):
        merge([a, b], tmp_path / "out")
    (tmp_path / ".out.lock").write_text("left by a process that was killed")
    assert merge([a, b], tmp_path / "out").num_documents == 18 and not (tmp_path / ".out.lock").exists()
    assert merge([b, a], tmp_path / "out", overwrite=True)[0].tolist() == made(2, 9)[0]


@pytest.mark.parametrize("pieces", [False, True])
def test_split_is_a_partition(tmp_path: Path, pieces: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split_module, "_CHUNK_TOKENS", 64)
    monkeypatch.setattr(split_module, "_CHUNK_DOCUMENTS", 50)
    documents = made(1, 400)
    source = write(tmp_path / "d", documents, pieces=pieces)
    names = {"a": Amount("%", 25), "rest": Amount("rest"), "b": Amount("docs", 100), "c": Amount("tokens", 900)}
    found, missing = split(source, {str(tmp_path / "out" / name): amount for name, amount in names.items()})
    parts = {Path(name).name: dataset for name, dataset in found.items()}
    assert missing == 0 and all(problems(dataset) == [] for dataset in parts.values())
    everything = Counter(tuple(document) for dataset in parts.values() for document in documents_of(dataset))
    assert everything == Counter(map(tuple, documents))
    for dataset in parts.values():  # the order of the source
        at = iter(documents)
        assert all(document in at for document in documents_of(dataset))
    assert parts["a"].side["split_from"]["seed"] == 1234 and parts["a"].side["tokenizer"] == BYTES
    # equal documents go together (here: those of no or one id): at most that many fewer, or tokens short by the next
    alike = max(Counter(map(tuple, documents)).values())
    assert 100 - alike < parts["b"].num_documents <= 100 and 900 - 30 * alike < parts["c"].num_tokens <= 900
    # 400 documents, binomial: sd sqrt(400 * .25 * .75) = 8.7, 5 of them = 43
    assert abs(parts["a"].num_documents - 100) < 43
    assert sum(len(dataset) for dataset in parts.values()) == (3 if pieces else 1) * 400
    assert not list((tmp_path / "out").glob(".*"))


def test_a_share_stays_where_it_is_when_documents_are_added(tmp_path: Path) -> None:
    few, more = made(1, 200), made(2, 200)
    name = str(tmp_path / "part")
    before = documents_of(split(write(tmp_path / "few", few), {name: Amount("%", 20)})[0][name])
    mixed = write(tmp_path / "more", more + few[::-1] + few)
    after = documents_of(split(mixed, {name: Amount("%", 20)}, overwrite=True)[0][name])
    chosen = {tuple(document) for document in before}
    assert {tuple(document) for document in few if document in after} == chosen
    assert all(after.count(list(document)) >= 2 for document in chosen), "both copies"
    other, _ = split(mixed, {name: Amount("%", 20)}, overwrite=True, seed=5)
    assert documents_of(other[name]) != after


def test_exact_number_of_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without equal documents the number is met exactly, also where a bucket of places is cut finer and finer."""
    documents = [[4 + i % 200, 4 + i // 200, EOD] for i in range(1000)]
    source = write(tmp_path / "d", documents)
    monkeypatch.setattr(split_module, "_BUCKETS", 4)
    for few in (1 << 20, 3):
        monkeypatch.setattr(split_module, "_FEW", few)
        parts = {str(tmp_path / f"{n}-{few}"): Amount("docs", n) for n in (1, 10, 489, 500)}
        found, missing = split(source, parts)
        assert [dataset.num_documents for dataset in found.values()] == [1, 10, 489, 500] and missing == 0
    found, missing = split(source, {str(tmp_path / "t"): Amount("tokens", 100)})
    assert found[str(tmp_path / "t")].num_tokens == 99 and missing == 967


def test_split_refuses(tmp_path: Path) -> None:
    source = write(tmp_path / "d", made(1, 20))
    before = names_in(tmp_path)
    with pytest.raises(DataError, match=r"30 docs asked for, but there are 20"):
        split(source, {str(tmp_path / "x"): Amount("docs", 30)})
    with pytest.raises(DataError, match=r"y: would hold none of the 20 documents"):
        split(source, {str(tmp_path / "x"): Amount("%", 100), str(tmp_path / "y"): Amount("rest")})
    with pytest.raises(ConfigError, match="add up to 110%"):
        split(source, {"x": Amount("%", 60), "y": Amount("%", 50)})
    with pytest.raises(ConfigError, match="two parts take the rest"):
        split(source, {"x": Amount("rest"), "y": Amount("rest")})
    with pytest.raises(DataError, match="is read as well"):
        split(source, {str(source): Amount("rest")})
    assert names_in(tmp_path) == before


def test_amounts() -> None:
    assert parse_amount("2%") == Amount("%", 2.0) and parse_amount("1e9tokens") == Amount("tokens", 1e9)
    assert parse_amount("5_000docs") == Amount("docs", 5000.0) and parse_amount("rest") == Amount("rest")
    assert [str(parse_amount(text)) for text in ("2.5%", "1e6tokens", "rest")] == ["2.5%", "1,000,000 tokens", "rest"]
    for text in ("", "2", "-1%", "0docs", "101%", "1e999tokens", "many", "5 docs", "nan%"):
        with pytest.raises(ConfigError):
            parse_amount(text)


def test_verbs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = write(tmp_path / "a", made(1, 90)), write(tmp_path / "b", made(2, 9))
    assert main(["data", "merge", f"{tmp_path}/m/all", str(a), str(b)]) == 0
    assert "99 documents" in capsys.readouterr().out
    assert main(["data", "split", f"{tmp_path}/m/all", f"{tmp_path}/s/x=10docs", f"{tmp_path}/s/y=50%"]) == 0
    out = capsys.readouterr().out
    assert "10 documents" in out and "documents are in none of these" in out
    assert main(["data", "verify", f"{tmp_path}/s", f"{tmp_path}/m"]) == 0
    assert capsys.readouterr().out.count("checksums and index hold") == 3
    assert main(["data", "peek", f"{tmp_path}/s/x", "--sample", "2", "--ids"]) == 0
    assert capsys.readouterr().out.count("--- document") == 2
    assert main(["data", "peek", f"{tmp_path}/s/x", "--start", "99"]) == 0
    assert "no document from 99 on; there are 10" in capsys.readouterr().out
    assert main(["data", "stats", f"{tmp_path}/s", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["documents"] == 10
    Path(f"{tmp_path}/s/x.bin").write_bytes(b"")
    assert main(["data", "verify", f"{tmp_path}/s"]) == 3
    captured = capsys.readouterr()
    assert "s/y: checksums" in captured.out and "x.bin: 0 bytes" in captured.err, "the others are looked at too"
    for words, line in (
        (["split", str(a), "x"], "write OUT=AMOUNT"),
        (["split", str(a), "x=1%", "x=2%"], "named twice"),
        (["merge", f"{tmp_path}/q", str(a), "/nowhere/b"], "no such file"),
        (["merge", "/proc/nothing/q", str(a), str(b)], "/proc/nothing"),
        (["verify", "/proc"], "no dataset in this folder"),
    ):
        assert main(["data", *words]) in (2, 3, 6)
        errors = [text for text in capsys.readouterr().err.splitlines() if ": error: " in text]
        assert len(errors) == 1 and line in errors[0]


def test_the_tokenizer_is_found_where_the_documents_came_from(tmp_path: Path) -> None:
    (tmp_path / "corpus").mkdir()
    model = tmp_path / "corpus" / "tokenizer.json"
    model.write_text(json.dumps({
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [ADDED], "normalizer": None,
        "pre_tokenizer": None, "post_processor": None, "decoder": None,
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
                  "vocab": {"a": 0, "<|endoftext|>": 1}, "merges": []},
    }))  # fmt: skip
    (tmp_path / "corpus" / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    from megafp8.data.tokenizer import load_tokenizer

    facts = identity(load_tokenizer(model))
    a = write(tmp_path / "corpus" / "a", [[0, 1]], tokenizer=facts)
    b = write(tmp_path / "corpus" / "b", [[0, 0, 1]], tokenizer=facts)
    merge([a, b], tmp_path / "m" / "all")
    found, _ = split(tmp_path / "m" / "all", {str(tmp_path / "s" / "x"): Amount("docs", 1)})
    assert find_tokenizer(found[str(tmp_path / "s" / "x")]) == str(model)
    model.unlink()
    assert find_tokenizer(found[str(tmp_path / "s" / "x")]) == ""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_number_of_documents(tmp_path: Path) -> None:
    """Ten million documents, 360 MB of files: merged with themselves under another name, split in three. What the
    process holds at its peak, mapped pages too, stays below 300 MB (it is 100 MB after the imports)."""
    size = 10_000_000
    with IndexedDatasetWriter(tmp_path / "d", "u2") as writer:
        for start in range(0, size, 1 << 20):
            count = min(1 << 20, size - start)
            ids = np.empty((count, 3), "<u2")
            ids[:, 0], ids[:, 1], ids[:, 2] = np.arange(count) % 60000, start >> 16, 2
            writer.add_documents(ids.ravel(), np.full(count, 3))
    for suffix in ("bin", "idx"):
        os.link(tmp_path / f"d.{suffix}", tmp_path / f"e.{suffix}")
    code = f"""if True:
        from pathlib import Path
        from megafp8.data.merge import merge
        from megafp8.data.split import Amount, split
        both = merge(["{tmp_path}/d", "{tmp_path}/e"], "{tmp_path}/m/both")
        assert both.num_documents == {2 * size}
        parts = {{"{tmp_path}/s/a": Amount("docs", 1e6), "{tmp_path}/s/b": Amount("%", 30),
                 "{tmp_path}/s/c": Amount("rest")}}
        found, missing = split("{tmp_path}/m/both", parts)
        assert missing == 0 and sum(part.num_documents for part in found.values()) == {2 * size}
        print(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0])
    """
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert int(done.stdout) < 300_000  # kB; unlike ru_maxrss it begins anew with the program
