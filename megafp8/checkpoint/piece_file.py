"""Piece files as they are read: single pieces, each checked. piece_output writes them.

Nothing here knows ranks, plans or manifests.
"""

from __future__ import annotations

import os
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

_CHUNK_BYTES = 1 << 20  # read, checked and rounded while it is in a core's cache


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """A tensor's bytes row-major, on the CPU; a view of it where it lies so already."""
    # view(uint8) of a 0-dim tensor is refused, hence reshape first
    return memoryview(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)


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


def read_piece(file: BinaryIO, piece: Piece, out: torch.Tensor, name: Path, stored: torch.dtype | None = None) -> None:
    """Fill `out`, contiguous on the CPU and of shape `piece.sizes`, from an open file, and check its bytes.

    Threads may share the file. After a failure the content of `out` is undefined.

    Args:
        stored: the piece's dtype where `out` has another one, to which its values are rounded as they come in.

    Raises:
        CheckpointError: the bytes do not match their checksum or end early; names the file.
    """
    stored = stored or out.dtype
    assert out.is_contiguous() and out.numel() * stored.itemsize == piece.bytes, f"{piece.key}: not {tuple(out.shape)}"
    found = checksum()
    flat = out.reshape(-1)
    if stored == out.dtype:
        data = flat.view(torch.uint8).numpy().data
        _read(file, piece.start, data, name)
        found.update(data)
    else:
        step = _CHUNK_BYTES // stored.itemsize
        buffer = torch.empty(min(step, flat.numel()), dtype=stored)
        for at in range(0, flat.numel(), step):
            chunk = buffer[: flat.numel() - at]
            data = chunk.view(torch.uint8).numpy().data
            _read(file, piece.start + at * stored.itemsize, data, name)
            found.update(data)
            flat[at : at + step].copy_(chunk)
    if found.hexdigest() != piece.checksum:
        raise CheckpointError(f"{name}: damaged: {piece.key} does not match its checksum; use an older checkpoint")


def _read(file: BinaryIO, start: int, data: memoryview, name: Path) -> None:
    # Read, not mapped: the bytes that are checked are the bytes that are used, and a failing disk is an error, not
    # a SIGBUS. At a position of its own, so that threads share the file.
    done = 0
    try:
        while done < len(data):
            count = os.preadv(file.fileno(), [data[done : done + (1 << 30)]], start + done)
            if count == 0:
                raise CheckpointError(f"{name}: damaged: ends at byte {start + done}; use an older checkpoint")
            done += count
    except OSError as error:
        raise UnreadableError(f"{name}: cannot be read: {error.strerror or error}") from error
