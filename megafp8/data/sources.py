"""From the configuration to sample streams: opens datasets, and refuses those that another tokenizer wrote."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

from megafp8.core.errors import DataError
from megafp8.core.jsonio import read_json
from megafp8.data.blend import Blend
from megafp8.data.config import DatasetConfig
from megafp8.data.indexed import IndexedDataset
from megafp8.data.marks import ENDS_ONLY, Marks
from megafp8.data.samples import SampleStream
from megafp8.data.tokenizer import Tokenizer, load_tokenizer


def check_tokenizer(dataset: IndexedDataset, tokenizer: Tokenizer) -> None:
    """Raise DataError if the side file names another tokenizer; a set without a side file passes (Megatron's own)."""
    written = dataset.side.get("tokenizer")
    if written and written.get("fingerprint") != tokenizer.fingerprint:
        raise DataError(
            f"{dataset.path_prefix}: written with tokenizer {written.get('kind')} "
            f"{written.get('fingerprint', '')[:12]} of {written.get('vocab_size')} ids, but data.tokenizer is "
            f"{tokenizer.kind} {tokenizer.fingerprint[:12]} of {tokenizer.vocab_size}; name the one it was written with"
        )


def check_marks(datasets: Sequence[IndexedDataset]) -> Marks:
    """How the documents of datasets are marked; sets without a side file (Megatron's own) are taken to fit.

    Raises:
        DataError: not all alike.
    """
    known = [(dataset, Marks.of(dataset.side["tokenizer"])) for dataset in datasets if dataset.side.get("tokenizer")]
    for dataset, marks in known[1:]:
        if marks != known[0][1]:
            raise DataError(
                f"{dataset.path_prefix}: its documents are written as {marks}, those of {known[0][0].path_prefix} as "
                f"{known[0][1]}; make one of them again with the other's tokenizer.add_bos and append_eos"
            )
    return known[0][1] if known else ENDS_ONLY


def find_tokenizer(dataset: IndexedDataset, depth: int = 4) -> str:
    """Where the tokenizer of a dataset lies, as `load_tokenizer` takes it; "" if it is not found.

    Looked for are `tokenizer.model` and `tokenizer.json` beside it, what the manifest of its corpus names, and the same
    for the datasets that it was merged or split from. Only one with the recorded fingerprint will do.
    """
    written = dataset.side.get("tokenizer") or {}
    if written.get("kind") == "bytes":
        return "bytes"
    folder = dataset.path_prefix.parent
    named = [folder / "tokenizer.model", folder / "tokenizer.json"]
    with contextlib.suppress(DataError, KeyError, TypeError, AttributeError):
        if path := read_json(folder / "manifest.json")["config"]["tokenizer"]["path"]:
            named.append(Path(path))
    for path in named:
        with contextlib.suppress(DataError):
            if written and path.exists() and load_tokenizer(path).fingerprint == written.get("fingerprint"):
                return str(path)
    origin = dataset.side.get("split_from")
    for record in [*([origin] if origin else []), *dataset.side.get("merged_from", [])] if depth else []:
        with contextlib.suppress(DataError):
            if found := find_tokenizer(IndexedDataset(record["path"]), depth - 1):
                return found
    return ""


def open_stream(path: str, *, tokenizer: Tokenizer, sequence_length: int, seed: int) -> SampleStream:
    """The samples of one dataset, in an order of its own (the seed is mixed with nothing but the epoch)."""
    dataset = IndexedDataset(path)
    check_tokenizer(dataset, tokenizer)
    return SampleStream(dataset, sequence_length, seed)


def open_blend(datasets: Sequence[DatasetConfig], *, tokenizer: Tokenizer, sequence_length: int, seed: int) -> Blend:
    """All datasets as one stream, by weight.

    Raises:
        DataError: a dataset is missing, damaged, too short, or of another tokenizer.
    """
    streams = [open_stream(d.path, tokenizer=tokenizer, sequence_length=sequence_length, seed=seed) for d in datasets]
    return Blend(streams, [d.weight for d in datasets], seed)
