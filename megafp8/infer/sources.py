"""Tokens to score: a .bin/.idx dataset as one flat sequence, or a text file as one document."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from megafp8.core.errors import DataError
from megafp8.data.indexed import IndexedDataset
from megafp8.data.marks import ENDS_ONLY, Marks
from megafp8.data.sources import check_tokenizer
from megafp8.data.tokenizer import Tokenizer


class DatasetTokens:
    """The first `max_tokens` (0: all) tokens of a dataset; a slice reads only its own bytes."""

    def __init__(self, dataset: IndexedDataset, max_tokens: int) -> None:
        self.dataset = dataset
        self.count = min(dataset.num_tokens, max_tokens or dataset.num_tokens)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, part: slice) -> np.ndarray:
        start, stop, _ = part.indices(self.count)
        return self.dataset.tokens(start, stop)


def dataset_tokens(path_prefix: str | Path, tokenizer: Tokenizer, max_tokens: int = 0) -> DatasetTokens:
    """Open a dataset that was written with `tokenizer`.

    Raises:
        DataError: missing, damaged, empty, or of another tokenizer.
    """
    dataset = IndexedDataset(path_prefix)
    check_tokenizer(dataset, tokenizer)
    tokens = DatasetTokens(dataset, max_tokens)
    if len(tokens) < 2:
        raise DataError(f"{path_prefix}: {len(tokens)} tokens; scoring needs at least 2")
    return tokens


def text_tokens(
    path: str | Path, tokenizer: Tokenizer, max_tokens: int = 0, marks: Marks = ENDS_ONLY
) -> tuple[np.ndarray, int]:
    """A text file's ids behind the id that stood before a text in training, and its size in bytes (0 if it was cut).

    Raises:
        DataError: missing, not UTF-8, or empty.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read as UTF-8 text: {error}") from error
    ids = tokenizer.encode(text)
    if not ids:
        raise DataError(f"{path}: holds no text")
    cut = 0 < max_tokens < len(ids)
    kept = ids[:max_tokens] if cut else ids
    return np.array([marks.context(tokenizer), *kept], dtype=np.int64), 0 if cut else len(text.encode())
