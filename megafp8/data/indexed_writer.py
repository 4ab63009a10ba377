"""Writer of `.bin`/`.idx` in Megatron's exact format, with our side file.

Memory does not grow with the corpus: lengths and document starts are spooled to disk and joined at the end. Nothing
has its final name before all of it is on disk, ids are never wrapped into a smaller dtype, and a writer can be
picked up again at a snapshot after a crash. Checksums are taken from the finished files in one pass, so that they
cover what a reader will see.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy as np
import xxhash

from megafp8.core.errors import DataError
from megafp8.core.jsonio import fsync_dir, resource_error, sealed, write_json
from megafp8.data.indexed import (
    CODES,
    HEADER,
    MAGIC,
    MAX_SEQUENCE_TOKENS,
    SIDE_VERSION,
    VERSION,
    IndexedDataset,
    remove_dataset,
    side_file,
)
from megafp8.data.integrity import block_checksums

_CHUNK = 1 << 20  # values handled at once: 8 MB of int64
_PARTS = ("bin", "lengths", "documents")


def checksum_file(path: Path) -> str:
    """xxh3_128 of a file's bytes, as `xxh3_128:<32 hex digits>`."""
    digest = xxhash.xxh3_128()
    with open(path, "rb") as file:
        while chunk := file.read(1 << 22):
            digest.update(chunk)
    return f"xxh3_128:{digest.hexdigest()}"


def as_ids(tokens: Sequence[int] | np.ndarray, dtype: np.dtype) -> np.ndarray:
    """`tokens` in `dtype`, 1-D.

    Raises:
        DataError: an id that is not an integer or does not fit; Megatron's own writer wraps it (70000 -> 4464).
    """
    ids = np.asarray(tokens)
    if ids.size == 0:
        return np.empty(0, dtype)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise DataError(f"token ids are {ids.dtype} of shape {ids.shape}; give a flat list of integers")
    if ids.dtype == dtype:
        return ids
    limits = np.iinfo(dtype)
    low, high = int(ids.min()), int(ids.max())
    if low < limits.min or high > limits.max:
        bad = low if low < limits.min else high
        raise DataError(
            f"token id {bad} does not fit {dtype.name} ({limits.min} to {limits.max}); write with dtype int32"
        )
    return ids.astype(dtype)


class IndexedDatasetWriter:
    """Streams documents into `path_prefix`.bin, .idx and .json; a context manager.

    The files appear under their names when the block ends without an error. Before that they are hidden
    `.NAME.*.partial` files, which an error removes, unless a `snapshot` was taken: then they stay to go on from.

    Args:
        path_prefix: the path without suffix; an existing dataset there is replaced at the end.
        dtype: integer dtype of the ids on disk, one of Megatron's.
        metadata: goes into the side file; may be extended until the block ends (`writer.metadata`).
        state: what `snapshot` returned; the partial files are cut back to it and continued.

    Raises:
        DataError: ids that do not fit; a sequence of 2^31 tokens or more; lengths that do not add up.
        ResourceError: no space, no permission.
    """

    def __init__(
        self,
        path_prefix: Path | str,
        dtype: Any,
        *,
        metadata: Mapping[str, Any] | None = None,
        state: Mapping[str, int] | None = None,
    ) -> None:
        self.path_prefix = Path(path_prefix)
        self.dtype = np.dtype(dtype).newbyteorder("<") if np.dtype(dtype).itemsize > 1 else np.dtype(dtype)
        if self.dtype not in CODES or self.dtype.kind not in "iu":
            raise DataError(f"dtype {np.dtype(dtype)} cannot hold ids on disk; choose uint16 or int32")
        self.metadata: dict[str, Any] = dict(metadata or {})
        self.num_tokens = self.num_sequences = self.num_documents = 0
        self._keep_partial = state is not None
        self._files: dict[str, IO[bytes]] = {}
        try:
            self.path_prefix.parent.mkdir(parents=True, exist_ok=True)
            for part in _PARTS:
                self._files[part] = self._open(part, None if state is None else state[f"{part}_bytes"])
        except OSError as error:
            raise resource_error(error, self.path_prefix) from error
        if state is not None:
            self.num_tokens = state["bin_bytes"] // self.dtype.itemsize
            self.num_sequences = state["lengths_bytes"] // 4
            self.num_documents = state["documents_bytes"] // 8

    def _partial(self, part: str) -> Path:
        return self.path_prefix.with_name(f".{self.path_prefix.name}.{part}.partial")

    def _open(self, part: str, size: int | None) -> IO[bytes]:
        path = self._partial(part)
        if size is None:
            return open(path, "wb", buffering=1 << 20)  # closed by commit or abort
        file = open(path, "r+b", buffering=1 << 20)  # noqa: SIM115 (closed by commit or abort)
        found = file.seek(0, os.SEEK_END)
        if found < size:
            raise DataError(f"{path}: {found} bytes, the snapshot has {size}; start over without it")
        file.truncate(size)
        file.seek(size)
        return file

    def add_document(self, tokens: Sequence[int] | np.ndarray, lengths: Sequence[int] | None = None) -> None:
        """Append one document, one sequence unless `lengths` (tokens, adding up to all) cuts it into more."""
        ids = as_ids(tokens, self.dtype)
        sizes = np.asarray([len(ids)] if lengths is None else lengths, np.int64)
        self._append(ids, sizes, np.asarray([self.num_sequences], "<i8"))

    def add_documents(self, tokens: Sequence[int] | np.ndarray, lengths: Sequence[int] | np.ndarray) -> None:
        """Append many documents of one sequence each, their ids one after the other in `tokens`."""
        sizes = np.asarray(lengths, np.int64)
        starts = np.arange(self.num_sequences, self.num_sequences + len(sizes), dtype="<i8")
        self._append(as_ids(tokens, self.dtype), sizes, starts)

    def add_dataset(self, source: IndexedDataset, seen: Callable[[np.ndarray], None] | None = None) -> None:
        """Append all of another dataset, sequences and documents as they are cut there, in constant memory.

        Args:
            seen: called with each run of ids as they are written, [n] in this writer's dtype.

        Raises:
            DataError: ids that do not fit.
        """
        try:
            for start in range(0, source.num_tokens, _CHUNK):
                ids = as_ids(source.tokens(start, min(start + _CHUNK, source.num_tokens)), self.dtype)
                self._files["bin"].write(ids.tobytes())
                if seen is not None:
                    seen(ids)
                source.release()
            for start in range(0, len(source), _CHUNK):
                self._files["lengths"].write(source.sequence_lengths[start : start + _CHUNK].astype("<i4").tobytes())
                source.release()
            for start in range(0, source.num_documents, _CHUNK):
                stop = min(start + _CHUNK, source.num_documents)
                starts = source.document_index[start:stop].astype("<i8") + self.num_sequences
                self._files["documents"].write(starts.tobytes())
            source.release()
        except OSError as error:
            raise resource_error(error, self.path_prefix) from error
        self.num_tokens += source.num_tokens
        self.num_sequences += len(source)
        self.num_documents += source.num_documents

    def add_sequences(self, tokens: np.ndarray, lengths: np.ndarray, starts: np.ndarray) -> None:
        """Append whole documents of any number of sequences.

        Args:
            tokens: ids of all sequences, one after the other.
            lengths: int [sequences].
            starts: int [documents], number of the sequence among `lengths` at which each begins, ascending.
        """
        first = np.asarray(starts, "<i8") + self.num_sequences
        self._append(as_ids(tokens, self.dtype), np.asarray(lengths, np.int64), first)

    def _append(self, ids: np.ndarray, sizes: np.ndarray, starts: np.ndarray) -> None:
        if int(sizes.sum()) != len(ids) or (len(sizes) and int(sizes.min()) < 0):
            raise DataError(f"lengths add up to {int(sizes.sum())}, but {len(ids)} tokens were given")
        if len(sizes) and int(sizes.max()) > MAX_SEQUENCE_TOKENS:
            raise DataError(
                f"a sequence of {int(sizes.max())} tokens; the format holds {MAX_SEQUENCE_TOKENS}, "
                "cut the document into sequences"
            )
        try:
            self._files["bin"].write(ids.tobytes())
            self._files["lengths"].write(sizes.astype("<i4").tobytes())
            self._files["documents"].write(starts.tobytes())
        except OSError as error:
            raise resource_error(error, self.path_prefix) from error
        self.num_tokens += len(ids)
        self.num_sequences += len(sizes)
        self.num_documents += len(starts)

    def snapshot(self) -> dict[str, int]:
        """Make all that was added durable; the result, as `state`, continues from here after a crash."""
        try:
            self._flush()
        except OSError as error:
            raise resource_error(error, self.path_prefix) from error
        self._keep_partial = True
        return {f"{part}_bytes": self._files[part].tell() for part in _PARTS}

    def _flush(self) -> None:
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())

    def commit(self) -> None:
        """Join the index, then give the three files their names, the index last: with it the dataset is there."""
        try:
            self._join_index()
            checksums = {suffix: checksum_file(self._partial(suffix)) for suffix in ("bin", "idx")}
            blocks = {suffix: block_checksums(self._partial(suffix)) for suffix in ("bin", "idx")}
            remove_dataset(self.path_prefix)
            os.replace(self._partial("bin"), f"{self.path_prefix}.bin")
            side = self.metadata | self._facts() | {"checksums": checksums, "blocks": blocks}
            write_json(side_file(self.path_prefix), sealed(side))
            os.replace(self._partial("idx"), f"{self.path_prefix}.idx")
            fsync_dir(self.path_prefix.parent)
        except OSError as error:
            raise resource_error(error, self.path_prefix) from error
        remove_partial(self.path_prefix)

    def _facts(self) -> dict[str, Any]:
        return {
            "format": "megatron-indexed",
            "format_version": SIDE_VERSION,
            "dtype": self.dtype.name,
            "num_documents": self.num_documents,
            "num_sequences": self.num_sequences,
            "num_tokens": self.num_tokens,
        }

    def _join_index(self) -> None:
        """Header, lengths, offsets (their running sum in bytes), document starts, N: a chunk at a time."""
        self._flush()
        for file in self._files.values():
            file.close()
        with open(self._partial("idx"), "wb", buffering=1 << 20) as out:
            code = CODES[self.dtype]
            out.write(HEADER.pack(MAGIC, VERSION, code, self.num_sequences, self.num_documents + 1))
            _copy(self._partial("lengths"), out)
            offset = 0
            with open(self._partial("lengths"), "rb") as lengths:
                while chunk := lengths.read(4 * _CHUNK):
                    ends = offset + np.cumsum(np.frombuffer(chunk, "<i4"), dtype="<i8") * self.dtype.itemsize
                    out.write(np.concatenate([np.asarray([offset], "<i8"), ends[:-1]]).tobytes())
                    offset = int(ends[-1])
            _copy(self._partial("documents"), out)
            out.write(self.num_sequences.to_bytes(8, "little"))
            out.flush()
            os.fsync(out.fileno())

    def abort(self) -> None:
        """Close; remove the partial files unless a snapshot promises that they can be continued."""
        for file in self._files.values():
            with contextlib.suppress(OSError):  # a full disk refuses the last flush as well
                file.close()
        if not self._keep_partial:
            remove_partial(self.path_prefix)

    def __enter__(self) -> IndexedDatasetWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.abort()
            return
        try:
            self.commit()
        except BaseException:
            self.abort()
            raise


def remove_partial(path_prefix: Path | str) -> None:
    """Delete the hidden files that an unfinished writer at `path_prefix` left."""
    prefix = Path(path_prefix)
    for part in (*_PARTS, "idx"):
        with contextlib.suppress(FileNotFoundError):
            prefix.with_name(f".{prefix.name}.{part}.partial").unlink()


def _copy(source: Path, out: IO[bytes]) -> None:
    with open(source, "rb") as file:
        while chunk := file.read(1 << 22):
            out.write(chunk)
