"""Files by path or by URL (`s3://bucket/name`, through fsspec): find them, know their size and time, open them."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

import fsspec
import xxhash

from megafp8.core.errors import DataError, MegaError, ResourceError, one_line


@dataclass(frozen=True)
class InputFile:
    """An input as it was when the run began; of an object without a time, `mtime_ns` is a hash of its ETag."""

    path: str
    num_bytes: int
    mtime_ns: int


def is_url(path: Path | str) -> bool:
    """Whether fsspec has to open it."""
    return "://" in str(path)


class UnreadableError(MegaError):
    """A disk or a store refuses in the middle of a file: next time it may not, and of other files it says nothing."""

    exit_code = ResourceError.exit_code


def open_binary(path: Path | str) -> Any:
    """A file for reading, seekable, unbuffered where it is local.

    Raises:
        DataError: it is not there, or may not be read.
        UnreadableError: anything else that the disk or the store says.
    """
    try:
        return fsspec.open(str(path), "rb").open() if is_url(path) else open(path, "rb", buffering=0)
    except (FileNotFoundError, PermissionError, IsADirectoryError) as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error
    except OSError as error:
        raise UnreadableError(f"{path}: cannot be read: {error.strerror or error}") from error


def read_head(path: Path | str, num_bytes: int) -> bytes:
    """The first bytes of a file."""
    file: BinaryIO
    with open_binary(path) as file:
        return file.read(num_bytes)


def input_file(path: str) -> InputFile:
    """Size and time of one input.

    Raises:
        DataError: it cannot be read.
    """
    try:
        if is_url(path):
            system, inner = _system(path)
            return _object(path, system.info(inner))
        status = os.stat(path)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error
    return InputFile(path, status.st_size, status.st_mtime_ns)


def find_files(patterns: tuple[str, ...], inside: Callable[[str], list[str]] | None = None) -> list[InputFile]:
    """The files that paths, globs and URLs name, sorted, each once, also if it has been named in two ways.

    Args:
        inside: gives the files of a folder that a pattern names; None: folders are no input.

    Raises:
        DataError: a pattern that matches no file, or a store that does not answer.
    """
    found: set[str] = set()
    for pattern in patterns:
        files = _objects(pattern) if is_url(pattern) else _local(pattern, inside)
        if not files:
            where = f"(looked from {Path.cwd()}); correct source.files or source.valid_files"
            raise DataError(f"{pattern!r} matches no file {where}")
        found.update(files)
    places: dict[str, str] = {}
    for path in sorted(found, key=lambda path: (len(path), path)):  # of several names the shortest
        places.setdefault(place_of(path), path)
    return [input_file(path) for path in sorted(places.values())]


def place_of(path: str) -> str:
    """The same for all ways to write a path; links to files are files of their own."""
    if is_url(path):
        return path
    folder, name = os.path.split(path)
    return os.path.join(_real(folder), name)


@lru_cache(maxsize=4096)
def _real(folder: str) -> str:
    return os.path.realpath(folder)


def _local(pattern: str, inside: Callable[[str], list[str]] | None) -> list[str]:
    expanded = os.path.expanduser(pattern)
    matches = [expanded] if os.path.exists(expanded) else glob.glob(expanded, recursive=True)
    for path in matches:
        _check_local(path)
    files = [path for path in matches if os.path.isfile(path)]
    if inside is not None:
        files += [path for folder in matches if os.path.isdir(folder) for path in inside(folder)]
    return files


def _check_local(path: str) -> None:
    """Refuse what a glob finds and nobody could read twice, or name in a record: it must not be passed over in silence.

    Raises:
        DataError: a link to nothing, a pipe or device, a name that is not UTF-8.
    """
    shown = path.encode("utf-8", "backslashreplace").decode()
    if shown != path:
        raise DataError(f"{shown}: its name is not UTF-8; rename it")
    if not os.path.exists(path):
        raise DataError(f"{path}: a link to what is not there; remove it, or bring back {os.path.realpath(path)}")
    if not os.path.isfile(path) and not os.path.isdir(path):
        raise DataError(f"{path}: neither a file nor a folder; inputs are read more than once, so save it as a file")


def _system(url: str) -> tuple[Any, str]:
    """The file system of a URL, and the path in it.

    Raises:
        DataError: unknown protocol, or its package is missing.
    """
    try:
        found: tuple[Any, str] = fsspec.core.url_to_fs(url)
        return found
    except (ValueError, ImportError) as error:
        raise DataError(f"{url}: no such store here: {error}") from None


def _objects(pattern: str) -> list[str]:
    system, inner = _system(pattern)
    try:
        if not any(mark in inner for mark in "*?["):
            return [pattern] if system.isfile(inner) else []
        return [system.unstrip_protocol(name) for name in system.glob(inner) if system.isfile(name)]
    except Exception as error:  # each store has errors of its own
        raise DataError(f"{pattern}: cannot be listed: {one_line(error)}") from None


def _object(path: str, info: dict[str, Any]) -> InputFile:
    time = info.get("LastModified") or info.get("mtime") or info.get("created") or info.get("last_modified")
    if isinstance(time, datetime):
        time = time.timestamp()
    if not isinstance(time, (int, float)):
        time = xxhash.xxh32_intdigest(str(info.get("ETag", info.get("etag", ""))).encode())
    return InputFile(path, int(info["size"]), int(time * 1_000_000_000))
