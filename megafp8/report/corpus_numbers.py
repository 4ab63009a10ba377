"""Numbers of a corpus's page, from what its folder holds: the funnel, languages and sources, clusters, rates."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megafp8.core.errors import DataError
from megafp8.core.jsonio import read_json
from megafp8.corpus import folder as places
from megafp8.corpus.figures import BAD, EMPTY, KEPT, KIND, OTHER, OTHER_LANGUAGE, RAW
from megafp8.corpus.rates import stage_rates

_SHOWN_GROUPS = 40
_QUARANTINED = 8
_SIZE_LIMITS = (2, 3, 4, 8, 16, 64, 256)  # largest cluster of each line; one line more for what is above
_LABELS = {RAW: "records", BAD: "quarantined", EMPTY: "empty", OTHER_LANGUAGE: "in another language"}


@dataclass(frozen=True)
class Corpus:
    """What a folder says of its corpus.

    Attributes:
        steps: names of the steps, in their order.
        quarantined: the first bad records.
        rates: see `corpus.rates.stage_rates`.
    """

    folder: Path
    manifest: dict[str, Any]
    figures: dict[str, Any]
    steps: list[str]
    quarantined: list[dict[str, Any]]
    rates: list[dict[str, Any]]

    @property
    def counts(self) -> dict[str, Any]:
        """Of the manifest."""
        counts: dict[str, Any] = self.manifest["counts"]
        return counts

    @property
    def raw_bytes(self) -> int:
        """Text of all records that could be read."""
        return sum(row[RAW][1] for row in self.figures["sources"].values() if RAW in row)

    def kept(self, number: int) -> int:
        """Of what is kept: 0 documents, 1 bytes, 2 characters, 3 tokens."""
        return sum(row[KEPT][number] for row in self.figures["languages"].values() if KEPT in row)

    def lost(self, outcome: str) -> tuple[int, int]:
        """(documents, bytes) of one outcome."""
        rows = [row[outcome] for row in self.figures["languages"].values() if outcome in row]
        return sum(row[0] for row in rows), sum(row[1] for row in rows)

    @property
    def outcomes(self) -> list[str]:
        """All that can become of a document but that it is kept, in the order in which it meets them."""
        found = {outcome for row in self.figures["languages"].values() for outcome in row} - {KEPT}
        first = [name for name in (BAD, EMPTY, OTHER_LANGUAGE) if name in found]
        return first + [name for name in self.steps if name in found]


def read_corpus(folder: Path, rates: Sequence[dict[str, Any]] | None = None) -> Corpus:
    """Everything that the page is made of.

    Args:
        rates: of the run that made it; None: from the log of its stages, if they were kept.

    Raises:
        DataError: no finished corpus, or one without figures.
    """
    manifest = places.record_at(folder / places.MANIFEST)
    if manifest.get("kind") != "megafp8-corpus":
        raise DataError(f"{folder}: no manifest.json of `megafp8 preprocess`; name the output folder of a finished run")
    if not (folder / places.FIGURES).is_file():
        raise DataError(f"{folder}: has no {places.FIGURES}; run the same `megafp8 preprocess` again, which makes it")
    figures = read_json(folder / places.FIGURES)
    if not isinstance(figures, dict) or figures.get("kind") != KIND:
        raise DataError(f"{folder / places.FIGURES}: not of `megafp8 preprocess`; run it again, which makes the file")
    counts = manifest["counts"]
    steps = ["read", *(table["kind"] for table in manifest["config"].get("steps", []))]
    steps = [name for name in dict.fromkeys(steps) if name != "read" or name in counts["dropped"]]
    found = stage_rates(folder / places.STAGES) if rates is None else list(rates)
    return Corpus(folder, manifest, figures, steps, _quarantined(folder), found)


def _quarantined(folder: Path) -> list[dict[str, Any]]:
    path = folder / places.QUARANTINE
    if not path.is_file():
        return []
    with open(path, encoding="utf-8") as lines:
        return [json.loads(line) for line in itertools.islice(lines, _QUARANTINED)]


@dataclass(frozen=True)
class FunnelRow:
    """A stage of the funnel.

    Attributes:
        reasons: (reason, documents), most first.
    """

    label: str
    lost: int
    lost_bytes: int
    left: int
    reasons: list[tuple[str, int]]


def funnel(corpus: Corpus) -> list[FunnelRow]:
    """From records to what is written; the first row is the input, the last one the corpus."""
    counts = corpus.counts
    left = counts["num_records"]
    rows = [FunnelRow(_LABELS[RAW], 0, 0, left, [])]
    for outcome, lost in ((BAD, counts["num_bad"]), (EMPTY, counts["num_empty"]),
                          (OTHER_LANGUAGE, counts["num_other_language"])):  # fmt: skip
        if lost:
            left -= lost
            rows.append(FunnelRow(_LABELS[outcome], lost, corpus.lost(outcome)[1], left, []))
    for step in corpus.steps:
        reasons = sorted(counts["dropped"].get(step, {}).items(), key=lambda one: (-one[1], one[0]))
        lost = sum(count for _, count in reasons)
        left -= lost
        rows.append(FunnelRow(step, lost, corpus.lost(step)[1], left, reasons))
    return rows


@dataclass(frozen=True)
class Group:
    """A language or a source.

    Attributes:
        kept: documents, bytes, characters, tokens.
        parts: (outcome, documents) of what is not kept.
        more: languages or sources that the row stands for, if it is the last one.
    """

    name: str
    total: int
    kept: tuple[int, ...]
    parts: list[tuple[str, int]]
    more: int = 0


def groups(corpus: Corpus, what: str) -> list[Group]:
    """Rows of "languages" or "sources", most tokens first; what is beyond the first 40 in one row."""
    rows = [_group(corpus, name, row) for name, row in corpus.figures[what].items()]
    rows.sort(key=lambda row: (row.name == OTHER, -row.kept[3], -row.total, row.name))
    if len(rows) <= _SHOWN_GROUPS + 1:
        return rows
    rest = rows[_SHOWN_GROUPS:]
    parts: dict[str, int] = {}
    for row in rest:
        for outcome, count in row.parts:
            parts[outcome] = parts.get(outcome, 0) + count
    kept = tuple(sum(row.kept[i] for row in rest) for i in range(4))
    ordered = [(outcome, parts[outcome]) for outcome in corpus.outcomes if outcome in parts]
    return [*rows[:_SHOWN_GROUPS], Group("", sum(row.total for row in rest), kept, ordered, len(rest))]


def _group(corpus: Corpus, name: str, row: dict[str, list[int]]) -> Group:
    parts = [(outcome, row[outcome][0]) for outcome in corpus.outcomes if outcome in row]
    kept = tuple(row.get(KEPT, (0, 0, 0, 0)))
    return Group(name, kept[0] + sum(count for _, count in parts), kept, parts)


def cluster_sizes(sizes: dict[str, int]) -> list[tuple[str, int]]:
    """(documents in a cluster, clusters), small sizes one by one, larger ones together."""
    found = []
    low = 2
    for high in (*_SIZE_LIMITS, None):
        count = sum(n for size, n in sizes.items() if low <= int(size) and (high is None or int(size) <= high))
        if count:
            label = f"{low:,} or more" if high is None else f"{low} to {high}" if high > low else str(low)
            found.append((label, count))
        low = (high or low) + 1
    return found


def median_of(bins: dict[str, int]) -> float:
    """Median of lengths that were counted by bin: between the ends of its bin as many of it lie below."""
    total, below = sum(bins.values()), 0
    edges = sorted(int(edge) for edge in bins)
    for at, edge in enumerate(edges):
        count = bins[str(edge)]
        if below + count >= total / 2:
            after = min(edges[at + 1], round(edge * 2**0.25)) if at + 1 < len(edges) else round(edge * 2**0.25)
            return edge + (after - edge) * (total / 2 - below) / count
        below += count
    return 0.0
