"""Failures that any rank had in a collective save or load, as one house error on every rank."""

from __future__ import annotations

import traceback
from pathlib import Path

from torch.distributed.checkpoint.api import CheckpointException

from megafp8.core.errors import CheckpointError, MegaError
from megafp8.core.jsonio import resource_error


def house_error(failure: CheckpointException, path: Path) -> MegaError:
    """One line from the first rank that failed; a bug keeps its file and line, the chain keeps the rest."""
    rank, (error, stack) = min(failure.failures.items())
    if isinstance(error, MegaError):
        return error
    if isinstance(error, OSError):
        return resource_error(error, Path(error.filename) if isinstance(error.filename, str) else path)
    frame = stack[-1] if stack else traceback.FrameSummary("?", 0, "?")
    return CheckpointError(
        f"{path}: rank {rank}: {type(error).__name__}: {error} ({Path(frame.filename).name}:{frame.lineno})"
    )
