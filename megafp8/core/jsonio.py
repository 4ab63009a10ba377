"""Files that are either whole or not there: temporary name, fsync, rename, fsync of the folder."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import secrets
from pathlib import Path
from typing import Any

from megafp8.core.errors import DataError, MegaError, ResourceError

_SEAL = "checksum"  # the key of a JSON file's checksum over the rest of it
_SHORT_WRITE = re.compile(r"\d+ requested and \d+ written")
_RESOURCE_ERRNOS = {
    errno.ENOSPC: "no space left on the device; free some or choose another folder",
    errno.EDQUOT: "disk quota exceeded; free some or choose another folder",
    errno.EACCES: "permission denied; choose a folder that you may write",
    errno.EPERM: "operation not permitted; choose a folder that you may write",
    errno.EROFS: "read-only file system; choose another folder",
    errno.ENOTDIR: "a part of the path is a file, not a folder; choose another folder",
    errno.EIO: "input/output error of the device; look at the disk",
}


def resource_error(error: OSError, path: Path) -> MegaError:
    """Turn an operating system's refusal into one line; what is not one of these comes back as ResourceError too."""
    number = error.errno or 0
    if not number and _SHORT_WRITE.search(str(error)):  # numpy says how much was written, and not why
        number = errno.ENOSPC
    hint = _RESOURCE_ERRNOS.get(number, error.strerror or str(error))
    return ResourceError(f"{path}: {hint}")


def fsync_dir(path: Path) -> None:
    """Make a rename in folder `path` durable."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_atomic(path: Path, data: bytes) -> None:
    """Write `data` to `path` so that a crash leaves the old file or the new one, never a part.

    Raises:
        ResourceError: no space, no permission, not a folder.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        fsync_dir(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise resource_error(error, path) from error


def write_json(path: Path, value: Any) -> None:
    """Write JSON atomically, sorted and indented so that two files can be compared by eye."""
    write_atomic(path, (json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False) + "\n").encode())


def read_json(path: Path) -> Any:
    """Read a JSON file.

    Raises:
        DataError: the file is missing or is not JSON.
    """
    try:
        return json.loads(Path(path).read_bytes())
    except FileNotFoundError:
        raise DataError(f"{path}: no such file") from None
    except (ValueError, UnicodeDecodeError, RecursionError) as error:
        raise DataError(f"{path}: not valid JSON ({error}); it may be cut short, make it again") from error


def sealed(value: dict[str, Any]) -> dict[str, Any]:
    """`value` with a checksum of all of it, for `write_json`; any change of a value or a name breaks it."""
    rest = {key: part for key, part in value.items() if key != _SEAL}
    text = json.dumps(rest, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return {**rest, _SEAL: f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"}


def seal_holds(value: dict[str, Any]) -> bool:
    """Whether what `sealed` made is as it was made."""
    return bool(value.get(_SEAL) == sealed(value)[_SEAL])


def sha256_file(path: Path) -> str:
    """SHA-256 of a file's bytes, as 64 hex digits."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
