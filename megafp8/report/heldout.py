"""Held-out text: losses of single documents out of run folders, and what a bootstrap over documents says of them.

Documents are resampled, not tokens: the tokens of a document depend on each other. Two runs are compared on the same
resampled documents (a paired bootstrap), so that how hard a document is cancels, as the batches do in training.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megafp8.core.errors import DataError
from megafp8.core.jsonio import read_json

KIND = "megafp8-document-losses"  # of the files that `megafp8 eval --save` writes
FOLDER = "heldout"
RESAMPLES, SEED, LEVEL = 10_000, 1234, 0.95
_CHUNK_ELEMENTS = 1 << 24  # weights of documents held at once: 128 MB
_SAME = ("data_checksum", "data_tokens", "window", "max_tokens")


@dataclass(frozen=True)
class HeldOut:
    """A run's losses on one held-out set.

    Attributes:
        name: of the set.
        arithmetic: what the forward pass computed in.
        loss_sums, tokens: of each document, float64 nats and int64, [num documents].
        facts: the file's other fields.
    """

    name: str
    arithmetic: str
    loss_sums: np.ndarray
    tokens: np.ndarray
    facts: dict[str, Any]

    @property
    def loss(self) -> float:
        """Nats a token over all documents."""
        return float(self.loss_sums.sum() / self.tokens.sum())

    @property
    def perplexity(self) -> float:
        """exp of the loss; infinite where a float ends."""
        return math.exp(self.loss) if not self.loss > 700 else math.inf

    @property
    def step(self) -> int:
        """The step of the checkpoint that was judged; 0 if its name does not say."""
        digits = str(self.facts.get("checkpoint", "")).rpartition("_")[2]
        return int(digits) if digits.isdigit() else 0

    def matches(self, other: HeldOut) -> bool:
        """Whether both are of the same documents, cut alike."""
        return all(self.facts.get(key) == other.facts.get(key) for key in _SAME) and np.array_equal(
            self.tokens, other.tokens
        )


@dataclass(frozen=True)
class Interval:
    """A value with the bounds between which LEVEL of the resampled values lie; the bounds are NaN for one document."""

    value: float
    low: float
    high: float

    @property
    def excludes_zero(self) -> bool:
        """Whether all of the interval is on one side of zero."""
        return self.low > 0 or self.high < 0


def read_heldout(run_folder: Path) -> dict[str, HeldOut]:
    """The sets on which a run was judged, by name; empty if on none.

    Raises:
        DataError: a file is damaged or of another kind.
    """
    found = {}
    for path in sorted((run_folder / FOLDER).glob("*.json")):
        found[path.stem] = _read(path)
    return found


def _read(path: Path) -> HeldOut:
    kept = read_json(path)
    if not isinstance(kept, dict) or kept.get("kind") != KIND:
        raise DataError(f"{path}: not written by `megafp8 eval --save`; remove it")
    try:
        sums = np.array(kept.pop("document_loss_sums"), dtype=np.float64)
        tokens = np.array(kept.pop("document_tokens"), dtype=np.int64)
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"{path}: holds no losses of documents ({error}); make it again with `megafp8 eval`") from None
    if sums.shape != tokens.shape or sums.ndim != 1 or not len(sums) or tokens.min() < 0 or not tokens.sum():
        raise DataError(f"{path}: {sums.shape} losses of {tokens.shape} documents; make it again with `megafp8 eval`")
    return HeldOut(path.stem, str(kept.get("arithmetic", "")), sums, tokens, kept)


def bootstrap(sums: np.ndarray, tokens: np.ndarray, *, resamples: int = RESAMPLES, seed: int = SEED) -> Interval:
    """Percentile interval of sum(sums) / sum(tokens) over resampled documents.

    Args:
        sums: of each document, summed losses or differences of them, float64 [D].
        tokens: of each document, [D].
        seed: the same documents are drawn for the same D, so that intervals of several runs belong together.

    Source: Efron and Tibshirani, An Introduction to the Bootstrap, 1993, chapters 6 and 13.
    """
    count = len(sums)
    value = float(sums.sum() / tokens.sum())
    if count < 2 or not np.isfinite(sums).all():
        return Interval(value, math.nan, math.nan)
    rng = np.random.default_rng(seed)
    values, shares = [], np.full(count, 1.0 / count)
    at_once = max(1, _CHUNK_ELEMENTS // count)
    for start in range(0, resamples, at_once):
        weights = rng.multinomial(count, shares, size=min(at_once, resamples - start)).astype(np.float64)
        drawn = weights @ tokens
        values.append(np.divide(weights @ sums, drawn, out=np.full(len(drawn), value), where=drawn > 0))
    low, high = np.quantile(np.concatenate(values), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(value, float(low), float(high))


def loss_interval(run: HeldOut) -> Interval:
    """A run's loss in nats a token."""
    return bootstrap(run.loss_sums, run.tokens)


def difference_interval(run: HeldOut, baseline: HeldOut) -> Interval | None:
    """A run's loss minus the baseline's, nats a token, on the same documents; None if they are not the same."""
    if not run.matches(baseline):
        return None
    return bootstrap(run.loss_sums - baseline.loss_sums, run.tokens)
