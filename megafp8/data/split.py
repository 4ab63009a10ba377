"""A dataset as several, document by document, by a hash of each document's ids.

Every document has a place in [0, 2^64), the hash of its ids under a seed; each output takes the next stretch of it. So
equal documents go together, which documents an output gets does not depend on their order, and a share is the same
documents when the dataset grows. A number of documents or tokens takes documents in the order of their places until
the next would be too much. Places are spooled to disk, 8 bytes a document: memory does not grow with their number, only
with the longest document.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from megafp8.core.errors import ConfigError, DataError
from megafp8.core.jsonio import resource_error
from megafp8.data.indexed import IndexedDataset
from megafp8.data.indexed_writer import IndexedDatasetWriter
from megafp8.data.merge import IdCounter, source_record
from megafp8.data.output_lock import check_output, output_lock
from megafp8.data.verify import problems

_END = 1 << 64
_CHUNK_TOKENS, _CHUNK_DOCUMENTS = 1 << 22, 1 << 17
_BUCKETS = 1 << 16
_FEW = 1 << 20  # places sorted at once
_AMOUNT = re.compile(r"([0-9][0-9_]*(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?)(%|docs|tokens)")


@dataclass(frozen=True)
class Amount:
    """How much an output gets: `unit` "%" of all documents, "docs", "tokens", or "rest"."""

    unit: str
    value: float = 0.0

    def __str__(self) -> str:
        """As it is written."""
        if self.unit == "rest":
            return "rest"
        return f"{self.value:,.10g}{'' if self.unit == '%' else ' '}{self.unit}"


def parse_amount(text: str) -> Amount:
    """`2%`, `5000docs`, `1e9tokens` or `rest`.

    Raises:
        ConfigError: none of these, or nothing at all.
    """
    if text == "rest":
        return Amount("rest")
    match = _AMOUNT.fullmatch(text)
    if not match:
        raise ConfigError(f"{text!r} is no amount; write 2%, 5000docs, 1e9tokens or rest")
    value, unit = float(match[1].replace("_", "")), match[2]
    if not 0 < value < math.inf or (unit == "%" and value > 100):
        raise ConfigError(f"{text}: has to be above 0{' and at most 100%' if unit == '%' else ''}")
    return Amount(unit, value)


def split(
    source: Path | str,
    parts: Mapping[str, Amount],
    *,
    seed: int = 1234,
    overwrite: bool = False,
    report: Callable[[int], None] | None = None,
) -> tuple[dict[str, IndexedDataset], int]:
    """Write parts of `source`, each {path prefix: amount}; the datasets, and how many documents are in none of them.

    Args:
        seed: of the hash; another one gives other documents.
        report: called with the tokens that have been looked at.

    Raises:
        ConfigError: shares of more than 100 % together; two parts that take the rest, or of one name.
        DataError: `source` is missing or damaged; more is asked for than there is; a part would be empty, or exists.
        ResourceError: disk full, no permission, a part is being written by another process.
    """
    _check_parts(parts)
    dataset = IndexedDataset(source)
    outs = [Path(name) for name in parts]
    for out in outs:
        check_output(out, [dataset], overwrite=overwrite)
    if found := problems(dataset):
        raise DataError("\n".join(found))
    with contextlib.ExitStack() as stack:
        for out in outs:
            stack.enter_context(output_lock(out))
        places = _Places(dataset, seed, outs[0].with_name(f".{outs[0].name}.places.partial"))
        stack.callback(places.remove)
        places.fill()
        ends, order = _ends(places, parts)
        missing = _write(dataset, places, ends, [outs[i] for i in order], seed, report)
    return {str(out): IndexedDataset(out) for out in outs}, missing


def _check_parts(parts: Mapping[str, Amount]) -> None:
    names = [str(Path(name).resolve()) for name in parts]
    if len(set(names)) < len(names) or not names:
        raise ConfigError("name at least one part, and each once: OUT=AMOUNT")
    shares = sum(amount.value for amount in parts.values() if amount.unit == "%")
    if shares > 100:
        raise ConfigError(f"shares add up to {shares:g}%, which is more than all; make them smaller")
    if sum(amount.unit == "rest" for amount in parts.values()) > 1:
        raise ConfigError("two parts take the rest; name it once")


class _Places:
    """The place of each document: uint64 [documents] on disk."""

    def __init__(self, dataset: IndexedDataset, seed: int, path: Path) -> None:
        self.dataset, self._seed, self._path = dataset, seed, path

    def fill(self) -> None:
        try:
            with open(self._path, "wb") as file:
                for first, after, ids, ends in _documents(self.dataset):
                    data, size = memoryview(ids.tobytes()), ids.dtype.itemsize
                    found, start = np.empty(after - first, "<u8"), 0
                    for number, end in enumerate((ends * size).tolist()):
                        found[number] = xxhash.xxh3_64_intdigest(data[start:end], seed=self._seed)
                        start = end
                    file.write(found.tobytes())
        except OSError as error:
            raise resource_error(error, self._path) from error

    def of(self, first: int, after: int) -> np.ndarray:
        """Those of documents [first, after)."""
        return np.fromfile(self._path, "<u8", after - first, offset=8 * first)

    def chunks(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """(places, tokens) of documents, a chunk at a time."""
        total = self.dataset.num_documents
        for start in range(0, total, _FEW):
            stop = min(start + _FEW, total)
            yield self.of(start, stop), np.diff(_token_bounds(self.dataset, start, stop))
            self.dataset.release()

    def remove(self) -> None:
        self._path.unlink(missing_ok=True)

    def end_of(self, begin: int, amount: Amount) -> int:
        """Where a stretch from `begin` ends that holds as many documents or tokens as fit into `amount`."""
        by_tokens, wanted, low, high = amount.unit == "tokens", int(amount.value), begin, _END
        while True:
            width = -(-(high - low) // _BUCKETS)
            sums, documents = np.zeros(_BUCKETS, np.int64), np.zeros(_BUCKETS, np.int64)
            for places, tokens in self.chunks():
                mine = (places >= np.uint64(low)) & (places <= np.uint64(high - 1))
                bucket = ((places[mine] - np.uint64(low)) // np.uint64(width)).astype(np.int64)
                weights = tokens[mine] if by_tokens else np.ones(len(bucket), np.int64)
                np.add.at(sums, bucket, weights)
                np.add.at(documents, bucket, 1)
            whole = int(np.searchsorted(np.cumsum(sums), wanted, side="right"))  # buckets that fit as a whole
            if whole == _BUCKETS:
                return high
            wanted -= int(sums[:whole].sum())
            low, high = low + whole * width, min(low + (whole + 1) * width, high)
            if documents[whole] <= _FEW or width == 1:
                return self._end_within(low, high, wanted, by_tokens)

    def _end_within(self, low: int, high: int, wanted: int, by_tokens: bool) -> int:
        """The same where few documents lie between, or all on one place."""
        sums: dict[int, int] = {}
        for places, tokens in self.chunks():
            for at in np.flatnonzero((places >= np.uint64(low)) & (places <= np.uint64(high - 1))).tolist():
                place = int(places[at])
                sums[place] = sums.get(place, 0) + (int(tokens[at]) if by_tokens else 1)
        for place in sorted(sums):
            wanted -= sums[place]
            if wanted < 0:
                return place
        return high


def _ends(places: _Places, parts: Mapping[str, Amount]) -> tuple[list[int], list[int]]:
    """Where the stretch of each part ends, and the numbers of the parts in the order of their stretches."""
    amounts = list(parts.values())
    order = sorted(range(len(amounts)), key=lambda i: amounts[i].unit == "rest")
    dataset, ends, at = places.dataset, list[int](), 0
    have = {"docs": dataset.num_documents, "tokens": dataset.num_tokens}
    for number in order:
        amount = amounts[number]
        if amount.unit in have and amount.value > have[amount.unit]:
            raise DataError(
                f"{dataset.path_prefix}: {amount} asked for, but there are {have[amount.unit]:,}; ask for less, or rest"
            )
        if amount.unit == "rest":
            at = _END
        elif amount.unit == "%":
            at = min(at + round(amount.value / 100 * _END), _END)
        else:
            at = places.end_of(at, amount) if at < _END else at
        ends.append(at)
    return ends, order


def _write(
    dataset: IndexedDataset,
    places: _Places,
    ends: Sequence[int],
    outs: Sequence[Path],
    seed: int,
    report: Callable[[int], None] | None,
) -> int:
    tokenizer = dataset.side.get("tokenizer") or {}
    metadata: dict[str, Any] = {"tokenizer": tokenizer} if tokenizer else {}
    metadata["split_from"] = source_record(dataset) | {"seed": seed}
    missing = done = 0
    with contextlib.ExitStack() as stack:
        writers = [stack.enter_context(IndexedDatasetWriter(out, dataset.dtype, metadata=metadata)) for out in outs]
        counters = [IdCounter(tokenizer, out) for out in outs]
        for first, after, ids, token_ends in _documents(dataset):
            values = places.of(first, after)
            goes_to = np.zeros(len(values), np.int64)
            for end in ends:
                if end < _END:
                    goes_to += values >= np.uint64(end)
            missing += int((goes_to == len(ends)).sum())
            bounds = dataset.document_index[first : after + 1].astype(np.int64)
            lengths = np.array(dataset.sequence_lengths[bounds[0] : bounds[-1]], np.int64)
            sequences, tokens = np.diff(bounds), np.diff(token_ends, prepend=0)
            for number, writer in enumerate(writers):
                mine = goes_to == number
                if mine.any():
                    some = ids[np.repeat(mine, tokens)]
                    starts = np.cumsum(sequences[mine]) - sequences[mine]
                    writer.add_sequences(some, lengths[np.repeat(mine, sequences)], starts)
                    counters[number].add(some, dataset)
            done += len(ids)
            if report is not None:
                report(done)
        for writer, counter in zip(writers, counters):
            if not writer.num_documents:
                raise DataError(
                    f"{writer.path_prefix}: would hold none of the {dataset.num_documents:,} documents of "
                    f"{dataset.path_prefix}; give it more, or another --seed"
                )
            writer.metadata["unigram_entropy_nats"] = counter.entropy_nats
    return missing


def _token_bounds(dataset: IndexedDataset, first: int, after: int) -> np.ndarray:
    """Token at which each of documents [first, after) begins, and the one behind: int64 [after - first + 1]."""
    bounds = np.asarray(dataset.document_index[first : after + 1], np.int64)
    inside = bounds < len(dataset)
    found = np.full(len(bounds), dataset.num_tokens, np.int64)
    found[inside] = dataset.sequence_offsets[bounds[inside]] // dataset.dtype.itemsize
    return found


def _runs(dataset: IndexedDataset) -> Iterator[tuple[int, int]]:
    """Documents [first, after) of about 4 Mi tokens, or one."""
    for start in range(0, dataset.num_documents, _CHUNK_DOCUMENTS):
        stop = min(start + _CHUNK_DOCUMENTS, dataset.num_documents)
        bounds = _token_bounds(dataset, start, stop)
        at = 0
        while start + at < stop:
            size = int(np.searchsorted(bounds, bounds[at] + _CHUNK_TOKENS, side="right")) - 1
            after = max(size, at + 1)
            yield start + at, start + after
            at = after


def _documents(dataset: IndexedDataset) -> Iterator[tuple[int, int, np.ndarray, np.ndarray]]:
    """(first, after, ids, end of each document among them) of runs of documents."""
    for first, after in _runs(dataset):
        bounds = _token_bounds(dataset, first, after)
        yield first, after, dataset.tokens(int(bounds[0]), int(bounds[-1])), bounds[1:] - bounds[0]
        dataset.release()
