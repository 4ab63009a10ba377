"""Reader of `.bin`/`.idx` token files in Megatron's exact format, and of our side file `.json`.

A file is judged before it is mapped: sizes, counts and the two ends of every table are checked against each other in
constant time, so that a corpus of 10^12 tokens opens in milliseconds and a cut file is refused, not read as noise.
The checks that read every byte live in `verify`; the writer lives in `indexed_writer`.

Layout (little-endian, no padding; Megatron-LM, megatron/core/datasets/indexed_dataset.py):
    9 bytes magic, u64 version 1, u8 dtype code, u64 N sequences, u64 D documents + 1,
    i32[N] lengths in tokens, i64[N] byte offsets into .bin, i64[D] sequence number at which each document starts,
    and i8[N] modes in multimodal sets only (no flag says so: the reader has to be told).
"""

from __future__ import annotations

import mmap
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np

from megafp8.core.errors import DataError
from megafp8.core.jsonio import read_json, seal_holds

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
# code 6 is double and 7 is float, as in Megatron's enum, not by size
DTYPES: dict[int, np.dtype] = {
    1: np.dtype("u1"),
    2: np.dtype("i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    6: np.dtype("<f8"),
    7: np.dtype("<f4"),
    8: np.dtype("<u2"),
}
CODES: dict[np.dtype, int] = {dtype: code for code, dtype in DTYPES.items()}
SIDE_VERSION = 2  # 1 had neither checksums of blocks nor one of the side file itself
MAX_SEQUENCE_TOKENS = 2**31 - 1  # lengths are i32 on disk


def optimal_dtype(vocab_size: int) -> np.dtype:
    """The dtype that Megatron's own tool takes: uint16 below 65,500 ids, else int32."""
    return np.dtype("<u2") if vocab_size < 65500 else np.dtype("<i4")


def side_file(path_prefix: Path | str) -> Path:
    """Path of the JSON file beside a dataset: identity of its tokenizer, counts, checksums."""
    return Path(f"{path_prefix}.json")


def _size(path: Path) -> int:
    try:
        if not path.is_file():
            raise FileNotFoundError
        return path.stat().st_size
    except FileNotFoundError:
        hint = "; give the prefix without .bin or .idx" if path.stem.endswith((".bin", ".idx")) else ""
        raise DataError(f"{path}: no such file; a dataset is a pair PREFIX.bin, PREFIX.idx{hint}") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error


def _map(path: Path, dtype: np.dtype, count: int, offset: int = 0) -> np.ndarray:
    """`count` values of `dtype` at byte `offset`, read-only, mapped; an empty array where there is nothing to map."""
    if count == 0:
        return np.empty(0, dtype)
    # a plain view: np.memmap's own slicing makes a subclass instance each time, which costs more than the read
    return np.memmap(path, dtype=dtype, mode="r", offset=offset, shape=(count,)).view(np.ndarray)


class IndexedDataset:
    """Sequences of token ids behind `path_prefix`.bin and .idx.

    Args:
        path_prefix: the path without `.bin` or `.idx`.
        multimodal: the index carries one mode byte for each sequence; nothing in the file says so.

    Attributes:
        dtype: dtype of the ids on disk.
        sequence_lengths: int32 [N], tokens.
        sequence_offsets: int64 [N], bytes into .bin.
        document_index: int64 [D], sequence number at which each document starts, and N at the end.
        sequence_modes: int8 [N], or None if not multimodal.
        side: the side file as a dict; empty if there is none (Megatron writes none).

    Raises:
        DataError: missing, cut, foreign or inconsistent files.
    """

    def __init__(self, path_prefix: Path | str, *, multimodal: bool = False) -> None:
        self.path_prefix = Path(path_prefix)
        self.bin_path, self.idx_path = Path(f"{path_prefix}.bin"), Path(f"{path_prefix}.idx")
        bin_bytes, idx_bytes = _size(self.bin_path), _size(self.idx_path)
        self.dtype, num_sequences, num_entries = _read_header(self.idx_path, idx_bytes, multimodal)
        lengths_at = HEADER.size
        offsets_at = lengths_at + 4 * num_sequences
        documents_at = offsets_at + 8 * num_sequences
        modes_at = documents_at + 8 * num_entries
        path = self.idx_path
        self.sequence_lengths = _map(path, np.dtype("<i4"), num_sequences, lengths_at)
        self.sequence_offsets = _map(path, np.dtype("<i8"), num_sequences, offsets_at)
        self.document_index = _map(path, np.dtype("<i8"), num_entries, documents_at)
        self.sequence_modes = _map(path, np.dtype("i1"), num_sequences, modes_at) if multimodal else None
        self._check_ends(bin_bytes)
        self.num_tokens = bin_bytes // self.dtype.itemsize
        self._tokens = _map(self.bin_path, self.dtype, self.num_tokens)
        self.side: dict[str, Any] = self._read_side()

    def _check_ends(self, bin_bytes: int) -> None:
        """First and last entry of every table, in constant time; `verify` reads them all."""
        num_sequences, documents = len(self), self.document_index
        if documents[0] != 0 or documents[-1] != num_sequences:
            raise DataError(
                f"{self.idx_path}: document index runs from {documents[0]} to {documents[-1]}, not from 0 to "
                f"{num_sequences} sequences; the file is damaged, write it again"
            )
        expected = 0
        if num_sequences:
            expected = int(self.sequence_offsets[-1]) + int(self.sequence_lengths[-1]) * self.dtype.itemsize
        if expected != bin_bytes:
            raise DataError(
                f"{self.bin_path}: {bin_bytes} bytes, but the index ends at byte {expected}; "
                "one of the two is cut or of another dataset, write both again"
            )
        if num_sequences and self.sequence_offsets[0] != 0:
            raise DataError(f"{self.idx_path}: first sequence at byte {self.sequence_offsets[0]}, not 0; damaged")

    def _read_side(self) -> dict[str, Any]:
        path = side_file(self.path_prefix)
        if not path.is_file():
            return {}
        side = _checked_side(read_json(path), path)
        found = side.get("num_tokens")
        if found != self.num_tokens:
            raise DataError(
                f"{path}: says {found} tokens, {self.bin_path.name} has {self.num_tokens}; "
                "they are not of one dataset, write it again"
            )
        return side

    def __len__(self) -> int:
        """Number of sequences."""
        return len(self.sequence_lengths)

    @property
    def num_documents(self) -> int:
        """Number of documents (a document is one sequence or more)."""
        return len(self.document_index) - 1

    def __getitem__(self, index: int) -> np.ndarray:
        """Ids of sequence `index` in the dtype on disk; a read-only view, not a copy."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"sequence {index} of {len(self)}")
        start, rest = divmod(int(self.sequence_offsets[index]), self.dtype.itemsize)
        length = int(self.sequence_lengths[index])
        if rest or length < 0 or not 0 <= start <= self.num_tokens - length:
            raise DataError(
                f"{self.idx_path}: sequence {index} has {length} tokens at byte {self.sequence_offsets[index]}, "
                f"outside of {self.num_tokens} tokens; the index is damaged, run `megafp8 data verify`"
            )
        return self._tokens[start : start + length]

    def tokens(self, start: int, stop: int) -> np.ndarray:
        """Ids `[start, stop)` of the flat token stream, across sequences; a read-only view in the dtype on disk."""
        if not 0 <= start <= stop <= self.num_tokens:
            raise IndexError(f"tokens {start}:{stop} of {self.num_tokens}")
        return self._tokens[start:stop]

    def release(self) -> None:
        """Let go of the memory that reading has mapped in; arrays stay as they are and are read again when touched.

        Whatever walks over all of a large dataset calls it now and then: mapped pages count as the process's own.
        """
        for array in (self._tokens, self.sequence_lengths, self.sequence_offsets, self.document_index):
            memory = array.base.base if isinstance(array.base, np.memmap) else None
            if isinstance(memory, mmap.mmap):
                memory.madvise(mmap.MADV_DONTNEED)

    def document(self, index: int) -> np.ndarray:
        """Ids of a whole document (all its sequences, which lie one after the other)."""
        if not 0 <= index < self.num_documents:
            raise IndexError(f"document {index} of {self.num_documents}")
        first, after = int(self.document_index[index]), int(self.document_index[index + 1])
        if not 0 <= first <= after <= len(self):
            raise DataError(
                f"{self.idx_path}: document {index} is sequences {first} to {after} of {len(self)}; the index is "
                "damaged, run `megafp8 data verify`"
            )
        parts = [self[i] for i in range(first, after)]
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts) if parts else np.empty(0, self.dtype)


def _checked_side(side: Any, path: Path) -> dict[str, Any]:
    """A side file's value, whole and of known form."""
    if not isinstance(side, dict):
        raise DataError(f"{path}: is no JSON object; write the dataset again")
    version = side.get("format_version", 1)
    if version not in (1, SIDE_VERSION):
        raise DataError(f"{path}: side file of version {version!r}; this reader knows {SIDE_VERSION}, update megafp8")
    if (version >= 2 or "checksum" in side) and not seal_holds(side):
        raise DataError(f"{path}: damaged: it does not match its checksum; restore it or write the dataset again")
    forms: dict[str, dict[str, type]] = {
        "checksums": {"bin": str, "idx": str},
        "blocks": {"bin": str, "idx": str},
        "tokenizer": {"kind": str, "fingerprint": str, "vocab_size": int, "eod_id": int, "bos_id": int},
    }
    for key, form in forms.items():
        section = side.get(key, {})
        known = isinstance(section, dict) and (key == "tokenizer" or section.keys() <= form.keys())
        if not (known and all(isinstance(section.get(k, t()), t) for k, t in form.items())):
            raise DataError(f"{path}: {key} is not what this version knows; write the dataset again")
    return side


def _read_header(path: Path, idx_bytes: int, multimodal: bool) -> tuple[np.dtype, int, int]:
    """Dtype, N and D of an index whose size fits what its header says."""
    with open(path, "rb") as file:
        head = file.read(HEADER.size)
    if len(head) < HEADER.size or head[: len(MAGIC)] != MAGIC:
        raise DataError(f"{path}: not a Megatron index (it begins with {head[:9]!r}, not {MAGIC!r})")
    _, version, code, num_sequences, num_entries = HEADER.unpack(head)
    if version != VERSION:
        raise DataError(f"{path}: index version {version}; this reader knows version {VERSION}")
    if code not in DTYPES:
        raise DataError(f"{path}: dtype code {code}; known codes are {', '.join(map(str, DTYPES))}")
    plain = HEADER.size + 12 * num_sequences + 8 * num_entries
    expected = plain + num_sequences * multimodal
    if idx_bytes != expected or num_entries < 1:
        other = plain + num_sequences * (not multimodal)
        hint = f"; it fits multimodal={not multimodal}" if idx_bytes == other else "; it is cut or damaged"
        raise DataError(
            f"{path}: {idx_bytes} bytes, but {num_sequences} sequences and {num_entries} document entries "
            f"take {expected}{hint}"
        )
    return DTYPES[code], num_sequences, num_entries


def remove_dataset(path_prefix: Path | str) -> None:
    """Delete a dataset's files, the index first: what a crash leaves behind is then no dataset at all."""
    for suffix in (".json", ".idx", ".bin"):
        if os.path.exists(f"{path_prefix}{suffix}"):
            os.unlink(f"{path_prefix}{suffix}")
