"""Checks and figures of a dataset that read every byte: what opening it does not do, for it must be instant."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megafp8.core.errors import DataError
from megafp8.core.jsonio import read_json, seal_holds
from megafp8.data.indexed import IndexedDataset
from megafp8.data.indexed_writer import checksum_file
from megafp8.data.marks import Marks

_CHUNK = 1 << 20  # tokens or entries looked at together


@dataclass(frozen=True)
class Stats:
    """Figures of a dataset.

    Attributes:
        counts: int64 [vocabulary], how often each id occurs.
        lengths: tokens of the shortest, the 10 %, 50 %, 90 % and the longest sequence.
    """

    num_documents: int
    num_sequences: int
    num_tokens: int
    counts: np.ndarray
    lengths: tuple[int, ...]

    @property
    def unigram_entropy_nats(self) -> float:
        """Entropy of the ids' frequencies: the loss of a model that knows nothing but them."""
        return unigram_entropy_nats(self.counts)


def unigram_entropy_nats(counts: np.ndarray) -> float:
    """-sum p ln p over the nonzero counts, nats per token."""
    shares = counts[counts > 0] / max(int(counts.sum()), 1)
    return float(-(shares * np.log(shares)).sum())


def count_ids(dataset: IndexedDataset, *, vocab_size: int = 0) -> np.ndarray:
    """How often each id occurs: int64 [max(vocab_size, largest id + 1)]; ids below 0 must not occur."""
    counts = np.zeros(vocab_size, np.int64)
    for start in range(0, dataset.num_tokens, _CHUNK):
        ids = dataset.tokens(start, min(start + _CHUNK, dataset.num_tokens))
        part = np.bincount(ids, minlength=len(counts))
        dataset.release()
        counts = np.pad(counts, (0, len(part) - len(counts))) + part
    return counts


def stats(dataset: IndexedDataset) -> Stats:
    """Read all tokens once and count."""
    lengths = np.asarray(dataset.sequence_lengths)
    marks = np.percentile(lengths, [0, 10, 50, 90, 100], method="nearest") if len(lengths) else np.zeros(5)
    return Stats(
        dataset.num_documents,
        len(dataset),
        dataset.num_tokens,
        count_ids(dataset),
        tuple(int(mark) for mark in marks),
    )


def problems(dataset: IndexedDataset) -> list[str]:
    """All that is wrong with an opened dataset, a line each; empty if every check holds."""
    return [*_index_problems(dataset), *_side_problems(dataset)]


def folder_problems(folder: Path) -> list[str]:
    """What has changed of a corpus's manifest, and of the files that it names beside the datasets, a line each.

    A folder without a manifest, or with one of a version that had no checksums, has no problems.
    """
    path = folder / "manifest.json"
    if not path.is_file():
        return []
    try:
        manifest = read_json(path)
    except DataError as error:
        return [str(error)]
    if not isinstance(manifest, dict) or not {"checksum", "checksums"} & manifest.keys():
        return []
    if not seal_holds(manifest):
        return [f"{path}: damaged: it does not match its checksum; run the same `megafp8 preprocess` again"]
    found = []
    for name, written in manifest["checksums"].items():
        if Path(name).name != name or not (folder / name).is_file():
            found.append(f"{folder / name}: is missing; run the same `megafp8 preprocess` again")
        elif checksum_file(folder / name) != written:
            found.append(f"{folder / name}: its bytes have changed; run the same `megafp8 preprocess` again")
    return found


def _index_problems(dataset: IndexedDataset) -> Iterator[str]:
    size, expected = dataset.dtype.itemsize, 0
    for start in range(0, len(dataset), _CHUNK):
        lengths = dataset.sequence_lengths[start : start + _CHUNK].astype(np.int64)
        offsets = dataset.sequence_offsets[start : start + _CHUNK]
        ends = expected + np.cumsum(lengths) * size
        wrong = (offsets != ends - lengths * size) | (lengths < 0)
        if wrong.any():
            index = start + int(np.argmax(wrong))
            yield f"{dataset.idx_path}: sequence {index} does not begin where sequence {index - 1} ends"
            return
        expected = int(ends[-1])
        dataset.release()
    for start in range(0, dataset.num_documents, _CHUNK):
        steps = np.diff(dataset.document_index[start : start + _CHUNK + 1])
        dataset.release()
        if (steps < 0).any():
            yield f"{dataset.idx_path}: document {start + int(np.argmax(steps < 0)) + 1} begins before the one before"
            return


def _side_problems(dataset: IndexedDataset) -> Iterator[str]:
    side = dataset.side
    if not side:
        return
    for suffix, written in side.get("checksums", {}).items():
        path = {"bin": dataset.bin_path, "idx": dataset.idx_path}[suffix]
        found = checksum_file(path)
        if found != written:
            yield f"{path}: checksum {found}, written was {written}; bytes have changed, make the dataset again"
    for key, found_count in (("num_documents", dataset.num_documents), ("num_sequences", len(dataset))):
        if side.get(key, found_count) != found_count:
            yield f"{dataset.idx_path}: {found_count} {key[4:]}, the side file says {side[key]}"
    yield from _id_problems(dataset, side.get("tokenizer") or {})


def _id_problems(dataset: IndexedDataset, tokenizer: dict[str, Any]) -> Iterator[str]:
    if not tokenizer or dataset.dtype.kind not in "iu":
        return
    if not {"vocab_size", "eod_id"} <= tokenizer.keys():
        yield f"{dataset.path_prefix}.json: its tokenizer lacks vocab_size or eod_id; make the dataset again"
        return
    vocab_size, eod_id = int(tokenizer["vocab_size"]), int(tokenizer["eod_id"])
    marks, ends, begun = Marks.of(tokenizer), 0, 0
    for start in range(0, dataset.num_tokens, _CHUNK):
        ids = dataset.tokens(start, min(start + _CHUNK, dataset.num_tokens))
        ends += int(np.count_nonzero(ids == eod_id))
        begun += int(np.count_nonzero(ids == tokenizer.get("bos_id", -1)))
        wrong = (ids < 0) | (ids >= vocab_size)
        dataset.release()
        if wrong.any():
            at = int(np.argmax(wrong))
            yield f"{dataset.bin_path}: id {ids[at]} at token {start + at}, outside of {vocab_size} ids"
            return
    if marks.append_eos and ends != dataset.num_documents:
        yield (
            f"{dataset.bin_path}: {ends} end-of-document ids in {dataset.num_documents} documents; "
            "each document has to end with one"
        )
    if marks.add_bos and begun != dataset.num_documents:
        yield (
            f"{dataset.bin_path}: {begun} begin ids in {dataset.num_documents} documents; "
            "each document has to begin with one"
        )
