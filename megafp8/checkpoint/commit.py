"""Where a checkpoint begins and ends: a temporary folder beside the target; a sealed manifest, and one rename.

No torch, so that a small process can commit what a large one has computed. A crash at any point leaves the old
checkpoints and perhaps a temporary folder, which the next save removes.
"""

from __future__ import annotations

import os
import secrets
import shutil
from pathlib import Path

from megafp8.checkpoint.folders import PARTIAL, check_files, clear_leftovers, replaced_name, step_name
from megafp8.checkpoint.manifest import MANIFEST_NAME, Manifest, encode
from megafp8.core import faults
from megafp8.core.errors import ResourceError
from megafp8.core.jsonio import fsync_dir, write_atomic

_FOLDER_MODE = 0o750
_TENSOR_LINE_BYTES = 512  # room for a piece in the manifest, generously


def space_for(data_bytes: int, pieces: int, meta_bytes: int) -> int:
    """What a checkpoint takes, rather too much: data, header entries and manifest lines, folders' blocks; in bytes."""
    return data_bytes + pieces * _TENSOR_LINE_BYTES + meta_bytes + (1 << 16)


def begin_folder(root: Path, step: int, needed: int) -> Path:
    """Make the temporary folder of a save that takes `needed` bytes; what killed saves have left goes first.

    Raises:
        ResourceError: not a folder, no permission, or less space than that; nothing was written.
    """
    if root.exists() and not root.is_dir():
        raise ResourceError(f"{root}: is a file, not a folder; choose another path")
    _make_folder(root)
    clear_leftovers(root)
    free = shutil.disk_usage(root).free
    if needed > free:
        raise ResourceError(
            f"{root}: the checkpoint needs {needed} bytes, {free} are free; free some space or choose another folder"
        )
    folder = root / f".{step_name(step)}.{secrets.token_hex(4)}{PARTIAL}"
    folder.mkdir(mode=_FOLDER_MODE)
    faults.at("save-begin")
    return folder


def _make_folder(path: Path) -> None:
    """Make `path` and what is missing above it; each new name is made durable, lest a commit hang in the air."""
    if not path.exists():
        _make_folder(path.parent)
        path.mkdir(mode=_FOLDER_MODE, exist_ok=True)
        fsync_dir(path.parent)


def commit(folder: Path, manifest: Manifest) -> Path:
    """Seal the temporary folder, whose piece files are durable, and give it its final name; returns that.

    Raises:
        CheckpointError: a piece file is missing, of another size, or not in the manifest.
        ResourceError: no space, no permission.
    """
    check_files(folder, manifest)
    write_atomic(folder / MANIFEST_NAME, encode(manifest))  # syncs the folder and with it the pieces' names
    (folder / MANIFEST_NAME).chmod(0o640)
    faults.at("save-commit")
    root = folder.parent
    target = root / step_name(manifest.step)
    if target.exists():  # a step saved again: the old one steps aside but stays loadable until the new one is there
        os.rename(target, root / replaced_name(manifest.step))
    os.rename(folder, target)
    faults.at("save-committed")
    fsync_dir(root)
    clear_leftovers(root)
    return target


def discard(folder: Path | None) -> None:
    """Remove what a failed save has written, when nobody writes there any more."""
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)
