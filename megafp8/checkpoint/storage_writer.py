"""The writing half of the storage plug-in of torch.distributed.checkpoint: safetensors pieces, a sealed manifest.

A save goes to a temporary folder beside the target; renaming it is the commit, done by the coordinator when every rank
has written and the manifest is durable. A crash at any point leaves the old checkpoints and perhaps a temporary folder,
which the next save removes.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from megafp8.checkpoint.folders import PARTIAL, clear_leftovers, replaced_name, step_name
from megafp8.checkpoint.manifest import MANIFEST_NAME, Manifest, PieceFile, TensorEntry, encode
from megafp8.checkpoint.piece_file import DTYPE_NAMES, Box, write_piece_file
from megafp8.core.errors import ResourceError
from megafp8.core.jsonio import fsync_dir, write_atomic

PIECE_FILE_BYTES = 4 << 30  # a rank starts another file beyond this, so that files can be read side by side
_FOLDER_MODE = 0o750
_TENSOR_LINE_BYTES = 512  # room for a piece in the manifest, generously


class FolderWriter(StorageWriter):
    """Writes checkpoint `step` under `root`. Every rank makes one; rank 0 is the coordinator."""

    def __init__(self, root: Path, step: int, meta: dict[str, Any]) -> None:
        self.root, self.step, self.meta = root, step, meta
        self.folder: Path | None = None

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
        if self.root.exists() and not self.root.is_dir():
            raise ResourceError(f"{self.root}: is a file, not a folder; choose another path")
        _make_folder(self.root)
        clear_leftovers(self.root)
        _check_space(self.root, plans, self.meta)
        self.folder = self.root / f".{step_name(self.step)}.{secrets.token_hex(4)}{PARTIAL}"
        self.folder.mkdir(mode=_FOLDER_MODE)
        width = max(5, len(str(len(plans))))
        return [replace(p, storage_data=(self.folder.name, f"piece_{i:0{width}d}")) for i, p in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's share into as few files as their size limit allows.

        Raises:
            ResourceError: the temporary folder is not seen from this rank's machine.
        """
        name, prefix = plan.storage_data
        folder = self.root / name
        if not folder.is_dir():
            raise ResourceError(f"{folder}: not seen by every rank; put checkpoints on a file system shared by all")
        results: list[WriteResult] = []
        for number, items in enumerate(_split(plan.items)):
            boxes = [_box(item, planner) for item in items]
            file, pieces = write_piece_file(folder / f"{prefix}_{number:02d}.safetensors", boxes)
            results += [
                WriteResult(item.index, piece.bytes, (file, piece)) for item, piece in zip(items, pieces, strict=True)
            ]
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the manifest, make all durable, rename: the commit."""
        assert self.folder is not None
        manifest = _manifest(self.step, self.meta, metadata, results)
        write_atomic(self.folder / MANIFEST_NAME, encode(manifest))  # syncs the folder and with it the pieces' names
        (self.folder / MANIFEST_NAME).chmod(0o640)
        target = self.root / step_name(self.step)
        if target.exists():  # a step saved again: the old one steps aside but stays loadable until the new one is there
            os.rename(target, self.root / replaced_name(self.step))
        os.rename(self.folder, target)
        fsync_dir(self.root)
        clear_leftovers(self.root)

    def discard(self) -> None:
        """Remove what a failed save has written; the coordinator calls it when all ranks have stopped writing."""
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Paths are given to the constructor instead."""
        return False


def _make_folder(path: Path) -> None:
    """Make `path` and what is missing above it; each new name is made durable, lest a commit hang in the air."""
    if not path.exists():
        _make_folder(path.parent)
        path.mkdir(mode=_FOLDER_MODE, exist_ok=True)
        fsync_dir(path.parent)


def _check_space(root: Path, plans: Sequence[SavePlan], meta: dict[str, Any]) -> None:
    items = [item for plan in plans for item in plan.items]
    # Each piece costs its bytes, a header entry and a manifest line; the folders' blocks are the slack.
    needed = sum(_item_bytes(item) + _TENSOR_LINE_BYTES for item in items) + len(str(meta)) + (1 << 16)
    free = shutil.disk_usage(root).free
    if needed > free:
        raise ResourceError(
            f"{root}: the checkpoint needs {needed} bytes, {free} are free; free some space or choose another folder"
        )


def _item_bytes(item: WriteItem) -> int:
    assert item.tensor_data is not None
    return item.tensor_data.chunk.sizes.numel() * item.tensor_data.properties.dtype.itemsize


def _split(items: Sequence[WriteItem]) -> Iterator[list[WriteItem]]:
    # Widest elements first, so that every piece in a file is aligned to its elements.
    ordered = sorted(items, key=lambda item: -item.tensor_data.properties.dtype.itemsize)  # type: ignore[union-attr]
    batch: list[WriteItem] = []
    size = 0
    for item in ordered:
        if batch and size + _item_bytes(item) > PIECE_FILE_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(item)
        size += _item_bytes(item)
    if batch:
        yield batch


def _box(item: WriteItem, planner: SavePlanner) -> Box:
    data = item.tensor_data
    assert data is not None
    offsets, sizes = tuple(data.chunk.offsets), tuple(data.chunk.sizes)
    whole = data.chunk.sizes == data.size
    key = item.index.fqn if whole else f"{item.index.fqn}@{','.join(map(str, offsets))}"
    return Box(key, data.properties.dtype, offsets, sizes, lambda: planner.resolve_data(item))  # type: ignore[return-value,arg-type]


def _manifest(step: int, meta: dict[str, Any], metadata: Metadata, results: list[list[WriteResult]]) -> Manifest:
    files: dict[str, PieceFile] = {}
    pieces: dict[str, list[Any]] = {}
    for result in (result for rank in results for result in rank):
        file, piece = result.storage_data
        files[piece.file] = file
        pieces.setdefault(result.index.fqn, []).append(piece)
    tensors = {
        name: TensorEntry(DTYPE_NAMES[entry.properties.dtype], tuple(entry.size), tuple(pieces[name]))
        for name, entry in sorted(metadata.state_dict_metadata.items())
        if isinstance(entry, TensorStorageMetadata)
    }
    return Manifest(step, meta, dict(sorted(files.items())), tensors)
