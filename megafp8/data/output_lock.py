"""One writer at a time at a place: whoever comes second is told so, and a dead one's lock is no lock."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from megafp8.core.errors import DataError, ResourceError
from megafp8.core.jsonio import resource_error
from megafp8.data.indexed import IndexedDataset


@contextlib.contextmanager
def output_lock(path_prefix: Path) -> Iterator[None]:
    """Hold the dataset `path_prefix` for this process.

    The lock is the kernel's and ends with the process; the hidden file that carries it is removed at the end.

    Raises:
        ResourceError: another process is writing it; the folder cannot be written.
    """
    path = path_prefix.with_name(f".{path_prefix.name}.lock")
    handle = _locked(path)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)  # while it is held: who opened it before finds another file, or none, there
        os.close(handle)


def _locked(path: Path) -> int:
    while True:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise resource_error(error, path.parent) from error
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(handle)
            name = path.with_name(path.name.removeprefix(".").removesuffix(".lock"))
            raise ResourceError(f"{name}: another process is writing it; wait for it, or choose another name") from None
        with contextlib.suppress(FileNotFoundError):
            if os.stat(path).st_ino == os.fstat(handle).st_ino:
                return handle
        os.close(handle)  # its holder removed it in between


def check_output(path_prefix: Path, sources: list[IndexedDataset], *, overwrite: bool) -> None:
    """Refuse a place that holds a dataset.

    Raises:
        DataError: it does, and `overwrite` was not asked for; or it is one of the sources.
    """
    for source in sources:
        if source.bin_path.resolve() == Path(f"{path_prefix}.bin").resolve():
            raise DataError(f"{path_prefix}: is read as well; choose another name for the output")
    if overwrite:
        return
    for suffix in (".idx", ".bin", ".json"):
        if os.path.lexists(f"{path_prefix}{suffix}"):
            raise DataError(f"{path_prefix}{suffix}: is there already; choose another name, or --overwrite")
