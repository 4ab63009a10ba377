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
from collections.abc import Iterable, Sequence
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
    """Sorted by all fields in their order. Most first fields are there once: ties alone take the slower way."""
    first, *others = records.dtype.names or ()
    records = records[np.argsort(records[first])]
    new = _changes(records, [first])
    tied = np.flatnonzero(~new | ~np.append(new[1:], True))
    if len(tied):
        some = records[tied]
        order = np.argsort(some[others[-1]])
        for name in reversed(others[:-1]):
            order = order[np.argsort(some[name][order], kind="stable")]
        groups = np.cumsum(new[tied], dtype=np.int64)
        for shift in range(0, int(groups[-1]).bit_length(), 16):  # numpy sorts 16-bit numbers by radix
            order = order[np.argsort((groups[order] >> shift).astype(np.uint16), kind="stable")]
        records[tied] = some[order]
    return records


def _changes(records: np.ndarray, names: Sequence[str]) -> np.ndarray:
    """bool [records]: which differ in these fields from the record before; the first does."""
    new = np.ones(len(records), bool)
    new[1:] = np.logical_or.reduce([records[name][1:] != records[name][:-1] for name in names])
    return new


def reduce_records(records: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sorted records -> (the first of each key, edges of the others to it: sorted, each once)."""
    new = _changes(records, [name for name in records.dtype.names or () if name != "document"])
    heads = records[new]
    others = np.flatnonzero(~new)
    edges = np.empty(len(others), EDGE)
    edges["document"] = records["document"][others]
    edges["kept"] = heads["document"][np.cumsum(new)[others] - 1]
    edges = edges[edges["document"] != edges["kept"]]  # two bands of one document may have one hash
    return heads, unique_edges(edges)


def unique_edges(edges: np.ndarray) -> np.ndarray:
    """Sorted by document, then by what it points to, each once."""
    edges = sort_records(edges)
    return edges[_changes(edges, ["document", "kept"])]


def least_edges(edges: np.ndarray) -> np.ndarray:
    """For each document the edge to the least, sorted."""
    edges = edges[np.argsort(edges["document"])]
    starts = np.flatnonzero(_changes(edges, ["document"]))
    found = edges[starts]
    if len(starts):
        found["kept"] = np.minimum.reduceat(edges["kept"], starts)
    return found


def save(path: Path, records: np.ndarray) -> None:
    """Write a `.npy` file under a temporary name and rename it when its bytes are safe."""
    save_pieces(path, [records], records.dtype, len(records))


def save_pieces(path: Path, pieces: Iterable[np.ndarray], dtype: np.dtype, count: int) -> None:
    """The same of one array that comes in pieces, `count` values in all."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with open(temporary, "wb") as file:
            descr = np.lib.format.dtype_to_descr(dtype)
            np.lib.format.write_array_header_1_0(file, {"descr": descr, "fortran_order": False, "shape": (count,)})
            for some in pieces:
                file.write(np.ascontiguousarray(some).view(np.uint8).data)
                count -= len(some)
            assert not count, "pieces do not add up"
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
