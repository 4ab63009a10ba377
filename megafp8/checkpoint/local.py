"""Local checkpoints: fast ones on each node's own disk, beside the durable ones on a shared file system.

Each rank keeps its own boxes in a folder of its own, in the format of any checkpoint, whole and by itself. That needs
no other rank to save, and to load it needs the same mesh with every rank on the node where it was. Anything lost,
damaged or of another mesh, on any rank, and all ranks take the next older one, in the end a durable one. They are a
cache: what a run does not begin from is deleted.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megafp8.checkpoint.config import CheckpointConfig
from megafp8.checkpoint.folders import candidates, check, complete, remove, step_name, step_of, verify
from megafp8.checkpoint.manifest import checksum
from megafp8.checkpoint.planners import Shard, shards
from megafp8.checkpoint.ranks import Alone, Ranks, agree
from megafp8.checkpoint.read import load
from megafp8.checkpoint.retention import prune_or_warn
from megafp8.checkpoint.write import write_folder
from megafp8.core.errors import CheckpointError, MegaError
from megafp8.core.jsonio import resource_error
from megafp8.core.layout import Layout
from megafp8.core.log import event, get_logger

_log = get_logger(__name__)
_PLACE = "local"  # in the meta: whose boxes these are
# two, since a rank that has committed must keep the one before until all have
RETENTION = CheckpointConfig(keep_last=2)


class LocalSaveError(CheckpointError):
    """A local checkpoint could not be written: less to fall back on, and no reason to stop."""


def rank_folder(root: Path | str, mesh: Ranks) -> Path:
    """Where this rank keeps its local checkpoints; `root` belongs to one run."""
    return Path(root) / f"rank_{mesh.rank:05d}"


def own(tensors: Mapping[str, torch.Tensor]) -> dict[str, Shard]:
    """This rank's tensors as wholes of their own."""
    return shards(tensors, {}, Alone())


def with_place(meta: dict[str, Any], state: Mapping[str, Shard], mesh: Ranks) -> dict[str, Any]:
    """`meta` with what `load_newest_local` compares: the rank among how many, and which boxes of what tensors."""
    return {**meta, _PLACE: _place_of(state, mesh)}


def _place_of(state: Mapping[str, Shard], mesh: Ranks) -> dict[str, Any]:
    boxes = [
        f"{name} {shard.local.dtype} {list(shard.shape)} {list(shard.chunk.offsets)} {list(shard.chunk.sizes)}"
        for name, shard in sorted(state.items())
    ]
    return {"rank": mesh.rank, "world": mesh.world, "boxes": checksum("\n".join(boxes).encode()).hexdigest()}


def save_local(
    root: Path | str,
    step: int,
    tensors: Mapping[str, torch.Tensor],
    layouts: Mapping[str, Layout],
    meta: dict[str, Any],
    *,
    mesh: Ranks,
    threads: int = 1,
) -> Path:
    """Write this rank's tensors under its folder and wait until all ranks have theirs; collective.

    Raises:
        LocalSaveError: any rank could not; on every rank.
    """
    folder, failure, start = rank_folder(root, mesh), "", time.monotonic()
    size = sum(tensor.nbytes for tensor in tensors.values())
    try:
        placed = with_place(meta, shards(tensors, layouts, mesh), mesh)
        write_folder(folder, step, tensors, {}, Alone(), placed, threads)
    except (MegaError, OSError) as error:
        failure = str(resource_error(error, folder) if isinstance(error, OSError) else error)
    if agree([float(bool(failure))], mesh)[0]:
        raise LocalSaveError(f"step {step}: no local checkpoint: {failure or 'another rank failed'}")
    log_local(step, folder, size, time.monotonic() - start)
    prune_or_warn(folder, RETENTION)
    return folder / step_name(step)


def log_local(step: int, folder: Path, size: int, seconds: float) -> None:
    """Say so when all ranks have theirs; `size`: bytes of this rank."""
    numbers: dict[str, Any] = {"megabytes_a_rank": size / 1e6, "seconds": seconds}
    event(_log, "local checkpoint saved", step=step, path=folder / step_name(step), **numbers)


def load_newest_local(
    root: Path | str,
    tensors: Mapping[str, torch.Tensor],
    layouts: Mapping[str, Layout],
    mesh: Ranks,
    *,
    newer_than: int,
) -> tuple[Path, dict[str, Any]] | None:
    """Fill `tensors` from the newest local checkpoint that all ranks have intact; collective.

    Returns:
        this rank's folder and the meta; None if no step above `newer_than` is there for all, of this mesh. Nothing has
        changed then.
    """
    folder, place = rank_folder(root, mesh), _place_of(shards(tensors, layouts, mesh), mesh)
    mine = {step_of(path) for path, manifest in complete(folder) if manifest.meta.get(_PLACE) == place}
    for step in sorted((step for step in _common(mine, mesh) if step > newer_than), reverse=True):
        path, failed = folder / step_name(step), False
        try:
            verify(path)  # on all ranks before any tensor is touched on one
        except CheckpointError as error:
            failed = True
            reason: dict[str, Any] = {"path": path, "reason": error}
            event(_log, "local checkpoint passed over", level=logging.WARNING, all_ranks=True, **reason)
        if not agree([float(failed)], mesh)[0]:
            return path, load(path, tensors, {}, Alone())
    return None


def _common(steps: Iterable[int], mesh: Ranks) -> set[int]:
    """The steps that all ranks have."""
    mine = set(steps)
    if mesh.world == 1:
        return mine
    found: list[set[int]] = [mine] * mesh.world
    dist.all_gather_object(found, mine)
    return set.intersection(*found)


def forget_local(root: Path | str, mesh: Ranks, *, above: int) -> None:
    """Delete this rank's local checkpoints of steps above `above`, which a run that goes on from there overtakes.

    What is not complete goes too.
    """
    for path in candidates(rank_folder(root, mesh)):
        try:
            check(path)
            keep = step_of(path) <= above
        except CheckpointError:
            keep = False
        if not keep:
            try:
                remove(path)
            except OSError as error:
                event(_log, "not deleted", level=logging.WARNING, all_ranks=True, path=path, reason=error)
    for empty in (rank_folder(root, mesh), Path(root)):
        with contextlib.suppress(OSError):  # it holds another rank's, or does not exist
            empty.rmdir()
