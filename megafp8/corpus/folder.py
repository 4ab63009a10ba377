"""The output folder: whose it is, what is done, and where an interrupted run goes on.

Three JSON records, each written atomically. `manifest.json` is the last file of a finished run and says what it was
made from. `.preprocess.json` is the journal of an unfinished one. `tokenizer_info.json` says the same of a trained
tokenizer. A folder with files but none of these belongs to someone else and is not touched.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megafp8.core.errors import DataError, ResourceError
from megafp8.core.jsonio import read_json, resource_error
from megafp8.corpus.compressed import InputStream
from megafp8.corpus.readers import InputFile
from megafp8.data.indexed import remove_dataset
from megafp8.data.indexed_writer import remove_partial

PIPELINE_VERSION = 1  # raise it when the same configuration and text give other bytes
MANIFEST, JOURNAL, TOKENIZER_INFO = "manifest.json", ".preprocess.json", "tokenizer_info.json"
TOKENIZER, QUARANTINE = "tokenizer.model", "quarantine.jsonl"
SPLITS = ("train", "valid")


def fingerprint(values: Mapping[str, Any]) -> str:
    """sha256 of a configuration as canonical JSON."""
    text = json.dumps({"pipeline": PIPELINE_VERSION, **values}, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the folder (made if it is not there, removed again if nothing came into it) for this process alone.

    Raises:
        ResourceError: another process holds it; it cannot be made.
    """
    made = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise resource_error(error, folder) from error
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        raise ResourceError(
            f"{folder}: another process is writing there; wait for it, or choose another folder"
        ) from None
    try:
        yield
    finally:
        if made:
            with contextlib.suppress(OSError):  # not empty: the usual case
                folder.rmdir()
        os.close(handle)


def record_at(path: Path) -> dict[str, Any]:
    """A JSON record of ours, or {} if there is none or it is of another kind."""
    if not path.is_file():
        return {}
    with contextlib.suppress(DataError):
        value = read_json(path)
        if isinstance(value, dict) and str(value.get("kind", "")).startswith("megafp8"):
            return value
    return {}


def claim(folder: Path) -> None:
    """Make sure that the folder is empty or ours.

    Raises:
        DataError: it holds files that no run of ours wrote.
    """
    names = sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
    if names and not any(record_at(folder / name) for name in (MANIFEST, JOURNAL, TOKENIZER_INFO)):
        raise DataError(
            f"{folder}: holds {', '.join(names[:3])}{' ...' if len(names) > 3 else ''}, which `megafp8 preprocess` "
            "did not write; choose an empty or new output.folder"
        )


def clear(folder: Path) -> None:
    """Remove what a run leaves, finished or not, but for the journal; other files stay."""
    for name in (MANIFEST, QUARANTINE):
        (folder / name).unlink(missing_ok=True)
    for split in SPLITS:
        remove_dataset(folder / split)
    clear_partial(folder)


def clear_partial(folder: Path) -> None:
    """Remove the hidden files of an unfinished run, but for its journal."""
    partial_quarantine(folder).unlink(missing_ok=True)
    written = (MANIFEST, JOURNAL, TOKENIZER, TOKENIZER_INFO, *(f"{split}.json" for split in SPLITS))
    for path in folder.glob(".*.tmp"):  # of records whose writing was killed
        if path.name.startswith(tuple(f".{name}." for name in written)):
            path.unlink()
    for split in SPLITS:
        remove_partial(folder / split)


def partial_quarantine(folder: Path) -> Path:
    """Where bad records are collected until the run is done."""
    return folder / f".{QUARANTINE}.partial"


def inputs_record(files: list[InputFile], checksums: Mapping[str, str]) -> list[dict[str, Any]]:
    """The inputs for a record, with checksums where the files have been read."""
    return [dataclasses.asdict(f) | ({"checksum": checksums[f.path]} if f.path in checksums else {}) for f in files]


def changed_input(recorded: list[dict[str, Any]], files: list[InputFile]) -> str:
    """What differs between recorded inputs and those of now, in words; "" if they are the same.

    A file with another time but the same size is read and judged by its checksum, so that a copied folder is the
    same corpus.
    """
    old = {entry["path"]: entry for entry in recorded}
    if list(old) != [file.path for file in files]:
        added, gone = len({f.path for f in files} - set(old)), len(set(old) - {f.path for f in files})
        return f"{added} files added, {gone} gone"
    for file in files:
        entry = old[file.path]
        if entry["num_bytes"] != file.num_bytes:
            return f"{file.path} has {file.num_bytes} bytes, had {entry['num_bytes']}"
        if entry["mtime_ns"] != file.mtime_ns:
            with InputStream(file.path) as stream:
                if entry.get("checksum") != stream.checksum():
                    return f"{file.path} has changed"
    return ""


def missing_output(folder: Path, outputs: Mapping[str, int]) -> str:
    """The first recorded output (name -> bytes) that is not there in its size; "" if all are."""
    for name, size in outputs.items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != size:
            return name
    return ""
