"""The passes over a corpus that find duplicates; each is a function of its inputs alone and may be repeated.

    signatures   a shard's texts -> its records, sorted by key                      one task a shard
    partition    signatures of several shards -> a run (one record a key), edges    one task a group of shards
    edges        one range of keys of all runs -> edges                             one task a range
    components   all edges -> links: each document to the smallest of its component (`components.py`)
    drop_list    one shard's part of the links                                      one task a shard

Memory is what `groups` and `num_ranges` are asked for, and does not grow with the corpus; results do not depend on
it. Of each component the first document (smallest shard, then row) is kept.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from megafp8.corpus.dedup import records as rec

COPIES = 5  # times the bytes of its records that a pass holds while it sorts them (measured, see the tests)
_BATCH = 256
_BATCH_CHARACTERS = 1 << 20


class GlobalStep(Protocol):
    """What a kind of duplicate defines.

    Attributes:
        version: raised when the same texts give other records.
        reason: why a document is dropped.
        unit: what is numbered and dropped: "document", or a part of its text.
        dtype: of the records.
    """

    version: int
    reason: str
    unit: str
    dtype: np.dtype

    @property
    def name(self) -> str:
        """What it is called in counts and reports."""

    def records(self, texts: Sequence[str], first: int) -> tuple[np.ndarray, int]:
        """Records of texts whose units are numbered from `first` on, and the number behind the last."""


def write_signatures(step: GlobalStep, texts: Iterable[str], path: Path, memory_bytes: int) -> int:
    """Sorted records of one shard's texts, numbered in the order of its rows, to a file; how many.

    What does not fit into the memory is sorted in runs on disk and merged by ranges of keys. A single key's records are
    always taken together.

    Raises:
        ValueError: more than 2^32 units.
    """
    runs: list[Path] = []
    scratch = path.with_name(f".{path.name}.runs")
    scratch.mkdir()
    try:
        for some in _sorted_runs(step, texts, memory_bytes):
            runs.append(scratch / f"{len(runs)}.npy")
            rec.save(runs[-1], some)
            del some
        return _merge(runs, step.dtype, path, memory_bytes)
    finally:
        shutil.rmtree(scratch)


def _sorted_runs(step: GlobalStep, texts: Iterable[str], memory_bytes: int) -> Iterator[np.ndarray]:
    pieces: list[np.ndarray] = []
    first = size = 0
    for batch in _batches(texts):
        some, first = step.records(batch, first)
        pieces.append(some)
        size += some.nbytes
        if size * COPIES > memory_bytes:
            yield rec.sort_records(rec.joined(pieces, step.dtype))
            pieces, size = [], 0
    if first > rec.MAX_ROWS:
        raise ValueError(f"a shard of {first} {step.unit}s: at most 2^{rec.ROW_BITS}; make shards smaller")
    if pieces:
        yield rec.sort_records(rec.joined(pieces, step.dtype))


def _merge(runs: Sequence[Path], dtype: np.dtype, path: Path, memory_bytes: int) -> int:
    if len(runs) == 1:
        runs[0].rename(path)
        return len(rec.load(path))
    total = sum(len(rec.load(run)) for run in runs)
    count = num_ranges(total * dtype.itemsize, memory_bytes)

    def pieces() -> Iterator[np.ndarray]:
        for at in range(count):
            low, high = key_range(at, count)
            yield rec.sort_records(rec.joined([rec.range_of(run, "key", low, high) for run in runs], dtype))

    rec.save_pieces(path, pieces(), dtype, total)
    return total


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    size = 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if len(batch) == _BATCH or size >= _BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def groups(sizes: Sequence[int], memory_bytes: int) -> list[range]:
    """Which shards `partition` takes together: as many behind each other as fit; a larger one alone.

    Args:
        sizes: bytes of each shard's signatures.
    """
    found, start, size = [], 0, 0
    for at, one in enumerate(sizes):
        if at > start and (size + one) * COPIES > memory_bytes:
            found.append(range(start, at))
            start, size = at, 0
        size += one
    return found + ([range(start, len(sizes))] if sizes else [])


def partition(shards: Sequence[tuple[int, Path]], run: Path, edges: Path) -> None:
    """Merge signatures of (shard number, file) into a run with one record a key, and edges.

    The order of `shards` does not matter.
    """
    pieces = []
    for shard, path in shards:
        some = np.array(rec.load(path))
        some["document"] |= np.uint64(rec.number(shard))
        pieces.append(some)
    everything = rec.joined(pieces, pieces[0].dtype)
    del pieces
    firsts, found = rec.reduce_records(rec.sort_records(everything))
    rec.save(edges, found)
    rec.save(run, firsts)


def num_ranges(run_bytes: int, memory_bytes: int) -> int:
    """Into how many ranges of keys runs of so many bytes are cut; keys are hashes, so that ranges are alike."""
    return max(1, -(-run_bytes * COPIES // memory_bytes))


def key_range(at: int, count: int) -> tuple[int, int]:
    """Keys [low, high) of range `at` of `count`."""
    return (at << 64) // count, ((at + 1) << 64) // count


def find_edges(runs: Sequence[Path], at: int, count: int, edges: Path) -> None:
    """Edges between documents of different runs that share a key in range `at` of `count`."""
    low, high = key_range(at, count)
    pieces = [rec.range_of(path, "key", low, high) for path in runs]
    everything = rec.joined(pieces, pieces[0].dtype)
    del pieces
    rec.save(edges, rec.reduce_records(rec.sort_records(everything))[1])


def drop_list(shard: int, links: Sequence[Path]) -> tuple[np.ndarray, np.ndarray]:
    """What of a shard is dropped.

    Args:
        links: files of `components.find_links`, each sorted by document.

    Returns:
        rows: int64 [dropped], ascending.
        kept: uint64 [dropped], number of the document that stays in place of each.
    """
    pieces = [rec.range_of(path, "document", rec.number(shard), (shard + 1) << rec.ROW_BITS) for path in links]
    found = rec.sort_records(rec.joined(pieces, rec.EDGE))
    return rec.shards_and_rows(found["document"])[1], found["kept"]
