"""Pieces of all parts -> one split's `.bin`, `.idx` and `.json`, in the order of the input."""

from __future__ import annotations

from typing import Any

import numpy as np

from megafp8.corpus.tasks import Work
from megafp8.data.indexed_writer import IndexedDatasetWriter
from megafp8.data.verify import unigram_entropy_nats

VERSION = 1
_CHUNK = 1 << 21  # tokens looked at together, or one document if it has more


def run(work: Work) -> dict[str, Any]:
    """`unigram_entropy_nats` of the split; inputs are ids and lengths of each piece in turn."""
    values = work.values
    dtype = np.dtype(values["dtype"])
    counts = np.zeros(values["vocab_size"], np.int64)
    done = 0
    with IndexedDatasetWriter(work.output(values["split"]), dtype, metadata=values["metadata"]) as writer:
        for number in range(0, len(work.inputs), 2):
            ids_path, lengths = work.checked(number), np.fromfile(work.checked(number + 1), "<i4")
            with open(ids_path, "rb") as file:
                for some in np.split(lengths, _cuts(lengths)):
                    data = file.read(int(some.sum(dtype=np.int64)) * dtype.itemsize)
                    ids = np.frombuffer(data, dtype)
                    writer.add_documents(ids, some)
                    counts += np.bincount(ids, minlength=len(counts))
                    done += len(data)
                    work.report(done_bytes=done, documents=writer.num_documents, tokens=writer.num_tokens)
        entropy = round(unigram_entropy_nats(counts), 6)
        writer.metadata["unigram_entropy_nats"] = entropy
    return {"unigram_entropy_nats": entropy}


def _cuts(lengths: np.ndarray) -> np.ndarray:
    """Where to cut documents into runs of about `_CHUNK` tokens."""
    chunks = np.cumsum(lengths, dtype=np.int64) // _CHUNK
    return np.flatnonzero(np.diff(chunks)) + 1
