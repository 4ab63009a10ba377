"""What a Megatron checkpoint's pickles say, as JSON on stdout; run as a program of its own, by path, never imported.

    python -I -S megatron_pickles.py FOLDER [--no-args]

The only pickles that this package reads. No class that they name is imported: names on a list become inert records,
any other is refused. Beside that the process has limits of memory, time and files, and a hook that ends it at the first
import, process, connection or file opened for writing. Only the standard library is here to be misused, not even torch.
"""

from __future__ import annotations

import io
import json
import math
import os
import pickle
import resource
import sys
import zipfile
from collections.abc import Callable, Mapping
from typing import Any

DTYPES = {
    "FloatStorage": "float32", "BFloat16Storage": "bfloat16", "HalfStorage": "float16", "DoubleStorage": "float64",
    "ByteStorage": "uint8", "CharStorage": "int8", "ShortStorage": "int16", "IntStorage": "int32",
    "LongStorage": "int64", "BoolStorage": "bool",
}  # fmt: skip
_FLOAT8 = {"float8_e4m3fn", "float8_e5m2"}
_CONTAINERS = {"collections.OrderedDict", "builtins.set", "__builtin__.set", "pathlib.PosixPath", "torch.Size"}
_TENSORS = {"torch._utils._rebuild_tensor_v2", *(f"torch.{name}" for name in DTYPES)}
_CHECKPOINT = "torch.distributed.checkpoint."
METADATA = {
    *(f"torch.{name}" for name in {*DTYPES.values(), *_FLOAT8}),
    "torch.serialization._get_layout",
    *(
        f"{_CHECKPOINT}metadata.{name}"
        for name in (
            "Metadata", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata", "BytesStorageMetadata",
            "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING",
        )
    ),
    *(f"{_CHECKPOINT}filesystem.{name}" for name in ("_StorageInfo", "_StoragePrefix")),
    *(
        f"{_CHECKPOINT}planner.{name}"
        for name in ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData")
    ),
}  # fmt: skip
COMMON = {"argparse.Namespace", "types.SimpleNamespace", "signal.Signals", "_io.BytesIO"} | METADATA | _TENSORS
_SETTINGS = ("megatron.", "transformer_engine.")  # enums and the like among the arguments
_AUDITED = ("pickle.find_class", "builtins.id", "sys._getframe", "object.__getattr__")
_ELSE = ("optimizer", "opt_param_scheduler", "rng_state", "rerun_state_machine")  # not of the model
_SECONDS = 900


class Refused(Exception):
    """What the caller is told, in one line."""


class Inert:
    """Stands for an object of a class that is never imported: keeps what the pickle says of it."""

    __slots__ = ("args", "items", "state")
    full_name = ""
    args: tuple[Any, ...]
    items: list[Any]
    state: Any

    def __new__(cls, *args: Any, **_: Any) -> Inert:
        made = object.__new__(cls)
        made.args, made.state, made.items = args, None, []
        return made

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        self.items.append((key, value))

    def append(self, value: Any) -> None:
        """As of a list."""
        self.items.append(value)


class InertUnpickler(pickle.Unpickler):
    """Makes containers, numbers, strings and `Inert`; refuses every name that is not on its list."""

    def __init__(self, data: bytes, allowed: set[str], prefixes: tuple[str, ...] = ()) -> None:
        super().__init__(io.BytesIO(data), encoding="utf-8")
        self._allowed, self._prefixes = allowed | _CONTAINERS, prefixes
        self._classes: dict[str, type[Inert]] = {}

    def find_class(self, module: str, name: str) -> Any:
        """A class that stands for the one named."""
        full = f"{module}.{name}"
        if full not in self._allowed and not full.startswith(self._prefixes or ("\0",)):
            raise Refused(f"its pickle names {full[:100]!r}, which no checkpoint needs; it was not run")
        if full not in self._classes:
            self._classes[full] = type("Inert", (Inert,), {"full_name": full, "__slots__": ()})
        return self._classes[full]

    def persistent_load(self, pid: Any) -> Any:
        """A storage: what is said of it."""
        return pid


class Window(io.RawIOBase):
    """A part of a file as a file."""

    def __init__(self, file: Any, start: int, length: int) -> None:
        self._file, self._start, self._length, self._at = file, start, length, 0

    def seekable(self) -> bool:
        """Always."""
        return True

    def readable(self) -> bool:
        """Always."""
        return True

    def tell(self) -> int:
        """As of a file."""
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        """As of a file."""
        self._at = offset + (0, self._at, self._length)[whence]
        if self._at < 0:
            raise OSError("before the beginning")
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        """As of a file."""
        left = max(self._length - self._at, 0)
        self._file.seek(self._start + self._at)
        data: bytes = self._file.read(left if size is None or size < 0 else min(size, left))
        self._at += len(data)
        return data


def read_saved(part: Any, allowed: set[str], prefixes: tuple[str, ...] = ()) -> tuple[Any, zipfile.ZipFile]:
    """The object of what torch.save wrote, and its archive."""
    archive = zipfile.ZipFile(part)
    (name,) = [name for name in archive.namelist() if name.endswith("/data.pkl")]
    order = [name for name in archive.namelist() if name.endswith("/byteorder")]
    if order and archive.read(order[0]) != b"little":
        raise Refused("its numbers are not little-endian")
    return InertUnpickler(archive.read(name), allowed, prefixes).load(), archive


def place_of(file: Any, start: int, length: int, dtype: str) -> dict[str, Any]:
    """Where the elements of a tensor lie: the byte of its first element, sizes and strides in elements."""
    made, archive = read_saved(Window(file, start, length), _TENSORS)
    if getattr(made, "full_name", "") != "torch._utils._rebuild_tensor_v2":
        raise Refused("a tensor is stored in a way that is not known")
    (_, kind, key, _, count), first, sizes, strides = made.args[:4]
    if DTYPES.get(kind.full_name.removeprefix("torch.")) != dtype:
        raise Refused(f"a tensor of {dtype} is stored as {kind.full_name}")
    (info,) = [info for info in archive.infolist() if info.filename.endswith(f"/data/{key}")]
    if info.compress_type != zipfile.ZIP_STORED:
        raise Refused("a tensor is stored compressed")
    file.seek(start + info.header_offset)
    header = file.read(30)  # the local header; behind it a name and padding
    begin = start + info.header_offset + 30 + int.from_bytes(header[26:28], "little")
    begin += int.from_bytes(header[28:30], "little")
    reach = first + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True)) + 1
    beyond = reach > count or begin + info.file_size > start + length
    if math.prod(sizes) and (beyond or min((first, *sizes, *strides)) < 0):
        raise Refused("a tensor reaches beyond its bytes")
    return {"start": begin, "first": first, "sizes": list(sizes), "strides": list(strides)}


def _size(value: Any) -> list[int]:
    """A torch.Size or tuple."""
    return [int(number) for number in (value.args[0] if isinstance(value, Inert) else value)]


def _files(folder: str) -> Callable[[str], Any]:
    """Opens data files of the folder, each once."""
    opened: dict[str, Any] = {}

    def file(name: str) -> Any:
        if os.path.basename(name) != name or not name.endswith(".distcp"):
            raise Refused(f"its metadata names {name!r}, which is no data file of the folder")
        if name not in opened:
            opened[name] = open(os.path.join(folder, name), "rb")  # noqa: SIM115  closed with the process
        return opened[name]

    return file


def read_tensors(folder: str, file: Callable[[str], Any]) -> tuple[dict[str, Any], dict[str, Any], int]:
    """{tensor of the model: shape, dtype, chunks}, {what is no tensor: where it lies}, number of training's tensors."""
    with open(os.path.join(folder, ".metadata"), "rb") as stream:
        metadata = InertUnpickler(stream.read(), METADATA).load().state
    stored: dict[Any, Mapping[str, Any]] = {}
    for index, info in metadata["storage_data"].items():
        offset = index.state.get("offset")
        stored[index.state["fqn"], None if offset is None else tuple(_size(offset))] = info.state
    tensors: dict[str, Any] = {}
    skipped = 0
    for name, entry in metadata["state_dict_metadata"].items():
        if not entry.full_name.endswith(".TensorStorageMetadata"):
            continue
        if name.split(".")[0] in _ELSE:
            skipped += 1
            continue
        dtype = entry.state["properties"].state[0].full_name.removeprefix("torch.")
        chunks = []
        for chunk in entry.state["chunks"]:
            offsets = _size(chunk.state["offsets"])
            info = stored[name, tuple(offsets)]
            if info.get("transform_descriptors"):
                raise Refused(f"{name} is stored compressed")
            place = place_of(file(info["relative_path"]), info["offset"], info["length"], dtype)
            if place["sizes"] != _size(chunk.state["sizes"]):
                raise Refused(f"{name}: a chunk has another shape than its file says")
            chunks.append({"file": info["relative_path"], "offsets": offsets, **place})
        tensors[name] = {"shape": _size(entry.state["size"]), "dtype": dtype, "chunks": chunks}
    objects = {name: info for (name, offset), info in stored.items() if offset is None}
    return tensors, objects, skipped


def read_arguments(folder: str, objects: Mapping[str, Any], file: Callable[[str], Any]) -> dict[str, Any] | None:
    """The training run's arguments that are numbers, strings and lists of them; None where there are none."""
    path = os.path.join(folder, "common.pt")
    inside = [info for name, info in objects.items() if name.startswith("common_state/")]
    part: Any
    if os.path.exists(path):
        part = open(path, "rb")  # noqa: SIM115
    elif inside:
        part = Window(file(inside[0]["relative_path"]), inside[0]["offset"], inside[0]["length"])
    else:
        return None
    found: Any = part
    while isinstance(found, (io.IOBase, list)) or getattr(found, "full_name", "") == "_io.BytesIO":
        if isinstance(found, list):
            (found,) = found
        elif isinstance(found, Inert):
            found = io.BytesIO(found.state[0] if found.state else found.args[0])
        else:
            found, _ = read_saved(found, COMMON, _SETTINGS)
    arguments = found.get("args") if isinstance(found, dict) else None
    if isinstance(arguments, Inert):
        arguments = arguments.state
    if not isinstance(arguments, dict):
        return None
    return {str(name): value for name, value in arguments.items() if _plain(value)}


def _plain(value: Any) -> bool:
    if isinstance(value, list):
        return len(value) <= 10_000 and all(_plain(part) for part in value)
    return value is None or isinstance(value, (bool, int, float, str))


def confine(folder: str) -> None:
    """Take from this process what reading needs not."""
    size = os.path.getsize(os.path.join(folder, ".metadata"))
    limits = {
        resource.RLIMIT_AS: (1 << 30) + 64 * size,  # a record takes some 40 times its pickled bytes
        resource.RLIMIT_CPU: _SECONDS,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_CORE: 0,
    }
    for kind, limit in limits.items():
        resource.setrlimit(kind, (limit, limit))
    b"".decode("cp437")  # zipfile's code of names, imported when first used
    here = os.path.abspath(folder) + os.sep
    writing = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and str(args[0]).startswith(here) and not (args[2] or 0) & writing:
            return
        if event not in _AUDITED:
            os.write(2, f"it asked for {event}, which no checkpoint needs\n".encode())
            os._exit(3)

    sys.addaudithook(hook)


def main(folder: str, *, with_arguments: bool) -> dict[str, Any]:
    """What is printed."""
    folder = os.path.abspath(folder)
    try:
        confine(folder)
        file = _files(folder)
        tensors, objects, skipped = read_tensors(folder, file)
        arguments = read_arguments(folder, objects, file) if with_arguments else None
        return {"tensors": tensors, "arguments": arguments, "skipped": skipped}
    except Refused as refused:
        return {"error": str(refused)}
    except OSError as error:
        return {"error": f"{error.filename or 'a file'} cannot be read: {error.strerror or error}"}
    except MemoryError:
        return {"error": "its pickles need more memory than such a checkpoint can"}
    except Exception as error:  # whatever a crafted pickle can provoke in the reader
        return {"error": f"is damaged, or laid out otherwise ({type(error).__name__}: {str(error)[:200]})"}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(sys.argv[1], with_arguments="--no-args" not in sys.argv)))
