"""Fixed-size records of the deduplication passes: how they are sorted, reduced, stored and cut by range.

A record says that a document has a key: a 128-bit hash of its text, or a hash of one band of its MinHash signature.
Documents that share a key are duplicates. Of records with one key only the smallest document has to go on; the others
become edges that point to it, so that a key of a million copies takes no more room than any other.

A document's number is its shard in the upper 32 bits and its row in the lower ones: the order of the corpus. A file
of signatures knows rows only, so that it stays valid when other shards come or go. All files are `.npy`.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megafp8.core.jsonio import fsync_dir

BAND = np.dtype([("key", "<u8"), ("document", "<u8")])
TEXT = np.dtype([("key", "<u8"), ("low", "<u8"), ("document", "<u8")])  # 128 bits of key
EDGE = np.dtype([("document", "<u8"), ("kept", "<u8")])  # document > kept
ROW_BITS = 32
MAX_ROWS = MAX_SHARDS = 1 << ROW_BITS


def number(shard: int, row: int = 0) -> int:
    """Number of a document; with a row of 0 the least of its shard."""
    if not (0 <= shard < MAX_SHARDS and 0 <= row < MAX_ROWS):
        raise ValueError(f"shard {shard}, row {row}: both have to be below 2^{ROW_BITS}")
    return shard << ROW_BITS | row


def shards_and_rows(numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The two parts of document numbers, int64 each."""
    return (numbers >> np.uint64(ROW_BITS)).astype(np.int64), (numbers & np.uint64(MAX_ROWS - 1)).astype(np.int64)


def sort_records(records: np.ndarray) -> np.ndarray:
    """Sorted by all fields in their order. Most keys are there once, so that ties alone need the slow sort."""
    names = records.dtype.names or ()
    records = records[np.argsort(records[names[0]])]
    first = records[names[0]]
    same = np.flatnonzero(first[1:] == first[:-1])
    if len(same):
        tied = np.union1d(same, same + 1)
        some = records[tied]
        records[tied] = some[np.lexsort([some[name] for name in reversed(names)])]
    return records


def reduce_records(records: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sorted records -> (the first of each key, edges of the others to it: sorted, each once)."""
    keys = [name for name in records.dtype.names or () if name != "document"]
    new = np.ones(len(records), bool)
    if len(records):
        new[1:] = np.logical_or.reduce([records[name][1:] != records[name][:-1] for name in keys])
    heads = np.flatnonzero(new)
    others = np.flatnonzero(~new)
    edges = np.empty(len(others), EDGE)
    edges["document"] = records["document"][others]
    edges["kept"] = records["document"][heads[np.searchsorted(heads, others) - 1]]
    edges = edges[edges["document"] != edges["kept"]]  # two bands of one document may have one hash
    return records[heads], unique_edges(edges)


def unique_edges(edges: np.ndarray) -> np.ndarray:
    """Sorted by document, then by what it points to, each once."""
    edges = sort_records(edges)
    return edges[np.r_[True, edges[1:] != edges[:-1]]] if len(edges) else edges


def save(path: Path, records: np.ndarray) -> None:
    """Write a `.npy` file under a temporary name and rename it when its bytes are safe."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with open(temporary, "wb") as file:
            np.lib.format.write_array(file, np.ascontiguousarray(records), version=(1, 0), allow_pickle=False)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        fsync_dir(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def load(path: Path) -> np.ndarray:
    """Records of a file, mapped and not read."""
    return np.load(path, mmap_mode="r")


def range_of(path: Path, field: str, low: int, high: int) -> np.ndarray:
    """Records of a file sorted by `field` that have low <= field < high, read into memory; `high` up to 2^64."""
    records = load(path)
    values = records[field]
    begin = np.searchsorted(values, np.uint64(low))
    end = len(records) if high >= 1 << 64 else np.searchsorted(values, np.uint64(high))
    return np.array(records[begin:end])


def joined(pieces: Sequence[np.ndarray], dtype: np.dtype) -> np.ndarray:
    """Pieces behind each other; of the right type when there are none."""
    return np.concatenate([np.empty(0, dtype), *pieces])
