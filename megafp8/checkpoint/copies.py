"""A checkpoint, or a part of it, as another one elsewhere: verified while it is read, whole or not there. No torch."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import BinaryIO

from megafp8.checkpoint.commit import begin_folder, commit, discard, space_for
from megafp8.checkpoint.folders import check, step_name
from megafp8.checkpoint.manifest import ITEM_BYTES, Manifest, Piece, PieceFile, TensorEntry, checksum
from megafp8.checkpoint.piece_output import Box, write_piece_file
from megafp8.core.config import nearest
from megafp8.core.errors import CheckpointError, ResourceError
from megafp8.core.jsonio import resource_error

_CHUNK = 4 << 20
_FILE_BYTES = 4 << 30


def copy(source: Path, root: Path, only: Sequence[str] = ()) -> Path:
    """Write the checkpoint `source` as `<root>/step_<step>`; returns that.

    Args:
        only: patterns (*, ?, [...]) of names of tensors; empty: all, in files that are the source's byte for byte.

    Raises:
        CheckpointError: missing or damaged (names the file), or a pattern that no tensor matches.
        ResourceError: the target is there, no space, no permission. Nothing half-written remains.
    """
    manifest = check(source)
    chosen = _chosen(manifest, only, source)
    target = root / step_name(manifest.step)
    if target.exists():
        raise ResourceError(f"{target}: is there already; choose another folder, or remove it")
    pieces = [piece for entry in chosen.values() for piece in entry.pieces]
    data = manifest.bytes if not only else sum(piece.bytes for piece in pieces)
    try:
        folder = begin_folder(root, manifest.step, space_for(data, len(pieces), len(str(manifest.meta))))
    except OSError as error:
        raise resource_error(error, root) from error
    try:
        made = _rewrite(source, folder, manifest, chosen) if only else _copy_files(source, folder, manifest)
        return commit(folder, made)
    except OSError as error:
        discard(folder)
        raise resource_error(error, root) from error
    except BaseException:
        discard(folder)
        raise


def _chosen(manifest: Manifest, only: Sequence[str], source: Path) -> dict[str, TensorEntry]:
    for pattern in only:
        if not any(fnmatchcase(name, pattern) for name in manifest.tensors):
            near = nearest(pattern, manifest.tensors)
            raise CheckpointError(f"{source}: --only {pattern!r} matches no tensor{near}; `show` lists them")
    return {n: entry for n, entry in manifest.tensors.items() if not only or any(fnmatchcase(n, p) for p in only)}


def _copy_files(source: Path, folder: Path, manifest: Manifest) -> Manifest:
    for name, entry in manifest.files.items():
        whole = checksum()
        with open(source / name, "rb") as file, _create(folder / name) as out:
            while chunk := file.read(_CHUNK):
                whole.update(chunk)
                out.write(chunk)
            out.flush()
            os.fsync(out.fileno())
        if whole.hexdigest() != entry.checksum:
            raise CheckpointError(f"{source / name}: damaged: it does not match its checksum; use an older checkpoint")
    return manifest


def _create(path: Path) -> BinaryIO:
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o640), "wb")


def _rewrite(source: Path, folder: Path, manifest: Manifest, chosen: dict[str, TensorEntry]) -> Manifest:
    """The chosen tensors, their pieces cut as they were, in files of up to 4 GiB; one piece at a time in memory."""
    files: dict[str, PieceFile] = {}
    written: dict[str, list[Piece]] = {}
    for number, batch in enumerate(_batches(chosen)):
        boxes = [
            Box(piece.key, entry.dtype, piece.offsets, piece.sizes, partial(_read, source / piece.file, piece))
            for _, entry, piece in batch
        ]
        path = folder / f"piece_00000_{number:02d}.safetensors"
        files[path.name], pieces = write_piece_file(path, boxes)
        for (name, _, _), piece in zip(batch, pieces, strict=True):
            written.setdefault(name, []).append(piece)
    tensors = {name: replace(entry, pieces=tuple(written.get(name, ()))) for name, entry in chosen.items()}
    return Manifest(manifest.step, manifest.meta, files, tensors)


def _batches(chosen: dict[str, TensorEntry]) -> Iterator[list[tuple[str, TensorEntry, Piece]]]:
    items = [(name, entry, piece) for name, entry in chosen.items() for piece in entry.pieces]
    items.sort(key=lambda item: -ITEM_BYTES[item[1].dtype])  # the widest elements first, so that all are aligned
    batch: list[tuple[str, TensorEntry, Piece]] = []
    size = 0
    for item in items:
        if batch and size + item[2].bytes > _FILE_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(item)
        size += item[2].bytes
    if batch:
        yield batch


def _read(path: Path, piece: Piece) -> memoryview:
    data = memoryview(bytearray(piece.bytes))
    done = 0
    with open(path, "rb", buffering=0) as file:
        file.seek(piece.start)
        while done < len(data) and (count := file.readinto(data[done:])):
            done += count
    if done < len(data) or checksum(data).hexdigest() != piece.checksum:
        raise CheckpointError(f"{path}: damaged: {piece.key} does not match its checksum; use an older checkpoint")
    return data
