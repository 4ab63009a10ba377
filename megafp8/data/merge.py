"""Several datasets as one, one after the other: sequences, documents and ids as they are, memory constant.

Megatron's own tool for it keeps all pointers in memory and has wrapped them in 32 bits; here lengths are spooled and
offsets are 64-bit sums, and every source is verified before a byte of it is taken.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megafp8.core.errors import ConfigError, DataError
from megafp8.data.indexed import IndexedDataset
from megafp8.data.indexed_writer import IndexedDatasetWriter
from megafp8.data.output_lock import check_output, output_lock
from megafp8.data.sources import check_marks
from megafp8.data.tokenizer import Tokenizer, identity
from megafp8.data.verify import problems, unigram_entropy_nats

_SUMMED = ("languages", "sources")


def merge(
    sources: Sequence[Path | str],
    out: Path | str,
    *,
    tokenizer: Tokenizer | None = None,
    dtype: str = "",
    overwrite: bool = False,
    report: Callable[[int], None] | None = None,
) -> IndexedDataset:
    """Write `sources` as one dataset `out`, which is whole or not there; returns it.

    Args:
        tokenizer: of sources whose side file names none (Megatron's own); the others have to name the same.
        dtype: of the ids on disk; empty: that of the sources.
        report: called with the tokens that have been written.

    Raises:
        ConfigError: fewer than two sources, or one twice.
        DataError: a source is missing or damaged; dtypes or tokenizers differ; ids beyond the vocabulary; `out` exists.
        ResourceError: disk full, no permission, `out` is being written by another process.
    """
    prefixes = [Path(source) for source in sources]
    if len(prefixes) < 2:
        raise ConfigError(f"{', '.join(map(str, prefixes)) or 'nothing'}: name two datasets at least to merge")
    resolved = [prefix.resolve() for prefix in prefixes]
    if twice := [prefix for prefix, place in zip(prefixes, resolved) if resolved.count(place) > 1]:
        raise ConfigError(f"{twice[0]}: named twice, its documents would be in the output twice; name it once")
    datasets = [IndexedDataset(prefix) for prefix in prefixes]
    out = Path(out)
    check_output(out, datasets, overwrite=overwrite)
    kind, facts = _common_dtype(datasets, dtype), common_tokenizer(datasets, tokenizer)
    for dataset in datasets:
        if found := problems(dataset):
            raise DataError("\n".join(found))
    with output_lock(out), IndexedDatasetWriter(out, kind, metadata=_metadata(datasets, facts)) as writer:
        counter = IdCounter(facts, out)
        for dataset in datasets:
            before = writer.num_tokens

            def seen(ids: np.ndarray, dataset: IndexedDataset = dataset) -> None:
                counter.add(ids, dataset)
                if report is not None:
                    report(counter.num_tokens)

            writer.add_dataset(dataset, seen)
            assert writer.num_tokens - before == dataset.num_tokens
        writer.metadata["unigram_entropy_nats"] = counter.entropy_nats
    return IndexedDataset(out)


def _common_dtype(datasets: Sequence[IndexedDataset], wanted: str) -> np.dtype:
    found = {str(dataset.path_prefix): dataset.dtype for dataset in datasets}
    if wanted:
        return np.dtype(wanted)
    if len(set(found.values())) > 1:
        said = ", ".join(f"{name} {dtype.name}" for name, dtype in found.items())
        widest = max(found.values(), key=lambda dtype: dtype.itemsize)
        raise DataError(f"ids are stored in different dtypes: {said}; write all as --dtype {widest.name}")
    return datasets[0].dtype


def common_tokenizer(datasets: Sequence[IndexedDataset], named: Tokenizer | None) -> dict[str, Any]:
    """What the side files say of the one tokenizer that wrote all datasets; {} if none says anything.

    Args:
        named: what wrote those that do not say.

    Raises:
        DataError: two tokenizers, or two ways to mark documents; or only some say.
    """
    facts: dict[str, Any] = identity(named) if named is not None else {}
    origin, silent = "--tokenizer" if named is not None else "", []
    for dataset in datasets:
        written = dataset.side.get("tokenizer") or {}
        if not written:
            silent.append(str(dataset.path_prefix))
            continue
        if facts and written.get("fingerprint") != facts["fingerprint"]:
            raise DataError(
                f"{dataset.path_prefix}: written with tokenizer {_said(written)}, but {origin} is {_said(facts)}; "
                "the same number means another piece in each, so tokenize one of the two again"
            )
        if not origin or origin == "--tokenizer":  # what is written also says how documents are marked
            facts, origin = dict(written), str(dataset.path_prefix)
    if silent and facts and named is None:
        raise DataError(
            f"{silent[0]}: no side file says which tokenizer wrote it, {origin} was written with {_said(facts)}; if it "
            "is the same, name it with --tokenizer"
        )
    check_marks(datasets)
    return facts


def _said(facts: dict[str, Any]) -> str:
    return f"{facts.get('kind')} {str(facts.get('fingerprint'))[:12]} of {facts.get('vocab_size')} ids"


class IdCounter:
    """Counts ids as they are written, and refuses those that the tokenizer does not have."""

    def __init__(self, tokenizer: dict[str, Any], out: Path) -> None:
        self._vocab_size, self._out = int(tokenizer.get("vocab_size", 0)), out
        self._counts = np.zeros(self._vocab_size, np.int64)
        self.num_tokens = 0

    def add(self, ids: np.ndarray, dataset: IndexedDataset) -> None:
        """Count `ids`, which come from `dataset`."""
        self.num_tokens += len(ids)
        low, high = (int(ids.min()), int(ids.max())) if len(ids) else (0, 0)
        if low < 0 or (self._vocab_size and high >= self._vocab_size):
            bad = low if low < 0 else high
            raise DataError(f"{dataset.bin_path}: id {bad}, outside of {self._vocab_size} ids; not of this tokenizer")
        found = np.bincount(ids, minlength=len(self._counts))
        self._counts = np.pad(self._counts, (0, len(found) - len(self._counts))) + found

    @property
    def entropy_nats(self) -> float:
        """Of the ids' frequencies."""
        return round(unigram_entropy_nats(self._counts), 6)


def _metadata(datasets: Sequence[IndexedDataset], tokenizer: dict[str, Any]) -> dict[str, Any]:
    """Sums of what all side files count, and where the documents came from."""
    sides = [dataset.side for dataset in datasets]
    values: dict[str, Any] = {"tokenizer": tokenizer} if tokenizer else {}
    for key in _SUMMED:
        if all(key in side for side in sides):
            sums: Counter[str] = Counter()
            for side in sides:
                sums.update(side[key])
            values[key] = dict(sums)
    if all("text_bytes" in side for side in sides):
        values["text_bytes"] = sum(side["text_bytes"] for side in sides)
        tokens = sum(dataset.num_tokens for dataset in datasets)
        values["bytes_per_token"] = round(values["text_bytes"] / tokens, 6) if tokens else 0.0
    return values | {"merged_from": [source_record(dataset) for dataset in datasets]}


def source_record(dataset: IndexedDataset) -> dict[str, Any]:
    """What a side file says of a dataset that its own was made from."""
    return {
        "path": str(dataset.path_prefix),
        "num_documents": dataset.num_documents,
        "num_tokens": dataset.num_tokens,
        "checksums": dataset.side.get("checksums", {}),
    }
