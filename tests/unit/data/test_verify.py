"""What opening does not read, `verify` does: every byte of both files."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from megafp8.data import IndexedDataset, IndexedDatasetWriter
from megafp8.data import verify as verify_module
from megafp8.data.verify import count_ids, problems, stats, unigram_entropy_nats

TOKENIZER = {"vocab_size": 10, "eod_id": 2}


def write(prefix: Path, documents: list[list[int]]) -> IndexedDataset:
    with IndexedDatasetWriter(prefix, "u2", metadata={"tokenizer": TOKENIZER}) as writer:
        for document in documents:
            writer.add_document(document)
    return IndexedDataset(prefix)


def test_a_good_set_has_no_problems(tmp_path: Path) -> None:
    assert problems(write(tmp_path / "d", [[5, 6, 2], [2], [9, 2]])) == []


def test_any_flipped_bit_of_the_tokens_is_found(tmp_path: Path) -> None:
    write(tmp_path / "d", [[5, 6, 2], [7, 2]])
    path = tmp_path / "d.bin"
    data = path.read_bytes()
    for bit in range(8 * len(data)):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(bytes(changed))
        assert problems(IndexedDataset(tmp_path / "d")), bit


def test_ids_outside_of_the_vocabulary(tmp_path: Path) -> None:
    assert "id 12 at token 1" in problems(write(tmp_path / "d", [[5, 12, 2]]))[0]


def test_documents_have_to_end(tmp_path: Path) -> None:
    assert "1 end-of-document ids in 2 documents" in problems(write(tmp_path / "d", [[5, 6], [7, 2]]))[0]


def test_stats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify_module, "_CHUNK", 2)
    dataset = write(tmp_path / "d", [[5, 5, 2], [6, 2]])
    found = stats(dataset)
    assert (found.num_documents, found.num_tokens, found.lengths[0], found.lengths[-1]) == (2, 5, 2, 3)
    assert found.counts.tolist() == [0, 0, 2, 0, 0, 2, 1]
    # counts 2, 2, 1 of 5; exact up to the rounding of a few float64 operations, hence 1e-12
    expected = -(2 * 0.4 * math.log(0.4) + 0.2 * math.log(0.2))
    assert found.unigram_entropy_nats == pytest.approx(expected, abs=1e-12)
    assert len(count_ids(dataset, vocab_size=10)) == 10


def test_entropy_of_uniform_ids_is_log_of_their_number() -> None:
    assert unigram_entropy_nats(np.full(8192, 3)) == pytest.approx(math.log(8192), abs=1e-9)  # 8192 roundings of 1e-16
    assert unigram_entropy_nats(np.zeros(4, np.int64)) == 0.0


def test_empty_set(tmp_path: Path) -> None:
    assert problems(write(tmp_path / "d", [])) == [] and stats(IndexedDataset(tmp_path / "d")).num_tokens == 0
