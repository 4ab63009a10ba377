"""Cases that other codebases got wrong: index arithmetic, blends at their ends, epochs, stops and resumes."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from megafp8.core.errors import DataError
from megafp8.data import IndexedDataset, IndexedDatasetWriter
from megafp8.data.blend import Blend
from megafp8.data.indexed import HEADER
from megafp8.data.loader import Loader
from megafp8.data.merge import merge
from megafp8.data.samples import SampleStream
from megafp8.data.verify import problems
from tests.unit.data.test_samples import Counting


def write(prefix: Path, documents: list[list[int]]) -> Path:
    with IndexedDatasetWriter(prefix, "u2") as writer:
        for document in documents:
            writer.add_document(document)
    return prefix


def test_lengths_count_the_end_of_document_id(tmp_path: Path) -> None:
    """R116."""
    dataset = IndexedDataset(write(tmp_path / "d", [[5, 6, 7, 2], [2], [9, 2]]))
    assert dataset.sequence_lengths.tolist() == [4, 1, 2] and dataset.num_tokens == 7
    assert os.path.getsize(tmp_path / "d.bin") == 2 * 7 == 2 * int(dataset.sequence_lengths.sum())


@pytest.mark.parametrize("beyond", [2**31 + 14, 2**32 + 6, 2**33])
def test_pointers_beyond_32_bits(tmp_path: Path, beyond: int) -> None:
    """R118: a sparse .bin of so many bytes, its last document real; offsets are made by the writer from lengths."""
    writer = IndexedDatasetWriter(tmp_path / "d", "u2")
    lengths = np.full(beyond // 2 // 2**29, 2**29, np.int64)
    lengths = np.append(lengths, [beyond // 2 - lengths.sum(), 3]).astype("<i4")
    writer._files["lengths"].write(lengths.tobytes())
    writer._files["documents"].write(np.arange(len(lengths), dtype="<i8").tobytes())
    writer.num_sequences = writer.num_documents = len(lengths)
    writer._join_index()
    os.rename(writer._partial("idx"), tmp_path / "d.idx")
    with open(tmp_path / "d.bin", "wb") as file:
        file.seek(beyond)
        file.write(np.array([11, 12, 2], "<u2").tobytes())
    writer.abort()
    dataset = IndexedDataset(tmp_path / "d")
    assert dataset.sequence_offsets.dtype == np.int64 and (np.diff(dataset.sequence_offsets) >= 0).all()
    assert int(dataset.sequence_offsets[-1]) == beyond and dataset.document(len(lengths) - 1).tolist() == [11, 12, 2]
    assert dataset.tokens(beyond // 2, beyond // 2 + 3).tolist() == [11, 12, 2]


@pytest.mark.parametrize("before", [2**31 - 1, 2**31, 2**31 + 1, 2**40])
def test_document_numbers_beyond_32_bits(tmp_path: Path, before: int) -> None:
    """R120: the number of a document's first sequence, and of a sample, past what 32 bits hold."""
    with IndexedDatasetWriter(tmp_path / "a", "u2") as writer:
        writer.add_document([5, 2])
    with IndexedDatasetWriter(tmp_path / "b", "u2") as writer:
        writer.num_sequences = before
        writer.add_dataset(IndexedDataset(tmp_path / "a"))
        writer.add_document([6, 2])
        writer._files["documents"].flush()
        starts = np.fromfile(writer._partial("documents"), "<i8")
        writer.num_sequences = 2
    assert starts.tolist() == [before, before + 1]
    stream = SampleStream(Counting(81), 8, seed=1)
    assert 0 <= stream.position(before) < 10 and sum(Blend([stream] * 3, [1, 1, 1], 0).counts(before)) == before


def test_a_blend_never_leaves_a_small_set(tmp_path: Path) -> None:
    """R126: 7, 100 and 1000 documents at 0.5, 0.3, 0.2 through three epochs of the whole: every sample is there, no set
    has a gap, and shares hold at every prefix to one sample for each of the two levels of the tree."""
    weights, sets = (0.5, 0.3, 0.2), []
    for count in (7, 100, 1000):
        path = write(tmp_path / str(count), [[4 + i % 1000] * 8 for i in range(count)])
        sets.append(SampleStream(IndexedDataset(path), 8, seed=count))
    blend = Blend(sets, weights, 0)
    counts = [0, 0, 0]
    for index in range(3 * sum(stream.num_samples for stream in sets)):
        which, number = blend.locate(index)
        assert number == counts[which] and blend.sample(index).shape == (9,)
        counts[which] += 1
        assert all(abs(n - w * (index + 1)) < 2 for n, w in zip(counts, weights))
    assert counts == blend.counts(sum(counts))


def test_every_size_gives_whole_samples_once_an_epoch() -> None:
    """R134: 1 to 50 documents of 1 to 40 tokens, S from 2 to 65, up to 500 samples wanted: never an error but that of a
    stream shorter than one sample; each target once an epoch but the (T - 1) mod S last, which are not served."""
    rng = np.random.default_rng(0)
    for trial in range(120):
        tokens, length = int(rng.integers(1, 41, size=rng.integers(1, 51)).sum()), int(rng.integers(2, 66))
        if tokens < length + 1:
            with pytest.raises(DataError, match="for one sample"):
                SampleStream(Counting(tokens), length, trial)
            continue
        stream = SampleStream(Counting(tokens), length, seed=trial)
        wanted, size = int(rng.integers(1, 501)), stream.num_samples
        assert size == (tokens - 1) // length
        for epoch in range(-(-wanted // size)):
            numbers = range(epoch * size, min((epoch + 1) * size, wanted))
            found = [stream.sample(number) for number in numbers]
            assert all(sample.shape == (length + 1,) for sample in found)
            targets = sorted(np.concatenate([sample[1:] for sample in found]).tolist())
            assert len(targets) == len(set(targets))
            if len(found) == size:
                assert targets == list(range(1, size * length + 1))


def loader(consumed: int = 0, seed: int = 3) -> Loader:
    streams = [SampleStream(Counting(8 * n + 1), 8, seed=seed) for n in (9, 14)]
    source = Blend(streams, [1, 2], seed)
    return Loader(source, micro_batch=2, global_batch=4, dp_rank=0, dp_size=1, eod_id=2, consumed_samples=consumed)


def first_tokens(steps: int, it: Loader) -> list[list[int]]:
    return [batch.tokens[:, 0].tolist() for _ in range(steps) for batch in it.next_step()]


def test_a_stop_anywhere_in_any_epoch_changes_no_order() -> None:
    """R019, R022: three epochs and more straight, against a new loader at 50 random places; epochs differ in order."""
    straight = first_tokens(40, loader())
    for stop in np.random.default_rng(1).integers(1, 39, size=50).tolist():
        assert first_tokens(40 - stop, loader(4 * stop)) == straight[2 * stop :], stop
    stream = SampleStream(Counting(8 * 14 + 1), 8, seed=3)
    orders = [[stream.position(14 * epoch + i) for i in range(14)] for epoch in range(3)]
    assert len({tuple(order) for order in orders}) == 3 and all(sorted(order) == list(range(14)) for order in orders)


def test_opening_builds_and_writes_nothing(tmp_path: Path) -> None:
    """R130: no index is built and none cached, so that no rank waits for another and no shared disk is needed: a folder
    that cannot be written serves samples."""
    path = write(tmp_path / "d", [[5] * 100, [2]])
    before = {entry.name: entry.stat().st_mtime_ns for entry in os.scandir(tmp_path)}
    assert SampleStream(IndexedDataset(path), 8, seed=0).sample(3).shape == (9,)
    assert before == {entry.name: entry.stat().st_mtime_ns for entry in os.scandir(tmp_path)}


def test_merged_parts_are_read_where_they_lie(tmp_path: Path) -> None:
    """R118 by the merge itself: documents of the second and third part come back, whatever went before."""
    parts = [write(tmp_path / str(i), [[10 * i + j + 3, 2] for j in range(4)]) for i in range(3)]
    dataset = merge(parts, tmp_path / "all")
    assert [dataset.document(i).tolist() for i in (4, 8, 11)] == [[13, 2], [23, 2], [26, 2]] and not problems(dataset)
    assert HEADER.size + 12 * 12 + 8 * 13 == os.path.getsize(tmp_path / "all.idx")
