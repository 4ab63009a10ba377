"""Files that are not those that were written: found at a start in what it reads, by verify in every bit."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from megafp8.core.errors import DataError
from megafp8.core.jsonio import sealed
from megafp8.data import IndexedDataset, IndexedDatasetWriter, integrity
from megafp8.data.integrity import block_starts, check_blocks, fingerprint
from megafp8.data.verify import problems

TOKENIZER = {"kind": "bytes", "fingerprint": "f" * 64, "vocab_size": 1000, "eod_id": 2}


def write(prefix: Path, documents: list[list[int]]) -> IndexedDataset:
    with IndexedDatasetWriter(prefix, "u2", metadata={"tokenizer": TOKENIZER, "languages": {"日本": 3}}) as writer:
        for document in documents:
            writer.add_document([*document, 2])
    return IndexedDataset(prefix)


def random_documents(seed: int, count: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(3, 1000, rng.integers(1, 40)).tolist() for _ in range(count)]


def everything(dataset: IndexedDataset) -> tuple:
    """All that a reader can get out of a dataset."""
    documents = [dataset.document(i).tolist() for i in range(dataset.num_documents)]
    return documents, dataset.tokens(0, dataset.num_tokens).tolist(), dataset.side, str(dataset.dtype)


def test_of_a_thousand_flips_over_all_files_verify_misses_none(tmp_path: Path) -> None:
    whole = everything(write(tmp_path / "d", random_documents(1, 60)))
    rng, harmless = random.Random(11), 0
    for suffix in ("bin", "idx", "json"):
        path = tmp_path / f"d.{suffix}"
        good = path.read_bytes()
        for number in range(400):
            at, bit = rng.randrange(len(good)), rng.randrange(8)
            bad = bytearray(good)
            bad[at] ^= 1 << bit
            path.write_bytes(bad)
            try:
                dataset = IndexedDataset(tmp_path / "d")
                found = bool(problems(dataset))
            except DataError as error:
                found = "\n" not in str(error)
            if not found:  # a blank of the JSON that became another kind of blank
                assert everything(dataset) == whole, f"flip {number}: bit {bit} of byte {at} of {path.name} was silent"
                harmless += 1
        path.write_bytes(good)
    assert harmless < 40


def test_a_start_reads_all_of_a_small_set_and_finds_every_flip(tmp_path: Path) -> None:
    dataset = write(tmp_path / "d", random_documents(2, 50))
    check_blocks(dataset)
    for path in (dataset.bin_path, dataset.idx_path):
        good = path.read_bytes()
        for at in range(0, len(good), 37):
            bad = bytearray(good)
            bad[at] ^= 4
            path.write_bytes(bad)
            with pytest.raises(DataError, match=f"{path.name}: bytes 0 to"):
                check_blocks(dataset)
        path.write_bytes(good)
    check_blocks(dataset)


def test_a_start_looks_at_few_blocks_of_a_large_set_others_each_time(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(integrity, "BLOCK_BYTES", 64)
    dataset = write(tmp_path / "d", random_documents(3, 3000))
    starts = block_starts(dataset.bin_path.stat().st_size)
    assert len(starts) == 256 and starts[0] == 0 and starts[-1] + 64 == dataset.bin_path.stat().st_size
    data = bytearray(dataset.bin_path.read_bytes())
    for start in starts[100:110]:
        data[start + 5] ^= 1
    dataset.bin_path.write_bytes(data)
    found = 0
    for seed in range(60):
        try:
            check_blocks(dataset, choice=random.Random(seed))
        except DataError:
            found += 1
    # 10 of 254 blocks are bad, 14 are drawn: 1 - C(244,14)/C(254,14) = 0.44 of 60 draws, 26 +- 4
    assert 10 < found < 45
    data[3] ^= 1  # the first block is always read
    dataset.bin_path.write_bytes(data)
    with pytest.raises(DataError, match="bytes 0 to 64 are not those"):
        check_blocks(dataset)


@pytest.mark.parametrize(("size", "count"), [(0, 0), (1, 1), (1 << 16, 1), ((1 << 16) + 1, 2), (1 << 24, 256)])
def test_blocks_of_a_small_file_cover_it(size: int, count: int) -> None:
    starts = block_starts(size)
    assert len(starts) == count
    covered = {b for start in starts for b in (start, min(size, start + integrity.BLOCK_BYTES))}
    assert not size or (min(covered) == 0 and max(covered) == size)
    assert all(b - a <= integrity.BLOCK_BYTES for a, b in pairwise(starts))


def test_a_fingerprint_is_of_the_tokens_not_of_the_place(tmp_path: Path) -> None:
    documents = random_documents(4, 30)
    first = fingerprint(write(tmp_path / "a", documents))
    assert fingerprint(write(tmp_path / "elsewhere" / "b", documents)) == first
    others = [documents[::-1], documents[:-1], [*documents[:-1], [*documents[-1][:-1], 7]]]
    found = [fingerprint(write(tmp_path / f"o{i}", other)) for i, other in enumerate(others)]
    assert len({first, *found}) == 4
    plain = []  # as Megatron writes them
    for i, one in enumerate((documents, documents, *others)):
        write(tmp_path / f"p{i}", one)
        (tmp_path / f"p{i}.json").unlink()
        plain.append(fingerprint(IndexedDataset(tmp_path / f"p{i}")))
    assert plain[0] == plain[1] and len(set(plain)) == 4


def test_a_side_file_of_the_earlier_version_is_read(tmp_path: Path) -> None:
    write(tmp_path / "d", [[5, 6]])
    path = tmp_path / "d.json"
    side = json.loads(path.read_text())
    del side["checksum"], side["blocks"]
    path.write_text(json.dumps({**side, "format_version": 1}))
    dataset = IndexedDataset(tmp_path / "d")
    check_blocks(dataset)
    assert problems(dataset) == []


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"format_version": 3}, "side file of version 3"),
        ({"tokenizer": {"vocab_size": [1]}}, "tokenizer is not what"),
        ({"blocks": "x"}, "blocks is not what"),
        ({"blocks": {"bin": "00"}}, "another number"),
        ({"num_tokens": "3"}, "says 3 tokens"),
    ],
)
def test_side_files_that_someone_made(tmp_path: Path, change: dict, match: str) -> None:
    write(tmp_path / "d", [[5, 6]])
    side = json.loads((tmp_path / "d.json").read_text())
    (tmp_path / "d.json").write_text(json.dumps(sealed({**side, **change})))
    with pytest.raises(DataError, match=match):
        check_blocks(IndexedDataset(tmp_path / "d"))
