"""The order of a shuffled split: a keyed permutation of its documents, carried out on disk in bounded memory.

Document i of the input goes to place p(i), p a Feistel network walked into [0, N) as in `megafp8.data.samples`: any
place is computed alone, and it depends on the seed, the split and N only. First each document is appended to the file
of its bucket, a range of places; then one bucket after the other is read, put in order in memory and handed on. Both
passes read and write sequentially.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from megafp8.data.samples import feistel_half

CHUNK = 1 << 21  # tokens moved at once, or one document if it has more
_ROUNDS = 8
_MAX_BUCKETS = 256  # two open files each
_SHARE = 4  # a bucket is this part of the memory: its ids, places, lengths, and what moving them takes
_DOCUMENT_BYTES = 24  # of a document besides its ids: place, length, and where it begins


def shuffle_keys(seed: int, split: str) -> tuple[int, ...]:
    """Round keys, 64 bits each."""
    digest = hashlib.sha512(f"megafp8 shuffle {seed} {split}".encode()).digest()
    return tuple(int.from_bytes(digest[8 * i : 8 * i + 8], "little") for i in range(_ROUNDS))


def _mix(values: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64, modulo 2^64 as numpy's uint64 is."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def places(first: int, count: int, size: int, keys: tuple[int, ...]) -> np.ndarray:
    """Where documents `first` ... of `size` go: int64 [count]; equals `megafp8.data.samples.permuted` one by one."""
    half = np.uint64(feistel_half(size))
    mask = (np.uint64(1) << half) - np.uint64(1)
    found = np.arange(first, first + count, dtype=np.uint64)
    walking = np.arange(count)
    while len(walking):
        left, right = found[walking] >> half, found[walking] & mask
        for key in keys:
            left, right = right, left ^ (_mix(right ^ np.uint64(key)) & mask)
        found[walking] = left << half | right
        walking = walking[found[walking] >= np.uint64(size)]
    return found.astype(np.int64)


def gather(ids: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Documents out of `ids` (int64 starts and lengths) one after the other."""
    if len(starts) == 1:
        return ids[starts[0] : starts[0] + lengths[0]]
    begins = np.cumsum(lengths) - lengths
    return ids[np.repeat(starts - begins, lengths) + np.arange(int(lengths.sum()))]


def runs_of(lengths: np.ndarray) -> list[np.ndarray]:
    """Numbers of documents in runs of about `CHUNK` tokens."""
    chunks = np.cumsum(lengths, dtype=np.int64) // CHUNK
    return np.split(np.arange(len(lengths)), np.flatnonzero(np.diff(chunks)) + 1) if len(lengths) else []


class Shuffle:
    """Takes documents in the order of the input, gives them back in the order of their places.

    Args:
        folder: for the buckets; it is made, and removed when all have been given back.
        documents, num_bytes: of the whole split.
    """

    def __init__(
        self, folder: Path, documents: int, num_bytes: int, dtype: np.dtype, keys: tuple[int, ...], memory_bytes: int
    ) -> None:
        self._folder, self._size, self._dtype, self._keys = folder, documents, dtype, keys
        total = num_bytes + _DOCUMENT_BYTES * documents
        self.num_buckets = min(_MAX_BUCKETS, max(1, -(-_SHARE * total // memory_bytes)))
        self._width = max(1, -(-documents // self.num_buckets))  # places in a bucket
        self._next = 0
        folder.mkdir()
        self._stack = ExitStack()
        self._files = [
            [self._stack.enter_context(open(self._path(bucket, what), "wb")) for what in ("ids", "documents")]  # noqa: SIM115
            for bucket in range(self.num_buckets)
        ]

    def _path(self, bucket: int, what: str) -> Path:
        return self._folder / f"{bucket}.{what}"

    def add(self, ids: np.ndarray, lengths: np.ndarray) -> None:
        """Append documents of one sequence each."""
        sizes = lengths.astype(np.int64)
        where = places(self._next, len(sizes), self._size, self._keys)
        self._next += len(sizes)
        buckets = where // self._width
        order = np.argsort(buckets, kind="stable")
        starts = np.cumsum(sizes) - sizes
        cuts = np.flatnonzero(np.diff(buckets[order])) + 1
        for some in np.split(order, cuts) if len(order) else ():
            out, documents = self._files[int(buckets[some[0]])]
            out.write(gather(ids, starts[some], sizes[some]).tobytes())
            documents.write(np.stack([where[some], sizes[some]], axis=1).astype("<i8").tobytes())

    def ordered(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """(ids, lengths) of runs of documents, in their final order."""
        assert self._next == self._size, (self._next, self._size)
        self._stack.close()
        for bucket in range(self.num_buckets):
            ids = np.fromfile(self._path(bucket, "ids"), self._dtype)
            where, sizes = np.fromfile(self._path(bucket, "documents"), "<i8").reshape(-1, 2).T
            starts = np.cumsum(sizes) - sizes
            order = np.argsort(where)
            for some in runs_of(sizes[order]):
                chosen = order[some]
                yield gather(ids, starts[chosen], sizes[chosen]), sizes[chosen]
            for what in ("ids", "documents"):
                self._path(bucket, what).unlink()
        self._folder.rmdir()
