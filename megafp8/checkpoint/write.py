"""save: a step's tensors into one folder, whole or not at all, on any mesh."""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from megafp8.checkpoint.failures import house_error
from megafp8.checkpoint.folders import step_name
from megafp8.checkpoint.planners import SavePlanner, shards_to_save
from megafp8.checkpoint.ranks import Ranks
from megafp8.checkpoint.storage_writer import FolderWriter
from megafp8.core.layout import Layout
from megafp8.core.log import event, get_logger

_log = get_logger(__name__)


def save(
    root: Path | str,
    step: int,
    tensors: Mapping[str, torch.Tensor],
    layouts: Mapping[str, Layout],
    mesh: Ranks,
    meta: dict[str, Any],
    *,
    threads: int = 1,
) -> Path:
    """Write `<root>/step_<step>`; collective, and on return the checkpoint is durable.

    Args:
        tensors: this rank's local tensors by global name, any device, any dtype that safetensors holds.
        layouts: their Layouts; a tensor without one is whole and equal on every rank. Replicas are written once.
        mesh: its ranks are those of torch.distributed; at world 1 that need not be initialised.
        meta: JSON for `read_meta` and `load`.
        threads: files that each rank writes at once.

    Raises:
        ResourceError: no space (told before anything is written where it can be known), no permission.
        CheckpointError: any other failure, of any rank, on every rank. Nothing half-written remains, and what was there
            before is untouched.
    """
    start = time.monotonic()
    path, size = write_folder(Path(root), step, tensors, layouts, mesh, meta, threads)
    log_saved(step, path, size, time.monotonic() - start)
    return path


def write_folder(
    root: Path,
    step: int,
    tensors: Mapping[str, torch.Tensor],
    layouts: Mapping[str, Layout],
    mesh: Ranks,
    meta: dict[str, Any],
    threads: int,
) -> tuple[Path, int]:
    """`save` without a word about it; returns the folder too and, on rank 0, the bytes of all ranks."""
    json.dumps(meta)  # a value that is no JSON fails here, on every rank, before anything is written
    writer = FolderWriter(root, step, meta, threads)
    try:
        with warnings.catch_warnings():  # the one process that is meant is announced as a surprise
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.save(
                shards_to_save(tensors, layouts, mesh),
                storage_writer=writer,
                planner=SavePlanner(),
                no_dist=mesh.world == 1,
            )
    except CheckpointException as error:
        writer.discard()
        raise house_error(error, root) from error
    return root / step_name(step), writer.bytes


def log_saved(step: int, path: Path, size: int, seconds: float, delay: float | None = None) -> None:
    """Say so, with the rate; called after the commit and never before.

    `size`: bytes of all ranks, known to rank 0; `delay`: since the snapshot, where that was not waited for.
    """
    numbers: dict[str, Any] = {"megabytes": size / 1e6, "seconds": seconds}
    numbers["MB_per_second"] = size / 1e6 / max(seconds, 1e-9)
    if delay is not None:
        numbers["seconds_after_snapshot"] = delay
    event(_log, "checkpoint saved", step=step, path=path, **numbers)
