"""Checkpoint folders as a whole: their names, which are complete, which is the newest, which are intact.

There is no pointer file that could be wrong: a checkpoint is there if and only if its folder bears its final name, and
it is complete if its manifest and files agree. No torch here, so that listing and verifying start at once.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from megafp8.checkpoint.manifest import MANIFEST_NAME, Manifest, UnreadableError, checksum, read_manifest
from megafp8.core import faults
from megafp8.core.errors import CheckpointError
from megafp8.core.jsonio import fsync_dir, resource_error
from megafp8.core.log import event, get_logger

PARTIAL = ".tmp"  # being written
DOOMED = ".gone"  # being deleted
DAMAGED = ".damaged-"  # set aside: for people to look at, never loaded, never deleted

_STEP = re.compile(r"step_(\d{8,})(\.old-[0-9a-f]{8})?")
_ASIDE = re.compile(rf"step_\d{{8,}}{re.escape(DAMAGED)}\d+")
_log = get_logger(__name__)


def step_name(step: int) -> str:
    """The folder name of a step."""
    assert step >= 0, f"step {step} is negative"
    return f"step_{step:08d}"


def replaced_name(step: int) -> str:
    """A name for a step's earlier folder while a new one takes its place; it still counts as a checkpoint."""
    return f"{step_name(step)}.old-{secrets.token_hex(4)}"


def step_of(folder: Path) -> int:
    """The step in a checkpoint folder's name."""
    match = _STEP.fullmatch(folder.name)
    assert match, f"{folder} is not named as a checkpoint"
    return int(match[1])


def candidates(root: Path) -> list[Path]:
    """Every folder under `root` that bears a checkpoint's name, newest step first; not looked into.

    Raises:
        ResourceError: `root` cannot be read.
    """
    try:
        found = [path for path in Path(root).iterdir() if _STEP.fullmatch(path.name) and path.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise resource_error(error, Path(root)) from error
    # Of the same step, the plain name is the newer one: the other was on its way out.
    return sorted(found, key=lambda path: (-step_of(path), path.name))


def damaged(root: Path) -> list[Path]:
    """The folders under `root` that were set aside as damaged, by name."""
    try:
        return sorted(path for path in Path(root).iterdir() if _ASIDE.fullmatch(path.name))
    except OSError:  # `candidates` has judged the folder
        return []


def set_aside(folder: Path) -> Path | None:
    """Rename a damaged checkpoint so that it is none any more; nothing in it is touched.

    Its step may then be saved anew, and retention never deletes it. Returns the new path, or None where the system
    refuses the rename: the folder then stays, and is passed over again.
    """
    base = step_name(step_of(folder))
    number = 1
    while (target := folder.with_name(f"{base}{DAMAGED}{number}")).exists():
        number += 1
    try:
        os.rename(folder, target)
        fsync_dir(folder.parent)
    except OSError as error:
        event(_log, "cannot be set aside", level=logging.WARNING, path=folder, reason=error.strerror)
        return None
    return target


def check_files(folder: Path, manifest: Manifest) -> None:
    """Compare the names and sizes of the piece files with the manifest; reads none of them.

    Raises:
        CheckpointError: a file is missing, too long, too short, or not of this checkpoint; names it. The folder bears
            another step's name.
    """
    named = _STEP.fullmatch(folder.name)
    if named and int(named[1]) != manifest.step:  # the newest by name, and loaded for ever
        what = f"holds step {manifest.step} under another step's name"
        raise CheckpointError(f"{folder}: {what}; use an older checkpoint")
    for name, entry in manifest.files.items():
        try:
            size = (folder / name).stat().st_size
        except FileNotFoundError:
            raise CheckpointError(f"{folder / name}: is missing; use an older checkpoint") from None
        except OSError as error:
            reason = error.strerror or error
            raise UnreadableError(f"{folder / name}: cannot be read: {reason}; use an older checkpoint") from error
        if size != entry.bytes:
            raise CheckpointError(
                f"{folder / name}: damaged: {size} bytes where {entry.bytes} were written; use an older checkpoint"
            )
    for path in folder.iterdir():
        if path.name not in manifest.files and path.name != MANIFEST_NAME:
            raise CheckpointError(
                f"{path}: is not in the manifest; remove it if it is yours, else use another checkpoint"
            )


def check(folder: Path) -> Manifest:
    """The manifest of a checkpoint whose files are all there in their right size.

    Raises:
        CheckpointError: it is not one; one line that names the file.
    """
    manifest = read_manifest(folder)
    check_files(folder, manifest)
    return manifest


def complete(root: Path) -> Iterator[tuple[Path, Manifest]]:
    """The complete checkpoints under `root`, newest first; a broken one is named in the log and passed over."""
    for folder in candidates(root):
        try:
            yield folder, check(folder)
        except CheckpointError as error:
            event(_log, "checkpoint passed over", level=logging.WARNING, path=folder, reason=error)


def latest(root: Path) -> Path | None:
    """The newest complete checkpoint under `root`, or None if there is none."""
    return next((folder for folder, _ in complete(root)), None)


def find(path: Path | str) -> Path:
    """The checkpoint meant by `path`: itself, or the newest complete one of a run or checkpoints folder.

    Raises:
        CheckpointError: there is none; says what was looked at.
    """
    path = Path(path)
    if (path / MANIFEST_NAME).exists() or _STEP.fullmatch(path.name):
        return path
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such folder; give a checkpoint (…/step_00000100) or a run's folder")
    for root in (path / "checkpoints", path):
        if (newest := latest(root)) is not None:
            return newest
    raise CheckpointError(
        f"{path}: holds no complete checkpoint; give a checkpoint (…/step_00000100) or a run's folder"
    )


def verify(folder: Path) -> Manifest:
    """Read every byte of a checkpoint and compare it with the checksums.

    Raises:
        CheckpointError: the first damaged file, and the tensor in it.
    """
    manifest = check(folder)
    for name, entry in manifest.files.items():
        whole = checksum()
        try:
            with open(folder / name, "rb") as file:
                while chunk := file.read(1 << 22):
                    whole.update(chunk)
        except OSError as error:
            raise UnreadableError(f"{folder / name}: cannot be read: {error.strerror or error}") from error
        if whole.hexdigest() != entry.checksum:
            raise CheckpointError(
                f"{folder / name}: damaged: {_damaged_part(folder, manifest, name)} does not match its checksum; "
                "use an older checkpoint"
            )
    return manifest


def _damaged_part(folder: Path, manifest: Manifest, name: str) -> str:
    with open(folder / name, "rb") as file:
        for entry in manifest.tensors.values():
            for piece in entry.pieces:
                if piece.file == name:
                    file.seek(piece.start)
                    if checksum(file.read(piece.bytes)).hexdigest() != piece.checksum:
                        return piece.key
    return "its header"


def remove(folder: Path) -> None:
    """Delete a checkpoint so that a crash half-way leaves nothing that looks like one."""
    doomed = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}{DOOMED}")
    os.rename(folder, doomed)
    faults.at("prune")
    shutil.rmtree(doomed, ignore_errors=True)


def clear_leftovers(root: Path) -> None:
    """Remove what a killed save or delete has left, and replaced folders whose successor is complete.

    Only one process at a time saves under `root` (a run's lock sees to it).
    """
    for path in list(root.iterdir()):
        if path.name.startswith(".step_") and path.name.endswith((PARTIAL, DOOMED)):
            event(_log, "unfinished checkpoint removed", path=path)
            shutil.rmtree(path, ignore_errors=True)
        elif (match := _STEP.fullmatch(path.name)) and match[2]:
            with contextlib.suppress(CheckpointError):
                check(root / step_name(int(match[1])))
                remove(path)
