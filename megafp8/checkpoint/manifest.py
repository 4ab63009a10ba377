"""The manifest: which tensors a checkpoint holds, where their bytes lie, and checksums of all of them.

JSON, written last, sealed by a checksum of its own bytes, and distrusted when read: every size and offset is checked
against the others before anything is opened. No torch here, so that `megafp8 checkpoint ls` is light.

The checksum is xxh3-128: 30 GB/s on one core where SHA-256 makes 2 GB/s (with SHA instructions), so it costs nothing
beside a disk. It finds damage, as SHA-256 would; neither protects from someone who rewrites the manifest too.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from megafp8.core.errors import CheckpointError

MANIFEST_NAME = "manifest.json"
FORMAT = "megafp8-checkpoint"
VERSION = 1
ITEM_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip

_CHECKSUM = "xxh3_128"
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*\.safetensors")
_MAX_DIMS = 16
_MAX_ELEMENTS = 1 << 56  # so that no product with an element's size overflows 63 bits


class MismatchError(CheckpointError):
    """An intact checkpoint that is not for this run or this version: an older one would be the wrong answer."""


class UnreadableError(CheckpointError):
    """The system refuses to read it. It may be whole, so it is passed over where it stands, and not set aside."""


def checksum(data: Any = b"") -> Any:
    """A running checksum (`update`, `hexdigest`) of bytes, memoryview or bytearray."""
    return xxhash.xxh3_128(data)


@dataclass(frozen=True)
class PieceFile:
    """One safetensors file. Sizes in bytes; `header_bytes` counts the 8 bytes of the length too."""

    bytes: int
    checksum: str
    header_bytes: int
    header_checksum: str


@dataclass(frozen=True)
class Piece:
    """A box of a tensor: elements [offsets, offsets + sizes) lie at [start, start + bytes) of `file`, row-major."""

    file: str
    key: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int
    bytes: int
    checksum: str


@dataclass(frozen=True)
class TensorEntry:
    """A global tensor: dtype by its safetensors name ("BF16"), global shape, pieces that fill it exactly."""

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @property
    def bytes(self) -> int:
        """Size of the whole tensor in bytes."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds. `meta` is the caller's own JSON."""

    step: int
    meta: dict[str, Any] = field(default_factory=dict)
    files: dict[str, PieceFile] = field(default_factory=dict)
    tensors: dict[str, TensorEntry] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        """Size of all piece files in bytes."""
        return sum(file.bytes for file in self.files.values())


Kinds = dict[str, tuple[str, tuple[int, ...]]]  # dtype and shape of each tensor, both global


def gathered(
    step: int,
    meta: dict[str, Any],
    files: Mapping[str, PieceFile],
    pieces: Mapping[str, Sequence[Piece]],
    kinds: Kinds,
) -> Manifest:
    """The manifest of what all ranks together have written: `pieces` by the name of their tensor."""
    tensors = {name: TensorEntry(dtype, shape, tuple(pieces[name])) for name, (dtype, shape) in kinds.items()}
    return Manifest(step, meta, dict(sorted(files.items())), tensors)


def encode(manifest: Manifest) -> bytes:
    """The manifest as JSON, a line a file and a tensor, the last line sealing all bytes before it."""
    head = {"format": FORMAT, "version": VERSION, "checksum_of_pieces": _CHECKSUM, "step": manifest.step}
    body = ["{"]
    body += [f"{json.dumps(key)}: {json.dumps(value)}," for key, value in head.items()]
    body.append(f'"meta": {json.dumps(manifest.meta, ensure_ascii=False)},')
    body.append(_section("files", {k: asdict(v) for k, v in manifest.files.items()}) + ",")
    body.append(_section("tensors", {k: asdict(v) for k, v in manifest.tensors.items()}))
    data = "\n".join(body).encode()
    return data + _seal(data)


def _section(name: str, entries: dict[str, Any]) -> str:
    lines = [f"{json.dumps(k, ensure_ascii=False)}: {json.dumps(v, ensure_ascii=False)}" for k, v in entries.items()]
    return f'"{name}": {{\n' + ",\n".join(lines) + "\n}"


def _seal(data: bytes) -> bytes:
    return f',\n"checksum": "{_CHECKSUM}:{checksum(data).hexdigest()}"\n}}\n'.encode()


def read_manifest(folder: Path) -> Manifest:
    """Read and check the manifest of the checkpoint `folder`.

    Raises:
        CheckpointError: no checkpoint, an incomplete, damaged or inconsistent one, or a newer format.
    """
    path = Path(folder) / MANIFEST_NAME
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        what = "incomplete, or no checkpoint" if path.parent.is_dir() else "no such folder"
        raise CheckpointError(f"{folder}: has no {MANIFEST_NAME}: {what}; choose another step") from None
    except OSError as error:
        raise UnreadableError(f"{path}: cannot be read: {error.strerror or error}") from error
    try:
        return _decode(data)
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path}: not a valid manifest: {error}; use an older checkpoint") from error
    except CheckpointError as error:
        raise type(error)(f"{path}: {error}") from None


def _decode(data: bytes) -> Manifest:
    size = len(_seal(b""))
    body, seal = data[:-size], data[-size:]
    if seal != _seal(body):
        _refuse_foreign(data)
        raise CheckpointError("damaged: its bytes do not match its checksum; use an older checkpoint")
    value = json.loads(data)
    _refuse_foreign(data)
    if not isinstance(value["meta"], dict):
        raise ValueError("meta is no object")
    files = {_checked_name(name): PieceFile(**entry) for name, entry in value["files"].items()}
    tensors = {name: _tensor_entry(entry) for name, entry in value["tensors"].items()}
    manifest = Manifest(_natural(value["step"]), value["meta"], files, tensors)
    for problem in _problems(manifest):
        raise CheckpointError(f"inconsistent: {problem}; use an older checkpoint")
    return manifest


def _refuse_foreign(data: bytes) -> None:
    """Tell another format or a newer version of ours from a damaged file."""
    try:
        value = json.loads(data)
        kind, version = value["format"], value["version"]
    except (KeyError, TypeError, ValueError, RecursionError):
        return
    if kind != FORMAT:
        raise MismatchError(f"format {kind!r} is not {FORMAT!r}; convert it first (megafp8 convert)")
    if version != VERSION:
        raise MismatchError(f"format version {version} is not the {VERSION} that is read here; update megafp8")


def _tensor_entry(entry: dict[str, Any]) -> TensorEntry:
    pieces = tuple(
        Piece(**{**p, "offsets": _naturals(p["offsets"]), "sizes": _naturals(p["sizes"])}) for p in entry["pieces"]
    )
    return TensorEntry(entry["dtype"], _naturals(entry["shape"]), pieces)


def _natural(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is not a natural number")
    return value


def _naturals(values: Any) -> tuple[int, ...]:
    if len(values) > _MAX_DIMS:
        raise ValueError(f"{len(values)} dims are more than {_MAX_DIMS}")
    found = tuple(_natural(value) for value in values)
    if math.prod(max(value, 1) for value in found) > _MAX_ELEMENTS:  # also where a zero hides it
        raise ValueError(f"{found} is more than {_MAX_ELEMENTS} elements")
    return found


def _checked_name(name: str) -> str:
    """Refuse names that could leave the folder."""
    if not _FILE_NAME.fullmatch(name):
        raise ValueError(f"{name!r} is no name of a piece file")
    return name


def _problems(manifest: Manifest) -> Iterator[str]:
    for name, file in manifest.files.items():
        if _natural(file.header_bytes) > _natural(file.bytes):
            yield f"{name}: header of {file.header_bytes} bytes in a file of {file.bytes}"
    for name, entry in manifest.tensors.items():
        if entry.dtype not in ITEM_BYTES:
            yield f"{name}: unknown dtype {entry.dtype!r}"
            continue
        for piece in entry.pieces:
            yield from (f"{name}: {problem}" for problem in _piece_problems(manifest, entry, piece))
        filled = sum(math.prod(piece.sizes) for piece in entry.pieces)
        if filled != math.prod(entry.shape):
            yield f"{name}: pieces of {filled} elements do not fill shape {entry.shape}"


def _piece_problems(manifest: Manifest, entry: TensorEntry, piece: Piece) -> Iterator[str]:
    file = manifest.files.get(piece.file)
    if file is None:
        yield f"{piece.file} is not listed"
    elif not file.header_bytes <= _natural(piece.start) <= file.bytes - _natural(piece.bytes):
        yield f"bytes {piece.start} + {piece.bytes} lie outside {piece.file} of {file.bytes}"
    if piece.bytes != math.prod(piece.sizes) * ITEM_BYTES[entry.dtype]:
        yield f"{piece.bytes} bytes do not hold {piece.sizes} of {entry.dtype}"
    boxes = zip(piece.offsets, piece.sizes, entry.shape, strict=True)
    if any(offset + size > whole for offset, size, whole in boxes):
        yield f"box {piece.offsets} + {piece.sizes} lies outside {entry.shape}"
