"""The folder that a conversion makes: written beside its place, taken up again after a kill, renamed when complete."""

from __future__ import annotations

import fcntl
import os
import shutil
from pathlib import Path
from typing import Any

from megafp8.core.errors import DataError, MegaError, ResourceError
from megafp8.core.jsonio import fsync_dir, read_json, resource_error

RECORD_NAME = "megafp8_export.json"  # where the folder comes from, and what its verification found
JOURNAL = ".progress"  # of what is written, while it is
_LOCK = ".lock"


def is_done(out: Path, record: dict[str, Any], keys: tuple[str, ...], *, verify: bool) -> bool:
    """Whether `out` is what this command makes: its record agrees in `keys`, and it is verified if that is asked for.

    Raises:
        ResourceError: it is a file, or a folder that holds anything else.
    """
    if not out.exists():
        return False
    if not out.is_dir():
        raise ResourceError(f"{out}: is a file; choose another path")
    if not any(out.iterdir()):
        return False
    try:
        old = read_json(out / RECORD_NAME)
    except DataError:
        old = {}
    if all(old.get(key) == record[key] for key in keys) and (old.get("verified") or not verify):
        return True
    raise ResourceError(f"{out}: holds something else already; remove it or choose another folder")


class Beside:
    """A folder beside `out` that becomes `out` if all goes well.

    It goes where a conversion fails, and stays where it is interrupted (Ctrl-C, a kill): the next one finds there what
    was written.
    """

    def __init__(self, out: Path) -> None:
        self.out = out
        self.folder = out.with_name(f".{out.name}.converting")
        self._made: list[Path] = []
        self._lock = -1

    def __enter__(self) -> Path:
        try:
            self._made = [parent for parent in self.out.parents if not parent.exists()]
            self.folder.mkdir(mode=0o750, parents=True, exist_ok=True)
            self._lock = os.open(self.folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o640)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.path.samestat(os.fstat(self._lock), os.stat(self.folder / _LOCK)):
                raise BlockingIOError  # the other one has just finished
        except BlockingIOError:
            os.close(self._lock)
            raise ResourceError(f"{self.out}: another conversion is writing it; wait for it, or stop it") from None
        except OSError as error:
            raise resource_error(error, self.out) from error
        return self.folder

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        try:
            if kind is None:
                self._publish()
            elif issubclass(kind, Exception):
                shutil.rmtree(self.folder, ignore_errors=True)
                for parent in self._made:  # the nearest first
                    if not any(parent.iterdir()):
                        parent.rmdir()
        except OSError as problem:
            if not isinstance(error, MegaError):
                raise resource_error(problem, self.out) from problem
        finally:
            os.close(self._lock)

    def _publish(self) -> None:
        for name in (_LOCK, JOURNAL):
            (self.folder / name).unlink(missing_ok=True)
        for path in self.folder.iterdir():  # the libraries that write them do not agree on one
            path.chmod(0o640)
        fsync_dir(self.folder)
        if self.out.exists():  # an empty folder
            self.out.rmdir()
        os.rename(self.folder, self.out)
        fsync_dir(self.out.parent)
