"""Piece files: safetensors written as a stream with checksums, and single pieces read back and checked.

The safetensors library writes neither fsync nor checksums, hence the few lines here; any safetensors reader opens the
files. Nothing here knows ranks, plans or manifests.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch

from megafp8.checkpoint.manifest import Piece, PieceFile, UnreadableError, checksum
from megafp8.core.errors import CheckpointError

DTYPE_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}

_FILE_MODE = 0o640  # checkpoints are the group's business, not the world's; umask may take more away


@dataclass(frozen=True)
class Box:
    """One piece to be written: where it lies in its tensor, and how to get its bytes when its turn comes."""

    key: str
    dtype: torch.dtype
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    fetch: Callable[[], torch.Tensor]

    @property
    def bytes(self) -> int:
        """Size in bytes."""
        return torch.Size(self.sizes).numel() * self.dtype.itemsize


def header_of(boxes: Sequence[Box]) -> bytes:
    """The safetensors header of a file that holds `boxes` in this order: 8 bytes of length, then JSON."""
    entries: dict[str, dict[str, object]] = {"__metadata__": {"format": "pt"}}
    end = 0
    for box in boxes:
        start, end = end, end + box.bytes
        entries[box.key] = {"dtype": DTYPE_NAMES[box.dtype], "shape": box.sizes, "data_offsets": (start, end)}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # data starts aligned
    return len(text).to_bytes(8, "little") + text


def write_piece_file(path: Path, boxes: Sequence[Box]) -> tuple[PieceFile, list[Piece]]:
    """Write `boxes`, one tensor at a time in memory, and make the file durable.

    Raises:
        OSError: whatever the system says.
    """
    header = header_of(boxes)
    whole, end, pieces = checksum(header), len(header), []
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _FILE_MODE)
    with os.fdopen(fd, "wb", buffering=0) as file:
        _write_all(file.fileno(), memoryview(header))
        for box in boxes:
            data = _bytes_of(box.fetch(), box)
            _write_all(file.fileno(), data)
            whole.update(data)
            digest = checksum(data).hexdigest()
            pieces.append(Piece(path.name, box.key, box.offsets, box.sizes, end, box.bytes, digest))
            end += box.bytes
        os.fsync(file.fileno())
    return PieceFile(end, whole.hexdigest(), len(header), checksum(header).hexdigest()), pieces


def _bytes_of(tensor: torch.Tensor, box: Box) -> memoryview:
    tensor = tensor.detach().cpu().contiguous()
    assert tuple(tensor.shape) == box.sizes and tensor.dtype == box.dtype, f"{box.key} changed since it was planned"
    # view(uint8) of a 0-dim tensor is refused, hence reshape first.
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy().data)


def _write_all(fd: int, data: memoryview) -> None:
    while data:  # one write takes at most 2 GiB, and may take less
        data = data[os.write(fd, data[: 1 << 30]) :]


def check_header(file: BinaryIO, entry: PieceFile, name: Path) -> None:
    """Compare size and header of the open file with the manifest, before anything else is read from it.

    Raises:
        CheckpointError: they differ; names the file.
    """
    size = os.fstat(file.fileno()).st_size
    if size != entry.bytes:
        raise CheckpointError(
            f"{name}: damaged: {size} bytes where {entry.bytes} were written; use an older checkpoint"
        )
    header = bytearray(entry.header_bytes)
    _read(file, 0, memoryview(header), name)
    if checksum(header).hexdigest() != entry.header_checksum:
        raise CheckpointError(f"{name}: damaged: its header does not match its checksum; use an older checkpoint")


def read_piece(file: BinaryIO, piece: Piece, out: torch.Tensor, name: Path) -> None:
    """Fill `out`, contiguous on the CPU and of shape `piece.sizes`, from an open file, and check its bytes.

    Raises:
        CheckpointError: the bytes do not match their checksum or end early; names the file.
    """
    assert out.is_contiguous() and out.nbytes == piece.bytes, f"{piece.key}: {out.shape} does not hold the piece"
    data = out.reshape(-1).view(torch.uint8).numpy().data
    _read(file, piece.start, data, name)
    if checksum(data).hexdigest() != piece.checksum:
        raise CheckpointError(f"{name}: damaged: {piece.key} does not match its checksum; use an older checkpoint")


def _read(file: BinaryIO, start: int, data: memoryview, name: Path) -> None:
    # Read, not mapped: the bytes that are checked are the bytes that are used, and a failing disk is an error, not
    # a SIGBUS.
    done = 0
    try:
        file.seek(start)
        while done < len(data):
            count = file.readinto(data[done : done + (1 << 30)])  # type: ignore[attr-defined]
            if count == 0:
                raise CheckpointError(f"{name}: damaged: ends at byte {start + done}; use an older checkpoint")
            done += count
    except OSError as error:
        raise UnreadableError(f"{name}: cannot be read: {error.strerror or error}") from error
