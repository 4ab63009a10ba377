"""The writing half of the storage plug-in of torch.distributed.checkpoint: safetensors pieces, a sealed manifest.

A save goes to a temporary folder beside the target; renaming it is the commit, done by the coordinator when every rank
has written and the manifest is durable. See `commit`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from megafp8.checkpoint.commit import begin_folder, commit, discard, space_for
from megafp8.checkpoint.manifest import Kinds, Piece, PieceFile, gathered
from megafp8.checkpoint.piece_file import DTYPE_NAMES, bytes_of
from megafp8.checkpoint.piece_output import Box, write_piece_file, write_piece_files
from megafp8.core.errors import ResourceError

PIECE_FILE_BYTES = 4 << 30  # a rank starts another file beyond this, so that files can be read side by side
SMALL_FILE_BYTES = 64 << 20  # nor cuts its share into smaller files than this, for threads to write side by side


class FolderWriter(StorageWriter):
    """Writes checkpoint `step` under `root`, each rank with `threads`. Every rank makes one; rank 0 is coordinator."""

    def __init__(self, root: Path, step: int, meta: dict[str, Any], threads: int = 1) -> None:
        self.root, self.step, self.meta, self.threads = root, step, meta, threads
        self.folder: Path | None = None
        self.bytes = 0

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing to reset: a writer serves one save."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to set up: the coordinator makes the folder when it knows the plan."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Nothing to add."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Check the space, make the temporary folder, name each rank's files.

        Raises:
            ResourceError: not a folder, or less space than the checkpoint needs; nothing was written.
        """
        items = [item for plan in plans for item in plan.items]
        self.bytes = sum(item_bytes(item) for item in items)
        self.folder = begin_folder(self.root, self.step, space_for(self.bytes, len(items), len(str(self.meta))))
        return [replace(p, storage_data=(self.folder.name, prefix_of(i, len(plans)))) for i, p in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's share.

        Raises:
            ResourceError: the temporary folder is not seen from this rank's machine.
        """
        name, prefix = plan.storage_data
        folder = self.root / name
        if not folder.is_dir():
            raise ResourceError(f"{folder}: not seen by every rank; put checkpoints on a file system shared by all")
        batches = split(plan.items, self.threads)
        files = [
            (folder / f"{prefix}_{number:02d}.safetensors", [_box(item, planner) for item in items])
            for number, items in enumerate(batches)
        ]
        written = write_piece_files(files, self.threads, write_piece_file)
        results = [
            WriteResult(item.index, piece.bytes, (file, piece))
            for items, (file, pieces) in zip(batches, written, strict=True)
            for item, piece in zip(items, pieces, strict=True)
        ]
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the manifest, make all durable, rename: the commit."""
        assert self.folder is not None
        files: dict[str, PieceFile] = {}
        pieces: dict[str, list[Piece]] = {}
        for result in (result for rank in results for result in rank):
            file, piece = result.storage_data
            files[piece.file] = file
            pieces.setdefault(result.index.fqn, []).append(piece)
        commit(self.folder, gathered(self.step, self.meta, files, pieces, kinds_of(metadata)))

    def discard(self) -> None:
        """Remove what a failed save has written; the coordinator calls it when all ranks have stopped writing."""
        discard(self.folder)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Paths are given to the constructor instead."""
        return False


def prefix_of(rank: int, world: int) -> str:
    """What the names of a rank's files start with."""
    return f"piece_{rank:0{max(5, len(str(world)))}d}"


def item_bytes(item: WriteItem) -> int:
    """Bytes of a piece."""
    assert item.tensor_data is not None
    return item.tensor_data.chunk.sizes.numel() * item.tensor_data.properties.dtype.itemsize


def split(items: Sequence[WriteItem], threads: int = 1) -> list[list[WriteItem]]:
    """A rank's share as files: each thread one where that pays, and none above PIECE_FILE_BYTES (but for one tensor).

    Widest elements come first, so that every piece in a file is aligned to its elements.
    """
    ordered = sorted(items, key=lambda item: -item.tensor_data.properties.dtype.itemsize)  # type: ignore[union-attr]
    share = -(-sum(item_bytes(item) for item in items) // threads)
    limit = min(PIECE_FILE_BYTES, max(SMALL_FILE_BYTES, share))
    batches: list[list[WriteItem]] = []
    size = 0
    for item in ordered:
        if not batches or size + item_bytes(item) > limit:
            batches.append([])
            size = 0
        batches[-1].append(item)
        size += item_bytes(item)
    return batches


def piece_key(item: WriteItem) -> str:
    """A piece's name in its file: the tensor's, with the place of the box where that is not all of it."""
    data = item.tensor_data
    assert data is not None
    whole = data.chunk.sizes == data.size
    return item.index.fqn if whole else f"{item.index.fqn}@{','.join(map(str, data.chunk.offsets))}"


def _box(item: WriteItem, planner: SavePlanner) -> Box:
    data = item.tensor_data
    assert data is not None
    offsets, sizes, dtype = tuple(data.chunk.offsets), tuple(data.chunk.sizes), DTYPE_NAMES[data.properties.dtype]
    return Box(piece_key(item), dtype, offsets, sizes, lambda: bytes_of(planner.resolve_data(item)))  # type: ignore[arg-type]


def kinds_of(metadata: Metadata) -> Kinds:
    """Global dtype (safetensors' name) and shape of each tensor, in the order of their names."""
    return {
        name: (DTYPE_NAMES[entry.properties.dtype], tuple(entry.size))
        for name, entry in sorted(metadata.state_dict_metadata.items())
        if isinstance(entry, TensorStorageMetadata)
    }
