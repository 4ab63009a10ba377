"""The reading half of the storage plug-in of torch.distributed.checkpoint: checked pieces, nothing else."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from megafp8.checkpoint.folders import check_files
from megafp8.checkpoint.manifest import Manifest, Piece, TensorEntry, UnreadableError, read_manifest
from megafp8.checkpoint.piece_file import DTYPES, check_header, read_piece
from megafp8.core import faults
from megafp8.core.errors import CheckpointError, MegaError


class PieceReader:
    """Reads pieces of one checkpoint, from any thread; a file is opened and its header checked when first needed."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder, self.manifest = folder, manifest
        self._files: dict[str, BinaryIO] = {}
        self._opening = threading.Lock()

    def __enter__(self) -> PieceReader:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file.close()

    def read(self, piece: Piece, out: torch.Tensor, stored: torch.dtype | None = None) -> torch.Tensor:
        """Fill `out`, contiguous on the CPU, with one piece, rounded from dtype `stored` if given; returns it.

        Raises:
            CheckpointError: the file is missing, cannot be read or is damaged; names it.
        """
        read_piece(self._open(piece.file), piece, out, self.folder / piece.file, stored)
        return out

    def _open(self, name: str) -> BinaryIO:
        with self._opening:
            if name not in self._files:
                path = self.folder / name
                try:
                    file = open(path, "rb", buffering=0)  # noqa: SIM115 - closed by __exit__
                except OSError as error:
                    reason = error.strerror or error
                    raise UnreadableError(f"{path}: cannot be read: {reason}; use an older checkpoint") from error
                try:
                    check_header(file, self.manifest.files[name], path)
                except CheckpointError:
                    file.close()
                    raise
                self._files[name] = file
            return self._files[name]

    def read_tensor(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A whole tensor on the CPU, put together from its pieces, in `dtype` (None: as stored)."""
        entry = self.manifest.tensors[name]
        stored = DTYPES[entry.dtype]
        whole = torch.empty(entry.shape, dtype=dtype or stored)
        if len(entry.pieces) == 1:
            return self.read(entry.pieces[0], whole, stored)
        for piece in entry.pieces:
            box = tuple(slice(o, o + n) for o, n in zip(piece.offsets, piece.sizes, strict=True))
            whole[box] = self.read(piece, torch.empty(piece.sizes, dtype=whole.dtype), stored)
        return whole


class FolderReader(StorageReader):
    """Reads the checkpoint in `folder`; every byte that is used has passed its checksum."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest = Manifest(0)
        self._error: MegaError | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing to reset: a reader serves one load."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The manifest as the planners want it; a failure is kept for `set_up_storage_reader`.

        The caller retries a failure here in another mode and loses its message.
        """
        try:
            self.manifest = read_manifest(self.folder)
        except MegaError as error:
            self._error = error
        return Metadata({name: _storage_metadata(entry) for name, entry in self.manifest.tensors.items()})

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Look at all files before any tensor is changed; one rank does, so that thousands do not.

        Raises:
            CheckpointError: manifest or files are damaged, missing or too many.
        """
        if self._error is not None:
            raise self._error
        if is_coordinator:
            check_files(self.folder, self.manifest)

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Nothing to add."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Nothing to add."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read every piece that this rank needs once, and copy its part out of each."""
        faults.at("load")
        places = {
            MetadataIndex(name, piece.offsets): (entry.dtype, piece)
            for name, entry in self.manifest.tensors.items()
            for piece in entry.pieces
        }
        wanted: dict[MetadataIndex, list[ReadItem]] = {}
        for item in plan.items:
            wanted.setdefault(item.storage_index, []).append(item)
        with PieceReader(self.folder, self.manifest) as reader:
            for index in sorted(wanted, key=lambda i: (places[i][1].file, places[i][1].start)):
                dtype, piece = places[index]
                _read_into(reader, piece, DTYPES[dtype], wanted[index], planner)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Paths are given to the constructor instead."""
        return False


def _storage_metadata(entry: TensorEntry) -> TensorStorageMetadata:
    chunks = [ChunkStorageMetadata(torch.Size(p.offsets), torch.Size(p.sizes)) for p in entry.pieces]
    return TensorStorageMetadata(TensorProperties(DTYPES[entry.dtype]), torch.Size(entry.shape), chunks)


def _read_into(
    reader: PieceReader, piece: Piece, dtype: torch.dtype, items: list[ReadItem], planner: LoadPlanner
) -> None:
    """Read one piece and give every item its box of it; straight into the target where that is the whole piece."""
    targets = [planner.resolve_tensor(item).detach() for item in items]
    first = targets[0]
    same = first.shape == piece.sizes and first.dtype == dtype
    if len(items) == 1 and same and first.is_contiguous() and first.is_cpu:
        reader.read(piece, first)
    else:
        source = reader.read(piece, torch.empty(piece.sizes, dtype=dtype))
        for item, target in zip(items, targets, strict=True):
            boxes = zip(item.storage_offsets, item.lengths, strict=True)
            target.copy_(source[tuple(slice(start, start + length) for start, length in boxes)])
    for item, target in zip(items, targets, strict=True):
        planner.commit_tensor(item, target)
