"""Any source as one of our checkpoints, of weights only, tensor by tensor."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from megafp8.checkpoint.folders import step_name
from megafp8.checkpoint.manifest import MANIFEST_NAME, Manifest, Piece, PieceFile, TensorEntry, checksum, encode
from megafp8.convert.folder import Beside
from megafp8.convert.source import Source
from megafp8.convert.stream import Group, Made, Output, Written, write_groups
from megafp8.convert.tensor_files import DTYPE_NAMES
from megafp8.core.jsonio import write_atomic
from megafp8.infer.weights import stored_name

FILE_BYTES = 4 << 30  # as a run's own checkpoints are cut
_READ_BACK = 4 << 20


def write_checkpoint(
    source: Source,
    out: Path,
    meta: dict[str, Any],
    *,
    check: Callable[[Path], Any] | None = None,
    workers: int = 0,
    say: Callable[[str], Any] = lambda _: None,
) -> Path:
    """Write the weights of `source` as fp32 masters into `<out>/step_00000000`; returns that folder.

    Args:
        meta: as of `checkpoint.save`; its config.model is that of the source.
        check: called with the folder before it gets its name; what it raises leaves nothing behind.
        workers: as of `write_groups`.

    Raises:
        CheckpointError: the source is damaged.
        ResourceError: no space, no permission.
    """
    groups, size = [], 0
    for name, shape in source.shapes.items():
        bytes_here = torch.Size(shape).numel() * 4
        file = f"piece_00000_{size // FILE_BYTES:02d}.safetensors"
        size += bytes_here
        output = Output(file, stored_name(name), torch.float32, shape)
        groups.append(Group(name, (name,), (output,), Made, torch.float32, memory=0))
    target = out / step_name(0)
    with Beside(target) as folder:
        written = write_groups(folder, source, groups, options=meta, workers=workers, say=say)
        write_atomic(folder / MANIFEST_NAME, encode(_manifest(folder, written, meta)))
        if check is not None:
            check(folder)
    return target


def _manifest(folder: Path, written: Written, meta: dict[str, Any]) -> Manifest:
    manifest = Manifest(0, meta)
    for file, places in sorted(written.files.items()):
        manifest.files[file] = _piece_file(folder / file, min(place.start for place in places.values()))
        for name, place in places.items():
            digest = written.checksums[file, name]
            zeros = (0,) * len(place.shape)
            piece = Piece(file, name, zeros, place.shape, place.start, place.bytes, digest)
            manifest.tensors[name] = TensorEntry(DTYPE_NAMES[place.dtype], place.shape, (piece,))
    return manifest


def _piece_file(path: Path, header_bytes: int) -> PieceFile:
    """Size and checksums of a file, read back."""
    whole = checksum()
    with open(path, "rb") as file:
        header = file.read(header_bytes)
        whole.update(header)
        while data := file.read(_READ_BACK):
            whole.update(data)
        size = os.fstat(file.fileno()).st_size
    return PieceFile(size, whole.hexdigest(), header_bytes, checksum(header).hexdigest())
