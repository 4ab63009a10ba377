"""Documents to token ids, in worker processes, with the same bytes for any number of them.

The unit of work is a batch of records whose bounds depend on the records alone. Batches are handed out and taken
back in order, a bounded number at a time, so that memory does not grow with the corpus. A worker parses, splits and
encodes; only the parent writes. A worker that dies fails the run (no hang), and one whose parent dies ends itself.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice

import numpy as np

from megafp8.core.errors import DataError, ResourceError
from megafp8.corpus.config import SourceConfig, SplitConfig
from megafp8.corpus.documents import Bad, Document, Record, is_wanted, parse, split_of
from megafp8.data.tokenizer import Tokenizer, load_tokenizer

_BATCH_BYTES = 1 << 20
_BATCH_RECORDS = 1024
_AHEAD = 3  # batches in flight for each worker: one worked on, one waiting, one on its way back


@dataclass(frozen=True)
class Job:
    """All that a worker needs to know.

    Attributes:
        tokenizer: the spec to load.
        fingerprint: of the tokenizer; a process that meets another one under the same path loads it anew.
    """

    tokenizer: str
    fingerprint: str
    dtype: str
    source: SourceConfig
    split: SplitConfig


@dataclass
class SplitPart:
    """What a batch adds to one split.

    Attributes:
        ids: ids of all documents one after the other, each ended by the end-of-document id.
        lengths: int32 [documents], tokens of each.
    """

    ids: np.ndarray
    lengths: np.ndarray
    text_bytes: int = 0
    languages: Counter[str] = field(default_factory=Counter)
    sources: Counter[str] = field(default_factory=Counter)


@dataclass
class Encoded:
    """The result of a batch."""

    parts: dict[str, SplitPart]
    bad: list[Bad]
    num_records: int
    num_empty: int
    num_other_language: int


def batches(records: Iterator[Record]) -> Iterator[list[Record]]:
    """Records in lists of about 1 MB or 1,024 records; bounds do not depend on workers or on a resume."""
    batch: list[Record] = []
    size = 0
    for record in records:
        batch.append(record)
        size += record.num_bytes
        if size >= _BATCH_BYTES or len(batch) >= _BATCH_RECORDS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


@lru_cache(maxsize=2)
def _tokenizer(spec: str, fingerprint: str) -> Tokenizer:
    tokenizer = load_tokenizer(spec)
    if tokenizer.fingerprint != fingerprint:
        raise DataError(f"{spec}: changed while the corpus was being tokenized; run the same command again")
    return tokenizer


def encode_batch(job: Job, batch: list[Record]) -> Encoded:
    """Parse, split and encode the records of a batch, in order."""
    documents: dict[str, list[Document]] = {"train": [], "valid": []}
    bad: list[Bad] = []
    records = empty = other = 0
    for record in batch:
        document = parse(record, job.source)
        records += document is not None
        if isinstance(document, Bad):
            bad.append(document)
        elif document is not None and document.is_empty:
            empty += 1
        elif document is not None and not is_wanted(document, job.source):
            other += 1
        elif document is not None:
            documents["valid" if record.held_out else split_of(document.text, job.split)].append(document)
    tokenizer = _tokenizer(job.tokenizer, job.fingerprint)
    parts = {split: _encode(found, tokenizer, np.dtype(job.dtype)) for split, found in documents.items() if found}
    return Encoded(parts, bad, records, empty, other)


def _encode(documents: list[Document], tokenizer: Tokenizer, dtype: np.dtype) -> SplitPart:
    encoded = tokenizer.encode_batch([document.text for document in documents])
    flat: list[int] = []
    for ids in encoded:
        flat += ids
        flat.append(tokenizer.eod_id)
    return SplitPart(
        np.asarray(flat, np.int64).astype(dtype),  # dtype was chosen by the vocabulary, so that nothing wraps
        np.asarray([len(ids) + 1 for ids in encoded], np.int32),
        sum(len(document.text.encode("utf-8")) for document in documents),
        Counter(document.language for document in documents),
        Counter(document.source for document in documents),
    )


def encode_all(job: Job, source_batches: Iterator[list[Record]], num_workers: int) -> Iterator[Encoded]:
    """Results of all batches, in order.

    Raises:
        ResourceError: a worker process died.
    """
    if num_workers == 1:
        for batch in source_batches:
            yield encode_batch(job, batch)
        return
    pool = ProcessPoolExecutor(num_workers, mp_context=multiprocessing.get_context("spawn"), initializer=_start_worker)
    waiting: deque[Future[Encoded]] = deque()
    try:
        for batch in source_batches:
            waiting.append(pool.submit(encode_batch, job, batch))
            if len(waiting) >= _AHEAD * num_workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool:
        raise ResourceError(
            f"one of {num_workers} worker processes died (out of memory, or killed); run the same command again, "
            "with a lower --output.workers if memory was short"
        ) from None
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _start_worker() -> None:
    """Ctrl-C is the parent's business; a parent that was killed must not leave workers waiting for ever."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=_exit_with, args=(parent.sentinel,), daemon=True).start()


def _exit_with(sentinel: int) -> None:
    multiprocessing.connection.wait([sentinel])
    os._exit(1)


def skip(source_batches: Iterator[list[Record]], count: int) -> Iterator[list[Record]]:
    """What is left after `count` batches that a run before this one has done; they are read, not encoded."""
    return islice(source_batches, count, None)
