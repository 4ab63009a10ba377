"""The output folder: whose it is, and what of a finished corpus still holds.

`manifest.json` is the last file of a finished run and says what it was made from; `tokenizer_info.json` says the same
of a trained tokenizer; `stages/` holds the outputs and records of tasks, finished or not. A folder with files but
none of these belongs to someone else and is not touched.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megafp8.core.errors import DataError, ResourceError
from megafp8.core.jsonio import read_json, resource_error, seal_holds
from megafp8.core.log import event, get_logger
from megafp8.corpus.compressed import InputStream
from megafp8.corpus.documents import SPLITS
from megafp8.corpus.readers import InputFile
from megafp8.corpus.storage import place_of

_log = get_logger(__name__)
MANIFEST, TOKENIZER_INFO, STAGES = "manifest.json", "tokenizer_info.json", "stages"
OWNER = f"{STAGES}/megafp8.json"  # says that the stages beside it are ours
TOKENIZER, QUARANTINE, DROPPED = "tokenizer.model", "quarantine.jsonl", "dropped.jsonl.zst"
FIGURES, REPORT = "figures.json", "report.html"


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
    except BlockingIOError:
        os.close(handle)
        raise ResourceError(
            f"{folder}: another process is writing there; wait for it, or choose another folder"
        ) from None
    except OSError as error:  # some network file systems; tasks bear it if they are run twice
        event(_log, "no locks here: see to it that no second run writes there", level=30, folder=folder, because=error)
    try:
        yield
    finally:
        if made:
            with contextlib.suppress(OSError):  # not empty: the usual case
                folder.rmdir()
        os.close(handle)


@contextlib.contextmanager
def refusals(folder: Path) -> Iterator[None]:
    """Turn what the operating system refuses, wherever in a run, into one line.

    Raises:
        ResourceError: disk full, no permission and the like.
    """
    try:
        yield
    except OSError as error:
        raise resource_error(error, Path(error.filename or folder)) from error


def record_at(path: Path) -> dict[str, Any]:
    """A JSON record of ours, or {} if there is none, or it is of another kind or not as it was written."""
    value = _ours(path)
    return value if value and seal_holds(value) else {}


def _ours(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    with contextlib.suppress(DataError):
        value = read_json(path)
        if isinstance(value, dict) and str(value.get("kind", "")).startswith("megafp8"):
            return value
    return {}


def _shown_names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))


def claim(folder: Path) -> None:
    """Make sure that the folder is empty or ours.

    Raises:
        DataError: it holds files that no run of ours wrote.
    """
    names = _shown_names(folder)
    if STAGES in names and not _shown_names(folder / STAGES):  # a run was killed before it could say that it is ours
        names.remove(STAGES)
    if names and not any(_ours(folder / name) for name in (MANIFEST, OWNER, TOKENIZER_INFO)):
        raise DataError(
            f"{folder}: holds {', '.join(names[:3])}{' ...' if len(names) > 3 else ''}, which `megafp8 preprocess` "
            "did not write; choose an empty or new output.folder"
        )


def check_outside(folder: Path, files: Sequence[InputFile]) -> None:
    """Make sure that no input lies in the output folder: a run must not read what the last one wrote.

    Raises:
        DataError: one does.
    """
    inside = os.path.join(os.path.realpath(folder), "")
    for file in files:
        if place_of(file.path).startswith(inside):
            raise DataError(
                f"{file.path}: an input inside output.folder; choose an output.folder out of reach of source.files"
            )


def claim_corpus(folder: Path, files: Sequence[InputFile]) -> None:
    """Make sure that a finished corpus in the folder is about to be renewed, not replaced by another one.

    Raises:
        DataError: it was made from other files, and from none of these.
    """
    theirs = [entry["path"] for entry in record_at(folder / MANIFEST).get("inputs", [])]
    if theirs and files and not {file.path for file in files}.intersection(theirs):
        raise DataError(
            f"{folder}: holds a corpus made from other files ({theirs[0]}{' ...' if len(theirs) > 1 else ''}); choose "
            "another output.folder, or replace it with --output.replace true"
        )


def give_name(source: Path, name: Path) -> None:
    """Let a finished file of ours appear under another name too: the same bytes on disk where links work."""
    temporary = name.with_name(f".{name.name}.{secrets.token_hex(4)}.tmp")
    try:
        try:
            os.link(source, temporary)
        except OSError:  # a file system without hard links
            shutil.copyfile(source, temporary)
        name.unlink(missing_ok=True)
        os.replace(temporary, name)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise resource_error(error, name) from error


def join_files(sources: Sequence[Path], name: Path, empty: bytes = b"") -> None:
    """Files one after the other as one file, which is whole or not there (zstd frames joined are one stream).

    Args:
        empty: the content if there are no files.
    """
    temporary = name.with_name(f".{name.name}.{secrets.token_hex(4)}.tmp")
    try:
        with open(temporary, "wb") as out:
            out.write(b"" if sources else empty)
            for source in sources:
                with open(source, "rb") as file:
                    shutil.copyfileobj(file, out)
            out.flush()
            os.fsync(out.fileno())
        os.replace(temporary, name)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise resource_error(error, name) from error


def remove_stages(folder: Path) -> None:
    """Remove what lies between stages; the note whose they are goes last."""
    for path in (folder / STAGES).iterdir():
        if path.is_dir():
            shutil.rmtree(path)
    shutil.rmtree(folder / STAGES)


def clear_partial(folder: Path) -> None:
    """Remove hidden files that a killed run left: half-written records, and links without their names."""
    written = (MANIFEST, TOKENIZER, TOKENIZER_INFO, QUARANTINE, DROPPED, FIGURES, REPORT)
    names = (*written, *(f"{split}.{suffix}" for split in SPLITS for suffix in ("bin", "idx", "json")))
    for path in folder.glob(".*.tmp"):
        if path.name.startswith(tuple(f".{name}." for name in names)):
            path.unlink()


def inputs_record(files: list[InputFile], checksums: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The inputs for a record, with the checksum of each file, or [start, stop, checksum] of each range of it."""
    return [dataclasses.asdict(file) | {"checksum": checksums[file.path]} for file in files]


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
        if entry["mtime_ns"] == file.mtime_ns:
            continue
        found = entry["checksum"]
        for start, stop, checksum in [(0, 0, found)] if isinstance(found, str) else found:
            with InputStream(file.path, start=start, stop=stop) as stream:
                if stream.checksum() != checksum:
                    return f"{file.path} has changed"
    return ""


def missing_output(folder: Path, outputs: Mapping[str, int]) -> str:
    """The first recorded output (name -> bytes) that is not there in its size; "" if all are."""
    for name, size in outputs.items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != size:
            return name
    return ""
