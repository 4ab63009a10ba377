"""The global shuffle: a permutation, the same whatever the memory, and memory that does not grow with the split."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megafp8.corpus import shuffle
from megafp8.corpus.run import preprocess
from megafp8.corpus.shuffle import Shuffle, places, shuffle_keys
from megafp8.data import IndexedDataset
from megafp8.data.samples import permuted

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("size", [1, 2, 3, 64, 65, 1000, 4097])
def test_places_are_the_permutation_of_the_loader(size: int) -> None:
    keys = shuffle_keys(7, "train")
    found = places(0, size, size, keys)
    assert sorted(found.tolist()) == list(range(size))
    assert found.tolist() == [permuted(i, size, keys) for i in range(size)]
    assert places(size // 2, size - size // 2, size, keys).tolist() == found[size // 2 :].tolist()
    if size > 64:
        assert (found != places(0, size, size, shuffle_keys(8, "train"))).any()
        assert (found != places(0, size, size, shuffle_keys(7, "valid"))).any()


def shuffled(folder: Path, documents: list[np.ndarray], memory_bytes: int, batch: int) -> tuple[list[list[int]], int]:
    total = sum(len(document) for document in documents)
    made = Shuffle(folder, len(documents), 2 * total, np.dtype("<u2"), shuffle_keys(1, "train"), memory_bytes)
    for start in range(0, len(documents), batch):
        some = documents[start : start + batch]
        made.add(np.concatenate(some), np.asarray([len(document) for document in some], "<i4"))
    found = []
    for ids, lengths in made.ordered():
        assert len(ids) == lengths.sum()
        found += [part.tolist() for part in np.split(ids, np.cumsum(lengths)[:-1])]
    assert not folder.exists()
    return found, made.num_buckets


def test_order_does_not_depend_on_memory_or_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(3)
    documents = [rng.integers(0, 60000, rng.integers(1, 60)).astype("<u2") for _ in range(2000)]
    one, buckets = shuffled(tmp_path / "one", documents, 1 << 30, 10**6)
    assert buckets == 1
    where = places(0, len(documents), len(documents), shuffle_keys(1, "train"))
    expected: list[list[int]] = [[] for _ in documents]
    for document, place in zip(documents, where):
        expected[place] = document.tolist()
    assert one == expected
    monkeypatch.setattr(shuffle, "CHUNK", 100)
    many, buckets = shuffled(tmp_path / "many", documents, 10_000, 7)
    assert many == expected and buckets > 20


def test_no_document_at_all(tmp_path: Path) -> None:
    made = Shuffle(tmp_path / "x", 0, 0, np.dtype("<u2"), shuffle_keys(1, "train"), 1 << 20)
    assert list(made.ordered()) == []


def test_shuffled_corpus(contents: Callable, config: Callable, tmp_path: Path) -> None:
    settings = {"tokenizer": {"path": "bytes"}}
    preprocess(config("plain", **settings))
    for name, workers in (("one", 1), ("two", 2)):
        output = {"folder": str(tmp_path / name), "workers": workers, "shuffle": True}
        preprocess(config(name, **settings, output=output))
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    for split in ("train", "valid"):
        plain, one = IndexedDataset(tmp_path / "plain" / split), IndexedDataset(tmp_path / "one" / split)
        before, after = ([data[i].tobytes() for i in range(len(data))] for data in (plain, one))
        assert sorted(before) == sorted(after) and before != after
        where = places(0, len(before), len(before), shuffle_keys(1234, split))
        assert [after[place] for place in where] == before
    other = {"folder": str(tmp_path / "other"), "shuffle": True, "shuffle_seed": 5}
    preprocess(config("other", **settings, output=other))
    assert (tmp_path / "other" / "train.bin").read_bytes() != (tmp_path / "one" / "train.bin").read_bytes()
    assert not preprocess(config("one", **settings, output={"folder": str(tmp_path / "one")})).was_done


MEASURE = """
import resource, sys
import numpy as np
from pathlib import Path
from megafp8.corpus.shuffle import Shuffle, shuffle_keys
from megafp8.data.indexed_writer import IndexedDatasetWriter
folder, batches, size = Path(sys.argv[1]), int(sys.argv[2]), 10_000
lengths = np.full(size, 100, "<i4")
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
made = Shuffle(folder / "s", batches * size, batches * size * 200, np.dtype("<u2"), shuffle_keys(1, "train"), 1 << 26)
for batch in range(batches):
    made.add(np.full(size * 100, batch, "<u2"), lengths)
with IndexedDatasetWriter(folder / "out", np.uint16) as writer:
    for ids, some in made.ordered():
        writer.add_documents(ids, some)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.slow
def test_memory_does_not_grow(tmp_path: Path) -> None:
    """20 and 400 MB of tokens with 64 MiB: what the second takes beyond the first is noise of the allocator."""
    taken = []
    for batches in (10, 200):
        folder = tmp_path / str(batches)
        folder.mkdir()
        done = subprocess.run(
            [sys.executable, "-c", MEASURE, str(folder), str(batches)], capture_output=True, text=True, check=True,
            cwd=ROOT,
        )  # fmt: skip
        taken.append(int(done.stdout) / 1024)
        data = IndexedDataset(folder / "out")
        assert len(data) == batches * 10_000 and len(set(data.tokens(0, 40_000).tolist())) > batches // 2
    assert max(taken) < 200 and taken[1] < taken[0] + 64, taken
