"""Kept documents -> token ids, by split: `SPLIT.ids` (all ids, each document ended) and `SPLIT.lengths` (int32).

Documents come from a part, or, where nothing is between reading and tokenizing, right from an input shard: then what
`megafp8.corpus.intake` writes and counts is this task's too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import lru_cache
from typing import Any

import numpy as np

from megafp8.core.config import build
from megafp8.core.errors import DataError, is_fault
from megafp8.core.log import event, get_logger
from megafp8.corpus.config import SplitConfig
from megafp8.corpus.documents import SPLITS, Document, split_of
from megafp8.corpus.figures import Figures, kept_lengths, name_in
from megafp8.corpus.intake import Intake
from megafp8.corpus.parts import read_view
from megafp8.corpus.tasks import Work
from megafp8.data.indexed_writer import as_ids
from megafp8.data.marks import Marks
from megafp8.data.tokenizer import Tokenizer, load_tokenizer
from megafp8.data.tokenizer_engine import EngineMismatchError, FastTokenizer, encode_documents, fast

_log = get_logger(__name__)
VERSION = 2
_BATCH_CHARACTERS = 1 << 20
_BATCH_DOCUMENTS = 1024


@lru_cache(maxsize=2)
def task_tokenizer(spec: str, fingerprint: str) -> Tokenizer:
    """The tokenizer of a task, with its faster encoder where there is one.

    Raises:
        DataError: it is not the one that the task was made for.
    """
    tokenizer = load_tokenizer(spec)
    if tokenizer.fingerprint != fingerprint:
        raise DataError(f"{spec}: changed while the corpus was being tokenized; run the same command again")
    return fast(tokenizer)


def run(work: Work) -> dict[str, Any]:
    """`splits`: documents, tokens, text_bytes, languages, sources of each; `encoder`: what made the ids; of a task
    that reads a shard also `Intake.counts`."""
    tokenizer = task_tokenizer(work.hints["tokenizer"], work.values["tokenizer"])
    if isinstance(tokenizer, FastTokenizer):
        try:
            return _encode(work, tokenizer) | {"encoder": tokenizer.engine_name}
        except EngineMismatchError as error:  # all of the task again: its bytes depend on its documents only
            event(_log, "encoding by the reference", level=30, task=work.task.name, because=error)
            tokenizer = tokenizer.reference
    return _encode(work, tokenizer) | {"encoder": tokenizer.kind}


def _encode(work: Work, tokenizer: Tokenizer) -> dict[str, Any]:
    values = work.values
    split_config, dtype = build(SplitConfig, values["split"]), np.dtype(values["dtype"])
    intake = Intake(work) if "source" in values else None
    documents = intake.documents() if intake else ((document, held_out) for _, document, held_out in read_view(work))
    with ExitStack() as stack:
        parts = {name: _SplitWriter(work, name, dtype, stack) for name in SPLITS}
        for batch in _batches(documents):
            for name in SPLITS:
                found = [
                    document
                    for document, held_out in batch
                    if ("valid" if held_out else split_of(document.utf8, split_config)) == name
                ]
                if found:
                    parts[name].add(found, tokenizer)
            sums = {key: sum(getattr(p, key) for p in parts.values()) for key in ("documents", "text_bytes", "tokens")}
            work.report(**(sums if intake else {"done_bytes": sums["text_bytes"], **sums}))
    counts = {"splits": {name: part.counts() for name, part in parts.items()}}
    return {**intake.counts(), **counts} if intake else counts


def _batches(documents: Iterable[tuple[Document, bool]]) -> Iterator[list[tuple[Document, bool]]]:
    batch: list[tuple[Document, bool]] = []
    size = 0
    for document, held_out in documents:
        batch.append((document, held_out))
        size += len(document.text)
        if size >= _BATCH_CHARACTERS or len(batch) >= _BATCH_DOCUMENTS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _encoded(tokenizer: Tokenizer, documents: Sequence[Document], marks: Marks) -> tuple[np.ndarray, np.ndarray]:
    """Ids as `encode_documents` gives them.

    Raises:
        DataError: the tokenizer fails on a document, which is named.
    """
    try:
        return encode_documents(tokenizer, [document.text for document in documents], marks)
    except EngineMismatchError:
        raise
    except BaseException as error:
        if not is_fault(error):
            raise
        name_failing(tokenizer, documents)
        raise


def name_failing(tokenizer: Tokenizer, documents: Iterable[Document]) -> None:
    """Find the document on which a tokenizer fails.

    Raises:
        DataError: with its name.
    """
    for document in documents:
        try:
            encode_documents(tokenizer, [document.text])
        except BaseException as error:
            if not is_fault(error):
                raise
            raise DataError(
                f"document {document.id!r} of {document.source}: the tokenizer fails on it "
                f"({type(error).__name__}: {error}); take it out of the input, or use another tokenizer"
            ) from error


class _SplitWriter:
    """What a task adds to one split."""

    def __init__(self, work: Work, name: str, dtype: np.dtype, stack: ExitStack) -> None:
        self._ids = stack.enter_context(open(work.output(f"{name}.ids"), "wb"))  # noqa: SIM115
        self._lengths = stack.enter_context(open(work.output(f"{name}.lengths"), "wb"))  # noqa: SIM115
        self._dtype = dtype
        self._marks = Marks.of(work.values)
        self.documents = self.text_bytes = self.tokens = 0
        self._languages: Counter[str] = Counter()
        self._sources: Counter[str] = Counter()
        self.figures = Figures()

    def add(self, documents: list[Document], tokenizer: Tokenizer) -> None:
        found, lengths = _encoded(tokenizer, documents, self._marks)
        ids = as_ids(found, self._dtype)
        self._ids.write(ids.tobytes())
        self._lengths.write(as_ids(lengths, np.dtype("<i4")).tobytes())
        self.documents += len(documents)
        self.tokens += len(ids)
        self.text_bytes += sum(document.num_bytes for document in documents)
        self.figures.add(kept_lengths(documents, np.asarray(lengths)))
        for counter, names in (
            (self._languages, [document.language for document in documents]),
            (self._sources, [document.source for document in documents]),
        ):
            add_names(counter, Counter(names))

    def counts(self) -> dict[str, Any]:
        return {
            "documents": self.documents,
            "tokens": self.tokens,
            "text_bytes": self.text_bytes,
            "languages": dict(self._languages),
            "sources": dict(self._sources),
            "figures": self.figures.to_json(),
        }


def add_names(counter: Counter[str], more: Counter[str] | dict[str, int]) -> None:
    """Add counts by name; what comes after the first 1,000 names is counted together."""
    for name, count in sorted(more.items()):
        counter[name_in(counter, name)] += count
