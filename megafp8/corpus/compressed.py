"""Bytes of a file, plain, gzip, bzip2 or zstd, told by content and not by name; a cut or damaged stream is an error.

The usual readers end silently at a cut zstd frame, and stop after the first frame or gzip member. Here every member
is read and has to end.
"""

from __future__ import annotations

import bz2
import io
import re
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import xxhash
import zstandard

from megafp8.corpus.storage import UnreadableError, open_binary, read_head

_CHUNK = 1 << 14  # bytes that a decoder takes at once, and gzip gives: bounds how far a chunk can swell
_BUFFER = 1 << 20
_GZIP = b"\x1f\x8b"
_ZSTD = b"\x28\xb5\x2f\xfd"
_BZIP2 = re.compile(rb"BZh[1-9](?:\x31\x41\x59\x26\x53\x59|\x17\x72\x45\x38\x50\x90)")  # a block, or an empty stream
_HEAD = 10  # bytes that tell all of them
_SKIPPABLE = b"\x2a\x4d\x18"  # bytes 1 to 3 of a zstd skippable frame; byte 0 is 50 to 5f
UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")


class DamagedError(Exception):
    """The compressed stream is cut short, or its bytes do not fit its checksum."""


def is_plain(path: Path | str) -> bool:
    """Whether a file is neither compressed nor UTF-16, so that it can be cut at any line end."""
    head = read_head(path, _HEAD)
    return not (head[:2] == _GZIP or _is_zstd(head[:4]) or _BZIP2.match(head) or head[:2] in UTF16_MARKS)


def _is_zstd(head: bytes) -> bool:
    return head == _ZSTD or (len(head) == 4 and head[1:] == _SKIPPABLE and 0x50 <= head[0] <= 0x5F)


class InputStream(io.RawIOBase):
    """The decompressed bytes of a file, with what is known of the compressed ones.

    Args:
        start, stop: the bytes of a plain file to read; `stop` 0: to its end. A range is never decompressed.

    Attributes:
        start, stop: as given; `stop` of a whole file is beyond its end.
        position: bytes of the file read so far.
        reader: buffered, with `readline`; closed with the stream.
    """

    def __init__(self, path: Path | str, *, start: int = 0, stop: int = 0) -> None:
        self._path, self._file = path, open_binary(path)
        self.start, self.stop = start, stop or sys.maxsize
        self._digest = xxhash.xxh3_128()
        self._left_in_range = stop - start if stop else sys.maxsize
        self.position = 0
        head = b"" if start or stop else self._file.read(_HEAD)
        self._file.seek(start)
        if head[:2] == _GZIP:
            self._chunks = _members(self._read, lambda: zlib.decompressobj(31), _inflate, zlib.error)
        elif _BZIP2.match(head):  # dumps are made of many streams
            self._chunks = _members(self._read, bz2.BZ2Decompressor, _unbzip, _Bzip2Error)
        elif _is_zstd(head[:4]):
            self._chunks = _members(
                self._read, zstandard.ZstdDecompressor().decompressobj, _unzstd, zstandard.ZstdError
            )
        else:
            self._chunks = iter(lambda: self._read(_BUFFER), b"")
        self._left = memoryview(b"")
        self.reader = io.BufferedReader(self, _BUFFER)

    def _read(self, size: int) -> bytes:
        try:
            data = self._file.read(min(size, self._left_in_range))
        except OSError as error:
            raise UnreadableError(f"{self._path}: cannot be read: {error.strerror or error}") from error
        self._left_in_range -= len(data)
        self._digest.update(data)
        self.position += len(data)
        return data

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._left:  # a decoder may need more input for its first byte
            chunk = next(self._chunks, None)
            if chunk is None:
                return 0
            self._left = memoryview(chunk)
        count = min(len(buffer), len(self._left))
        buffer[:count] = self._left[:count]
        self._left = self._left[count:]
        return count

    def raw(self, size: int) -> bytes:
        """Up to `size` bytes as they lie on disk, of a stream that nobody has read from."""
        parts: list[bytes] = []
        while size > 0 and (data := self._read(size)):
            parts.append(data)
            size -= len(data)
        return b"".join(parts)

    def checksum(self) -> str:
        """xxh3_128 of the whole file as it lies on disk; reads what is left of it."""
        while self._read(_BUFFER):
            pass
        return f"xxh3_128:{self._digest.hexdigest()}"

    def close(self) -> None:
        self._file.close()
        self._chunks, self._left = iter(()), memoryview(b"")
        if (reader := vars(self).pop("reader", None)) is not None:  # it and this hold each other, and a buffer each
            reader.detach()
        super().close()


def _inflate(decoder: Any, data: bytes) -> Iterator[bytes]:
    """A chunk in bounded pieces, so that what precedes a damaged place is still delivered."""
    out = b""
    while not decoder.eof and (data or len(out) == _CHUNK):
        out = decoder.decompress(data, _CHUNK)
        data = decoder.unconsumed_tail
        yield out


class _Bzip2Error(Exception):
    """bz2 raises OSError, as reading a file does."""


def _unbzip(decoder: Any, data: bytes) -> Iterator[bytes]:
    """As `_inflate`."""
    while not decoder.eof and (data or not decoder.needs_input):
        try:
            out = decoder.decompress(data, _CHUNK)
        except OSError as error:
            raise _Bzip2Error(str(error)) from None
        data = b""
        yield out


def _unzstd(decoder: Any, data: bytes) -> Iterator[bytes]:
    yield decoder.decompress(data)


def _members(
    read: Callable[[int], bytes],
    make: Callable[[], Any],
    step: Callable[[Any, bytes], Iterator[bytes]],
    kind: type[Exception],
) -> Iterator[bytes]:
    """Decompressed chunks of all members (gzip) or frames (zstd) of a stream."""
    decoder = None
    try:
        while data := read(_CHUNK):
            while data:
                decoder = decoder or make()
                yield from step(decoder, data)
                if not decoder.eof:
                    break
                data, decoder = decoder.unused_data.lstrip(b"\0"), None  # tapes and blocks pad with zeros
    except kind as error:
        raise DamagedError(f"damaged compressed stream ({error})") from None
    if decoder is not None:
        raise DamagedError("compressed stream is cut short")
