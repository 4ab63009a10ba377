"""Pieces of all parts -> one split's `.bin`, `.idx` and `.json`, in the order of the input, or shuffled.

Documents are dealt to places by `megafp8.corpus.shuffle`; memory is bounded either way.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from megafp8.corpus.shuffle import Shuffle, runs_of, shuffle_keys
from megafp8.corpus.tasks import Work
from megafp8.data.indexed_writer import IndexedDatasetWriter
from megafp8.data.verify import unigram_entropy_nats

VERSION = 1


def run(work: Work) -> dict[str, Any]:
    """`unigram_entropy_nats` of the split; inputs are ids and lengths of each piece in turn."""
    values = work.values
    dtype = np.dtype(values["dtype"])
    counts = np.zeros(values["vocab_size"], np.int64)
    pieces = _pieces(work, dtype)
    if "shuffle_seed" in values:
        pieces = _shuffled(work, dtype, pieces)
    with IndexedDatasetWriter(work.output(values["split"]), dtype, metadata=values["metadata"]) as writer:
        for ids, lengths in pieces:
            writer.add_documents(ids, lengths)
            counts += np.bincount(ids, minlength=len(counts))
            done = writer.num_tokens * dtype.itemsize
            work.report(done_bytes=done, documents=writer.num_documents, tokens=writer.num_tokens)
        entropy = round(unigram_entropy_nats(counts), 6)
        writer.metadata["unigram_entropy_nats"] = entropy
    return {"unigram_entropy_nats": entropy}


def _pieces(work: Work, dtype: np.dtype) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(ids, lengths) of runs of documents, in the order of the input."""
    for number in range(0, len(work.inputs), 2):
        ids_path, lengths = work.checked(number), np.fromfile(work.checked(number + 1), "<i4")
        with open(ids_path, "rb") as file:
            for some in runs_of(lengths):
                size = int(lengths[some].sum(dtype=np.int64)) * dtype.itemsize
                yield np.frombuffer(file.read(size), dtype), lengths[some]


def _shuffled(
    work: Work, dtype: np.dtype, pieces: Iterator[tuple[np.ndarray, np.ndarray]]
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    documents = sum(one.num_bytes for one in work.inputs[1::2]) // 4
    num_bytes = sum(one.num_bytes for one in work.inputs[::2])
    keys = shuffle_keys(work.values["shuffle_seed"], work.values["split"])
    shuffle = Shuffle(work.output("shuffle"), documents, num_bytes, dtype, keys, work.hints["memory_bytes"])
    for ids, lengths in pieces:
        shuffle.add(ids, lengths)
    yield from shuffle.ordered()
