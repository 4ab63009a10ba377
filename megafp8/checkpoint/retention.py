"""Retention: which checkpoints go. The newest complete one never does."""

from __future__ import annotations

import logging
from pathlib import Path

from megafp8.checkpoint.config import CheckpointConfig
from megafp8.checkpoint.folders import complete, remove, step_of
from megafp8.core.errors import MegaError
from megafp8.core.log import event, get_logger

_log = get_logger(__name__)


def surplus(root: Path, config: CheckpointConfig) -> list[Path]:
    """The complete checkpoints that `config` does not keep, oldest first. Broken ones are neither kept nor counted."""
    folders = [folder for folder, _ in complete(root)]
    every = config.keep_every
    return [f for f in reversed(folders[config.keep_last :]) if not (every and step_of(f) % every == 0)]


def prune(root: Path, config: CheckpointConfig) -> list[Path]:
    """Delete the surplus; called by one rank, after a save. Returns what went."""
    gone = surplus(root, config)
    for folder in gone:
        remove(folder)
        event(_log, "checkpoint pruned", path=folder)
    return gone


def prune_or_warn(root: Path, config: CheckpointConfig) -> list[Path]:
    """`prune` after a commit: what cannot be deleted is no reason to say that the save has failed."""
    try:
        return prune(root, config)
    except (MegaError, OSError) as error:
        event(_log, "checkpoints were not pruned", level=logging.WARNING, path=root, reason=error)
        return []
