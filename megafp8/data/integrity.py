"""Whether token files are still those that were written: checksums of blocks, a few of them read at each open.

The side file holds xxh3 checksums of up to 256 blocks of 64 KiB, spread evenly over each of the two files, beside the
checksums of all bytes. A start of a run reads some of them (megabytes, whatever the size of the corpus), at other
places each time, so that rot, a restore of another version or a bad disk is found early; `megafp8 data verify` reads
everything. Without a side file (Megatron writes none) there is nothing to compare with, and a fingerprint is taken from
such blocks instead.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import xxhash

from megafp8.core.errors import DataError
from megafp8.data.indexed import IndexedDataset

BLOCK_BYTES = 1 << 16
MAX_BLOCKS = 256
LOOKED_AT = 16  # blocks of each file at a start: 2 MiB for the pair
_DIGITS = 16


def block_starts(size: int) -> list[int]:
    """First bytes of the blocks of a file of `size` bytes: the first, the last, and evenly between; all if they fit."""
    last = max(0, size - BLOCK_BYTES)
    count = min(MAX_BLOCKS, -(-size // BLOCK_BYTES))
    if count <= 1:
        return [0] if size else []
    return sorted({last * i // (count - 1) for i in range(count)})


def block_checksums(path: Path) -> str:
    """xxh3_64 of each block of a file, 16 hex digits each, one after the other.

    Raises:
        OSError: the file cannot be read.
    """
    with open(path, "rb", buffering=0) as file:
        return "".join(_block(file.fileno(), start) for start in block_starts(os.fstat(file.fileno()).st_size))


def _block(handle: int, start: int) -> str:
    return xxhash.xxh3_64(os.pread(handle, BLOCK_BYTES, start)).hexdigest()


def check_blocks(dataset: IndexedDataset, *, choice: random.Random | None = None) -> None:
    """Compare some blocks of both files with the side file: the first, the last, and others by chance.

    Args:
        choice: decides which; None: others at each call.

    Raises:
        DataError: bytes have changed, or cannot be read; names file and place.
    """
    for suffix, path in (("bin", dataset.bin_path), ("idx", dataset.idx_path)):
        written = str(dataset.side.get("blocks", {}).get(suffix, ""))
        starts = block_starts(path.stat().st_size)
        if not written:
            continue
        if len(written) != _DIGITS * len(starts):
            raise DataError(
                f"{path}: {len(starts)} blocks, the side file has checksums of another number; make both anew"
            )
        numbers = list(range(len(starts)))
        if len(starts) > LOOKED_AT:
            inner = (choice or random.SystemRandom()).sample(range(1, len(starts) - 1), LOOKED_AT - 2)
            numbers = [0, *sorted(inner), len(starts) - 1]
        _compare(path, [(starts[i], written[_DIGITS * i : _DIGITS * (i + 1)]) for i in numbers])


def _compare(path: Path, blocks: list[tuple[int, str]]) -> None:
    try:
        with open(path, "rb", buffering=0) as file:
            for start, written in blocks:
                if _block(file.fileno(), start) != written:
                    raise DataError(
                        f"{path}: bytes {start} to {start + BLOCK_BYTES} are not those that were written; restore the "
                        "file or make it again (`megafp8 data verify` reads all of it)"
                    )
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error


def fingerprint(dataset: IndexedDataset) -> str:
    """What tells this dataset's tokens from others', wherever its files lie.

    The checksum of `.bin` from the side file, which `check_blocks` and `megafp8 data verify` hold against the bytes;
    without a side file, of its size and blocks.
    """
    written = dataset.side.get("checksums", {}).get("bin")
    if written:
        return f"{dataset.dtype.name}:{written}"
    digest = xxhash.xxh3_128(f"{dataset.dtype.name} {dataset.num_tokens} {block_checksums(dataset.bin_path)}".encode())
    return f"{dataset.dtype.name}:blocks:{digest.hexdigest()}"
