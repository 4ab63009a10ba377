"""Piece files as they are written: safetensors, streamed with checksums. No torch, so that a small process can do it.

The safetensors library writes neither fsync nor checksums, hence the few lines here; any safetensors reader opens the
files. Nothing here knows ranks, plans or manifests.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from megafp8.checkpoint.direct import DirectFile
from megafp8.checkpoint.manifest import ITEM_BYTES, Piece, PieceFile, checksum
from megafp8.core import faults

Advance = Callable[[int], None]
Written = tuple[PieceFile, list[Piece]]


@dataclass(frozen=True)
class Box:
    """One piece to be written: where it lies in its tensor, and how to get its bytes when its turn comes.

    `dtype` by its safetensors name; `fetch` returns the bytes row-major.
    """

    key: str
    dtype: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    fetch: Callable[[], memoryview]

    @property
    def bytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.sizes) * ITEM_BYTES[self.dtype]


def header_of(boxes: Sequence[Box]) -> bytes:
    """The safetensors header of a file that holds `boxes` in this order: 8 bytes of length, then JSON."""
    entries: dict[str, dict[str, object]] = {"__metadata__": {"format": "pt"}}
    end = 0
    for box in boxes:
        start, end = end, end + box.bytes
        entries[box.key] = {"dtype": box.dtype, "shape": box.sizes, "data_offsets": (start, end)}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # data starts aligned
    return len(text).to_bytes(8, "little") + text


def write_piece_file(path: Path, boxes: Sequence[Box], advance: Advance | None = None) -> Written:
    """Write `boxes`, one tensor at a time in memory, and make the file durable; `advance` hears of bytes written.

    Raises:
        OSError: whatever the system says.
    """
    header = header_of(boxes)
    whole, pieces = checksum(), []
    with DirectFile(path, advance) as file:
        file.append(header, (whole,))
        for box in boxes:
            faults.at("save-piece")
            data, own, start = box.fetch(), checksum(), file.bytes
            assert len(data) == box.bytes, f"{box.key} changed since it was planned"
            file.append(data, (whole, own))
            pieces.append(Piece(path.name, box.key, box.offsets, box.sizes, start, box.bytes, own.hexdigest()))
        file.finish()
    faults.at("save-written")
    return PieceFile(file.bytes, whole.hexdigest(), len(header), checksum(header).hexdigest()), pieces


def write_piece_files(
    files: Sequence[tuple[Path, Sequence[Box]]], threads: int, write: Callable[[Path, Sequence[Box]], Written]
) -> list[Written]:
    """Write several files, up to `threads` at once; the first failure is raised when all have stopped.

    Raises:
        OSError: whatever the system says.
    """
    if threads == 1 or len(files) < 2:
        return [write(path, boxes) for path, boxes in files]
    with ThreadPoolExecutor(min(threads, len(files)), "pieces") as pool:
        return list(pool.map(lambda file: write(*file), files))
