"""Scoring document by document: what a bootstrap over documents needs, and what a run folder keeps of it.

Every document is read from its start, behind an end-of-document id as in training, and cut into windows of training's
length. No window holds two documents, so that the losses of two documents are independent of each other.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from megafp8.core.errors import CheckpointError, ConfigError, DataError
from megafp8.core.jsonio import read_json
from megafp8.data.indexed import IndexedDataset
from megafp8.infer.score import IGNORED, Score
from megafp8.models.decoder import Decoder

KIND = "megafp8-document-losses"
FOLDER = "heldout"  # of a run; `megafp8 report` reads what lies there


@dataclass(frozen=True)
class DocumentScores:
    """Of each document, in the dataset's order: summed loss in nats, float64 [D], and target tokens, int64 [D]."""

    loss_sums: np.ndarray
    tokens: np.ndarray

    @property
    def total(self) -> Score:
        """All documents as one text."""
        return Score(float(self.loss_sums.sum()), int(self.tokens.sum()))


class DocumentWindows:
    """Batches of (tokens, targets, documents): int64 [batch, length] twice, and the document of each row [batch].

    Every token of every document is a target once, its end included. Each batch has `batch` rows, so that shapes
    stay; rows that are left over have no targets.

    Args:
        max_tokens: whole documents until so many tokens are reached; 0: all.
    """

    def __init__(self, dataset: IndexedDataset, eod_id: int, *, length: int, batch: int, max_tokens: int = 0) -> None:
        self.dataset, self.eod_id, self.length, self.batch = dataset, eod_id, length, batch
        bounds = dataset.document_index
        ends = np.concatenate([[0], np.cumsum(dataset.sequence_lengths, dtype=np.int64)])[bounds]
        self.sizes = np.diff(ends)
        if max_tokens:
            self.sizes = self.sizes[: int(np.searchsorted(np.cumsum(self.sizes), max_tokens)) + 1]
        self.num_windows = int((-(-self.sizes // length)).sum())

    def __len__(self) -> int:
        return (self.num_windows + self.batch - 1) // self.batch

    def _rows(self) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        for number in range(len(self.sizes)):
            ids = np.asarray(self.dataset.document(number), dtype=np.int64)
            before = np.concatenate([[self.eod_id], ids[:-1]])
            for start in range(0, len(ids), self.length):
                yield number, before[start : start + self.length], ids[start : start + self.length]

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor, np.ndarray]]:
        rows = self._rows()
        for _ in range(len(self)):
            tokens = np.zeros((self.batch, self.length), dtype=np.int64)
            targets = np.full_like(tokens, IGNORED)
            documents = np.zeros(self.batch, dtype=np.int64)
            for row, (number, before, ids) in zip(range(self.batch), rows):
                tokens[row, : len(ids)], targets[row, : len(ids)], documents[row] = before, ids, number
            yield torch.from_numpy(tokens), torch.from_numpy(targets), documents


@torch.no_grad()
def score_documents(
    model: Decoder, batches: Iterator[tuple[torch.Tensor, torch.Tensor, np.ndarray]] | Any, num_documents: int
) -> DocumentScores:
    """Sum the losses of each document; softmax in fp32, as in training.

    Raises:
        ConfigError: a token that the model has no embedding for.
    """
    device = next(model.parameters()).device
    sums, counts = np.zeros(num_documents), np.zeros(num_documents, dtype=np.int64)
    for tokens, targets, documents in batches:
        largest = int(torch.maximum(tokens, targets).max())
        if largest >= model.config.vocab_size:
            raise ConfigError(f"token id {largest} is not in the model's vocabulary of {model.config.vocab_size}")
        logits = model(tokens.to(device))
        for row, document in enumerate(documents.tolist()):
            kept = targets[row] != IGNORED
            wanted = targets[row, kept].to(device)
            sums[document] += float(F.cross_entropy(logits[row, kept.to(device)].float(), wanted, reduction="sum"))
            counts[document] += len(wanted)
    return DocumentScores(sums, counts)


@dataclass(frozen=True)
class Place:
    """Where the scores of one checkpoint on one dataset are kept: RUN/heldout/NAME.json.

    Attributes:
        identity: what decides the numbers; a file that says the same need not be made again.
    """

    file: Path
    identity: dict[str, Any]

    @property
    def is_done(self) -> bool:
        """Whether the file is there and of the same checkpoint, data and arithmetic."""
        if not self.file.is_file():
            return False
        kept = read_json(self.file)
        return isinstance(kept, dict) and all(kept.get(key) == value for key, value in self.identity.items())

    def record(self, scores: DocumentScores, text_bytes: int) -> dict[str, Any]:
        """The file's content; `text_bytes` of all documents, 0 if not known."""
        total = scores.total
        return {
            **self.identity,
            "loss": total.loss,
            "perplexity": total.perplexity if math.isfinite(total.perplexity) else None,
            "tokens": total.tokens,
            "bits_per_byte": total.bits_per_byte(text_bytes) if text_bytes else None,
            "document_loss_sums": [float(value) for value in scores.loss_sums],
            "document_tokens": [int(value) for value in scores.tokens],
        }


def place_of(
    checkpoint: Path, name: str, dataset: IndexedDataset, *, arithmetic: str, length: int, max_tokens: int
) -> Place:
    """Where `name` belongs for a checkpoint of a run.

    Args:
        arithmetic: what the forward pass computes in, e.g. "bf16" or "as trained (FP8 delayed)".

    Raises:
        ConfigError: a name that is no plain file name.
        CheckpointError: the checkpoint does not lie in a run's folder.
    """
    if not re.fullmatch(r"[\w][\w.-]*", name):
        raise ConfigError(f"--save {name!r}: a name of letters, digits, '.', '_' and '-'; e.g. en")
    run = checkpoint.parent.parent
    if not (run / "metrics.jsonl").is_file():
        raise CheckpointError(f"{checkpoint}: lies in no run's folder, so there is no place for --save {name}")
    manifest = (checkpoint / "manifest.json").read_bytes() if (checkpoint / "manifest.json").is_file() else b""
    identity = {
        "kind": KIND,
        "name": name,
        "arithmetic": arithmetic,
        "checkpoint": checkpoint.name,
        "checkpoint_sha256": hashlib.sha256(manifest).hexdigest(),
        "data": str(dataset.path_prefix),
        "data_checksum": dataset.side.get("checksums", {}).get("bin", ""),
        "data_tokens": dataset.num_tokens,
        "window": length,
        "max_tokens": max_tokens,
    }
    return Place(run / FOLDER / f"{name}.json", identity)


def open_documents(prefix: str | Path, dataset: IndexedDataset) -> int:
    """The size of the text in bytes that the side file names, 0 if it names none.

    Raises:
        DataError: a dataset without documents.
    """
    if dataset.num_documents < 1:
        raise DataError(f"{prefix}: holds no document; scoring needs at least one")
    return int(dataset.side.get("text_bytes", 0))
