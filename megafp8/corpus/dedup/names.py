"""Ids of a shard's documents, to be looked up one by one without reading the shard: who the kept twin is."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megafp8.corpus.dedup import records as rec


def save_names(path: Path, ids: Sequence[str]) -> None:
    """Write the ids of a shard's rows: a `.npy` of bytes, [count, ends of each, all ids behind each other]."""
    encoded = [one.encode("utf-8", "surrogatepass") for one in ids]
    ends = np.cumsum([0, *map(len, encoded)], dtype="<u8")
    head = np.concatenate([np.array([len(ids)], "<u8"), ends]).tobytes()
    rec.save(path, np.frombuffer(head + b"".join(encoded), np.uint8))


def names_at(path: Path, rows: np.ndarray) -> list[str]:
    """Ids of some rows of a shard; reads their bytes alone.

    Args:
        rows: int64 [rows].
    """
    data = rec.load(path)
    count = int(data[:8].view("<u8")[0])
    ends = data[8 : 16 + 8 * count].view("<u8")
    text = data[16 + 8 * count :]
    return [bytes(text[ends[row] : ends[row + 1]]).decode("utf-8", "surrogatepass") for row in rows.tolist()]
