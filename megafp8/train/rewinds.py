"""Samples that a run leaves out for good after it went back to a checkpoint: kept in the run folder and in checkpoints.

Runs count the samples that they have learnt from. A skip (at, samples) says that before the run's sample number `at`,
so many of the source's samples are left out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megafp8.core.errors import CheckpointError
from megafp8.core.jsonio import write_json
from megafp8.data.loader import Skips
from megafp8.parallel.collectives import merge_dicts
from megafp8.parallel.mesh import Mesh
from megafp8.parallel.mesh_config import RANK_ORDER

_FILE = "skipped.json"


def extended(skips: Skips, begin: int, end: int) -> Skips:
    """`skips`, and the run's samples [begin, end) as they are numbered under these."""
    assert begin < end, (begin, end)
    # a skip further on, of a rewind that went back less far, is reached so many samples earlier
    moved = ((at - (end - begin) if at >= end else min(at, begin), samples) for at, samples in skips)
    return (*moved, (begin, end - begin))


def read_skips(folder: Path, meta: Mapping[str, Any] | None, mesh: Mesh) -> Skips:
    """What this run leaves out: by the folder, which knows it first, else by the checkpoint; equal on all ranks.

    Raises:
        CheckpointError: the file is damaged.
    """
    found: dict[str, Any] = {}
    if mesh.rank == 0:
        path = folder / _FILE
        try:
            found["skips"] = json.loads(path.read_bytes()) if path.exists() else (meta or {}).get("skipped_samples", [])
            found["skips"] = [(int(at), int(samples)) for at, samples in found["skips"]]
        except (OSError, ValueError, TypeError) as error:
            found["error"] = (
                f"{path}: cannot be read: {error}; restore it, or remove it to take what the checkpoint says"
            )
    found = merge_dicts(found, mesh.group_of(RANK_ORDER))
    if "error" in found:
        raise CheckpointError(found["error"])
    return tuple(found["skips"])


def write_skips(folder: Path, skips: Skips) -> None:
    """Keep them in the run folder, durable before the run goes on; rank 0 only."""
    write_json(folder / _FILE, skips)
