"""safetensors files tensor by tensor: headers read and distrusted, headers made, bytes read at their place.

The safetensors library maps files whole (their pages count as this process's memory) and writes them whole; a
conversion must do neither.
"""

from __future__ import annotations

import json
import math
import os
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megafp8.core.errors import CheckpointError

DTYPE_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.float8_e8m0fnu: "F8_E8M0",
}  # fmt: skip
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
_MAX_HEADER = 100_000_000  # bytes; safetensors' own limit
_CHUNK_BYTES = 1 << 20  # read and rounded while it is in a core's cache


@dataclass(frozen=True)
class Stored:
    """A tensor in a file: dtype, shape, and the bytes [start, start + bytes) that hold it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    bytes: int


class OpenFiles:
    """Files of a folder, each opened when it is first read from and kept open; for any number of threads."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._fds: dict[str, int] = {}
        self._opening = threading.Lock()
        self._opened = ExitStack()

    def read(self, name: str, stored: Stored, out: torch.Tensor) -> torch.Tensor:
        """`read_tensor` of a file.

        Raises:
            CheckpointError: it cannot be opened or read, or is cut short.
        """
        path = self._folder / name
        with self._opening:
            if name not in self._fds:
                try:
                    self._fds[name] = os.open(path, os.O_RDONLY)
                except OSError as error:
                    raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
                self._opened.callback(os.close, self._fds[name])
        return read_tensor(self._fds[name], stored, out, path)

    def close(self) -> None:
        """Close them all."""
        self._opened.close()


def make_header(tensors: Sequence[tuple[str, torch.dtype, tuple[int, ...]]]) -> tuple[bytes, dict[str, Stored]]:
    """The header of a file that holds these tensors, and where each lies in the file.

    Wide dtypes come first, else in this order: readers refuse an fp32 scale at an odd byte behind FP8 codes.
    """
    tensors = sorted(tensors, key=lambda tensor: -tensor[1].itemsize)
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # some readers refuse a file without it
    end = 0
    for name, dtype, shape in tensors:
        start, end = end, end + math.prod(shape) * dtype.itemsize
        entries[name] = {"dtype": DTYPE_NAMES[dtype], "shape": shape, "data_offsets": (start, end)}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # data starts aligned
    header = len(text).to_bytes(8, "little") + text
    places = {}
    for name, dtype, shape in tensors:
        start, end = entries[name]["data_offsets"]
        places[name] = Stored(dtype, tuple(shape), len(header) + start, end - start)
    return header, places


def read_header(path: Path) -> dict[str, Stored]:
    """Which tensors a file holds, and where; every size is checked against the others and the file's.

    Raises:
        CheckpointError: no safetensors file, a damaged one, or one that holds a dtype that torch has not.
    """
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(_MAX_HEADER, size - 8):
                raise ValueError("is no safetensors file, or was cut short")
            return _decode(json.loads(file.read(length)), 8 + length, size)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}; is it a complete safetensors file?") from error


def _decode(entries: Mapping[str, Any], begin: int, size: int) -> dict[str, Stored]:
    found = {}
    for name, entry in entries.items():
        if name == "__metadata__":
            continue
        if entry["dtype"] not in DTYPES:
            raise ValueError(f"{name} has the unknown dtype {entry['dtype']!r}")
        dtype, shape = DTYPES[entry["dtype"]], tuple(entry["shape"])
        start, end = entry["data_offsets"]
        if any(type(number) is not int or number < 0 for number in (*shape, start, end)):
            raise ValueError(f"{name} has the shape {shape} at bytes {start} to {end}")
        if end - start != math.prod(shape) * dtype.itemsize or begin + end > size:
            raise ValueError(f"{name} of shape {shape} does not fit its bytes, or the file was cut short")
        found[name] = Stored(dtype, shape, begin + start, end - start)
    return found


def read_tensor(fd: int, stored: Stored, out: torch.Tensor, path: Path) -> torch.Tensor:
    """Fill `out` (contiguous, on the CPU) with a tensor of an open file, rounded as its bytes come in; returns it.

    Raises:
        CheckpointError: the file ends early or cannot be read.
    """
    assert out.is_contiguous() and tuple(out.shape) == stored.shape, f"{tuple(out.shape)} for {stored.shape}"
    flat = out.reshape(-1)
    if out.dtype == stored.dtype:
        _read(fd, stored.start, bytes_of(flat), path)
        return out
    step = _CHUNK_BYTES // stored.dtype.itemsize
    buffer = torch.empty(min(step, flat.numel()), dtype=stored.dtype)
    for at in range(0, flat.numel(), step):
        chunk = buffer[: flat.numel() - at]
        _read(fd, stored.start + at * stored.dtype.itemsize, bytes_of(chunk), path)
        flat[at : at + step].copy_(chunk)
    return out


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the CPU, not copied."""
    return memoryview(tensor.detach().reshape(-1).view(torch.uint8).numpy().data)


def write_at(fd: int, start: int, data: memoryview) -> None:
    """Write `data` at byte `start` of an open file.

    Raises:
        OSError: whatever the system says.
    """
    while data:  # one write takes at most 2 GiB, and may take less
        count = os.pwrite(fd, data[: 1 << 30], start)
        data, start = data[count:], start + count


def _read(fd: int, start: int, data: memoryview, path: Path) -> None:
    done = 0
    try:
        while done < len(data):
            count = os.preadv(fd, [data[done : done + (1 << 30)]], start + done)
            if count == 0:
                raise CheckpointError(f"{path}: damaged: ends at byte {start + done}")
            done += count
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
