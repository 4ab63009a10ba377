"""load, load_newest: a checkpoint into this rank's tensors, on any mesh. load_tensors, read_meta: without any."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from megafp8.checkpoint.failures import house_error
from megafp8.checkpoint.folders import DAMAGED, candidates, check, damaged, set_aside
from megafp8.checkpoint.manifest import MismatchError, UnreadableError, read_manifest
from megafp8.checkpoint.piece_file import DTYPES
from megafp8.checkpoint.planners import LoadPlanner, shards
from megafp8.checkpoint.ranks import Ranks
from megafp8.checkpoint.storage_reader import FolderReader, PieceReader
from megafp8.core.errors import CheckpointError
from megafp8.core.layout import Layout
from megafp8.core.log import event, get_logger

Listing = tuple[list[Path], list[Path]]  # checkpoints newest first, and those that were set aside

_log = get_logger(__name__)


def load(
    path: Path | str,
    tensors: Mapping[str, torch.Tensor],
    layouts: Mapping[str, Layout],
    mesh: Ranks,
    *,
    strict: bool = True,
    optional: str = "",
    converted: str | None = None,
    among: Callable[[str], bool] | None = None,
) -> dict[str, Any]:
    """Fill `tensors` in place from the checkpoint folder `path`; collective. Returns its `meta`.

    The mesh may differ from the one that saved: each rank reads the pieces that overlap its own, each once, and every
    byte is checked against its checksum before it is used.

    Args:
        tensors: this rank's local tensors by global name.
        layouts: their Layouts; a tensor without one is whole on every rank.
        strict: the names over all ranks must be those of the checkpoint; else what is on one side only is left alone.
        optional: names that start so may be on one side only all the same.
        converted: names that start so may be of another floating dtype in the checkpoint: values are rounded.
        among: names in the checkpoint for which it is false are left alone.

    Raises:
        CheckpointError: missing, incomplete, damaged (names the file), or names, shapes, dtypes differ (listed),
            on every rank. Names, shapes and sizes are looked at before any tensor is touched; after damage found later
            the content of `tensors` is undefined.
    """
    path = Path(path)
    start = time.monotonic()
    reader = FolderReader(path)
    try:
        with warnings.catch_warnings():  # the one process that is meant is announced as a surprise
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.load(
                shards(tensors, layouts, mesh),
                storage_reader=reader,
                planner=LoadPlanner(strict=strict, optional=optional, converted=converted, among=among),
                no_dist=mesh.world == 1,
            )
    except CheckpointException as error:
        raise house_error(error, path) from error
    event(_log, "checkpoint loaded", step=reader.manifest.step, path=path, seconds=time.monotonic() - start)
    return reader.manifest.meta


def load_newest(
    root: Path | str,
    tensors: Mapping[str, torch.Tensor],
    layouts: Mapping[str, Layout],
    mesh: Ranks,
    *,
    strict: bool = True,
    optional: str = "",
    converted: str | None = None,
) -> tuple[Path, dict[str, Any]] | None:
    """Fill `tensors` from the newest checkpoint under `root` that is intact; collective, all ranks take the same.

    A broken one is named in the log and the next older one is tried. Once one has loaded, those that are damaged are
    set aside under another name (`step_00000100.damaged-1`), which nothing loads or deletes; one that the system
    refuses to read stays where it is.

    Returns:
        Its folder and its `meta`; None if no folder bears a checkpoint's name.

    Raises:
        CheckpointError: there are checkpoints, and none loads (never a silent start from nothing), or the newest one
            is intact and does not match the run.
    """
    root = Path(root)
    folders, aside = _agreed((candidates(root), damaged(root)), mesh)
    broken: list[Path] = []
    for folder in folders:
        try:
            meta = load(folder, tensors, layouts, mesh, strict=strict, optional=optional, converted=converted)
        except MismatchError:
            raise
        except CheckpointError as error:
            event(_log, "checkpoint passed over", level=logging.WARNING, path=folder, reason=error)
            broken += [] if isinstance(error, UnreadableError) else [folder]
            continue
        for damage in broken if mesh.rank == 0 else ():
            event(_log, "damaged checkpoint set aside", level=logging.WARNING, path=set_aside(damage) or damage)
        return folder, meta
    if folders or aside:
        found = f"none of {len(folders)} checkpoints is intact" if folders else f"all {len(aside)} were damaged"
        raise CheckpointError(
            f"{root}: {found}; restore one (those set aside bear {DAMAGED}N in their names), or remove them all to "
            "begin anew"
        )
    return None


def _agreed(folders: Listing, mesh: Ranks) -> Listing:
    """What rank 0 saw, on every rank: two ranks may list a shared folder at different moments."""
    agreed = [folders]
    if mesh.world > 1:
        dist.broadcast_object_list(agreed, src=0)
    return agreed[0]


def read_meta(path: Path | str) -> dict[str, Any]:
    """The `meta` that a checkpoint was saved with.

    Raises:
        CheckpointError: no checkpoint, or a damaged manifest.
    """
    return read_manifest(Path(path)).meta


def tensor_names(path: Path | str, prefix: str = "") -> set[str]:
    """Global names of the tensors that a checkpoint holds, those that start with `prefix`.

    Raises:
        CheckpointError: no checkpoint, or a damaged manifest.
    """
    return {name for name in read_manifest(Path(path)).tensors if name.startswith(prefix)}


def tensor_shapes(path: Path | str, prefix: str = "") -> dict[str, tuple[int, ...]]:
    """Global names and shapes of the tensors that a checkpoint holds, those that start with `prefix`.

    Raises:
        CheckpointError: no checkpoint, or a damaged manifest.
    """
    tensors = read_manifest(Path(path)).tensors
    return {name: entry.shape for name, entry in tensors.items() if name.startswith(prefix)}


def iterate_tensors(path: Path | str, prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Whole tensors (on the CPU) whose names start with `prefix`, one at a time in memory, without torch.distributed.

    Raises:
        CheckpointError: as `load_tensors`.
    """
    path = Path(path)
    manifest = check(path)
    with PieceReader(path, manifest) as reader:
        for name in manifest.tensors:
            if name.startswith(prefix):
                yield name, reader.read_tensor(name)


class TensorReader:
    """Whole tensors of one checkpoint by global name, from any thread, without torch.distributed.

    Attributes:
        shapes: {name: shape} of all its tensors.
        dtypes: {name: dtype}.
        meta: what it was saved with.
    """

    def __init__(self, path: Path | str) -> None:
        """Open a checkpoint.

        Raises:
            CheckpointError: no checkpoint, or an incomplete or damaged one; names the file.
        """
        manifest = check(Path(path))
        self.shapes = {name: entry.shape for name, entry in manifest.tensors.items()}
        self.dtypes = {name: DTYPES[entry.dtype] for name, entry in manifest.tensors.items()}
        self.meta = manifest.meta
        self._pieces = PieceReader(Path(path), manifest)

    def __enter__(self) -> TensorReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._pieces.__exit__()

    def read(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A tensor on the CPU, in `dtype` (None: as stored), rounded as its bytes come in: one copy in memory.

        Raises:
            CheckpointError: its file is missing, cannot be read or is damaged; names it.
        """
        return self._pieces.read_tensor(name, dtype)


def load_tensors(path: Path | str, prefix: str = "") -> dict[str, torch.Tensor]:
    """Whole tensors by global name (those that start with `prefix`), on the CPU, without torch.distributed.

    Raises:
        CheckpointError: no checkpoint, or an incomplete or damaged one; names the file.
    """
    return dict(iterate_tensors(path, prefix))
