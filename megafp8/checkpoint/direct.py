"""DirectFile: a new file that is written past the page cache, where its file system knows that.

A checkpoint is read at the next start at the earliest. For the page cache the kernel would look for free pages (which
costs a corpus its place there), copy every byte and write it later, at its own priority: 0.4 to 2.5 s of processor time
a GB, measured on two cores, where this takes 0.15 s, checksums left out.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

_CHUNK = 4 << 20  # of one write; copied, hashed and written while it is in a core's cache
_BLOCK = mmap.PAGESIZE  # offsets, sizes and addresses of direct writes are multiples of the disk's block, or of a page
_FILE_MODE = 0o640  # checkpoints are the group's business, not the world's; umask may take more away
_DIRECT = getattr(os, "O_DIRECT", 0)


class DirectFile:
    """Made new at `path`; `finish` makes it durable. `advance` hears of bytes written.

    A file system that has no direct writes, at all or of these sizes, gets ordinary ones.

    Raises:
        OSError: whatever the system says, from every method.
    """

    def __init__(self, path: Path, advance: Callable[[int], None] | None = None) -> None:
        self._advance = advance
        self._buffer = memoryview(mmap.mmap(-1, _CHUNK))
        self._held = 0  # bytes of the buffer that wait
        self.bytes = 0
        self._fd = _create(path)

    def __enter__(self) -> DirectFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._fd)

    def append(self, data: memoryview | bytes, sums: Iterable[Any]) -> None:
        """Add bytes to the file and to each checksum of `sums`."""
        data = memoryview(data)
        while data:
            count = min(len(data), _CHUNK - self._held)
            part = self._buffer[self._held : self._held + count]
            part[:] = data[:count]
            for running in sums:
                running.update(part)
            self._held += count
            self.bytes += count
            data = data[count:]
            if self._held == _CHUNK:
                self._write(_CHUNK)

    def finish(self) -> None:
        """Write what waits; when this returns the bytes are on the disk, though perhaps not the file's name."""
        if self._held:
            self._write(self._held + -self._held % _BLOCK)
            os.ftruncate(self._fd, self.bytes)
        os.fsync(self._fd)

    def _write(self, count: int) -> None:
        left = self._buffer[:count]
        while left:
            try:
                done = os.write(self._fd, left)  # may take less than it was given
            except OSError as error:
                flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
                if error.errno != errno.EINVAL or not flags & _DIRECT:
                    raise
                fcntl.fcntl(self._fd, fcntl.F_SETFL, flags & ~_DIRECT)
                continue
            left = left[done:]
            if self._advance is not None:
                self._advance(done)
        self._held = 0


def _create(path: Path) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    try:
        return os.open(path, flags | _DIRECT, _FILE_MODE)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    path.unlink(missing_ok=True)  # made, then refused
    return os.open(path, flags, _FILE_MODE)
