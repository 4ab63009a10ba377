"""Ids of a shard's documents, to be looked up one by one without reading the shard: who the kept twin is."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from megafp8.corpus.dedup import records as rec

_CHUNK = 1 << 20


class NamesWriter:
    """Writes the ids of a shard's rows: a `.npy` of bytes, [count, ends of each, all ids behind each other].

    Ids are spooled to disk, 8 bytes of memory are held for each.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._ends = path, array("Q", [0])
        self._spool = path.with_name(f".{path.name}.spool")
        self._file = open(self._spool, "wb")  # noqa: SIM115 (closed by close)

    def __len__(self) -> int:
        return len(self._ends) - 1

    def add(self, name: str) -> None:
        """Append an id."""
        data = name.encode("utf-8", "surrogatepass")
        self._file.write(data)
        self._ends.append(self._ends[-1] + len(data))

    def close(self) -> None:
        """Make the file."""
        self._file.close()
        ends = np.frombuffer(self._ends, np.uint64).astype("<u8", copy=False).view(np.uint8)
        rec.save_pieces(self._path, self._pieces(ends), np.dtype(np.uint8), 8 + len(ends) + self._ends[-1])
        self._spool.unlink()

    def _pieces(self, ends: np.ndarray) -> Iterator[np.ndarray]:
        yield np.array([len(self)], "<u8").view(np.uint8)
        yield ends
        with open(self._spool, "rb") as file:
            while chunk := file.read(_CHUNK):
                yield np.frombuffer(chunk, np.uint8)


def save_names(path: Path, ids: Sequence[str]) -> None:
    """Write ids that are at hand, see `NamesWriter`."""
    writer = NamesWriter(path)
    for one in ids:
        writer.add(one)
    writer.close()


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
