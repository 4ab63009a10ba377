"""What `figures.json` holds beside the counts of the manifest: who was dropped where, lengths, clusters, samples.

All of it is counted by tasks where a document is at hand and added up in the order of the input, so that it does not
depend on how many workers there are or how the input is cut. Names (languages, sources) beyond the first 1,000 are
counted together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megafp8.corpus.documents import Document, Dropped

KIND = "megafp8-corpus-figures"
OTHER = "(other)"
MAX_NAMES = 1000  # different sources kept apart; a corpus may name a URL for each document
RAW, KEPT, EMPTY, OTHER_LANGUAGE, BAD = "raw", "kept", "empty", "other language", "bad"
_SAMPLES, _SAMPLES_OF_LANGUAGE = 6, 2  # of each reason
_SAMPLE_CHARACTERS = 300
# lower ends of the bins: four to an octave, as whole numbers; 0 has a bin of its own
EDGES = np.unique([0, *(int(np.ceil(2 ** (quarter / 4))) for quarter in range(4 * 40))])

Tallies = dict[str, dict[str, list[int]]]  # {name: {outcome: [documents, bytes, ...]}}
Lengths = dict[str, dict[str, int]]  # {name: {lower end of a bin: documents}}
Samples = dict[str, dict[str, list[dict[str, str]]]]  # {step: {reason: documents}}


def name_in(names: Mapping[str, Any], name: str) -> str:
    """The name under which it is counted."""
    return name if name in names or len(names) < MAX_NAMES else OTHER


def add_tally(tallies: Tallies, name: str, outcome: str, numbers: Sequence[int]) -> None:
    """Add numbers to those of a name and an outcome."""
    row = tallies.setdefault(name_in(tallies, name), {})
    before = row.get(outcome)
    row[outcome] = list(numbers) if before is None else [a + b for a, b in zip(before, numbers, strict=True)]


def add_lengths(lengths: Lengths, name: str, values: Sequence[int]) -> None:
    """Count lengths by bin."""
    bins, counts = np.unique(np.searchsorted(EDGES, np.asarray(values), side="right") - 1, return_counts=True)
    mine = lengths.setdefault(name_in(lengths, name), {})
    for edge, count in zip(EDGES[bins].tolist(), counts.tolist()):
        mine[str(edge)] = mine.get(str(edge), 0) + count


@dataclass
class Account:
    """What became of documents, by language and by source.

    Attributes:
        languages, sources: documents and bytes by outcome: "raw" (sources only), "empty", "other language", "bad" (a
            step failed on it) or the step that dropped it; "kept": documents, bytes, characters, tokens.
        samples: the first dropped documents of each step, reason and language.
        dropped_lengths: characters of documents that steps dropped, by step.
    """

    languages: Tallies = field(default_factory=dict)
    sources: Tallies = field(default_factory=dict)
    samples: Samples = field(default_factory=dict)
    dropped_lengths: Lengths = field(default_factory=dict)

    def add_raw(self, document: Document) -> None:
        """Enter a document as it was read."""
        add_tally(self.sources, document.source, RAW, (1, document.num_bytes))

    def add_lost(self, document: Document, outcome: str) -> None:
        """Enter a document that is not kept."""
        numbers = (1, document.num_bytes)
        add_tally(self.languages, document.language, outcome, numbers)
        add_tally(self.sources, document.source, outcome, numbers)

    def add_dropped(self, document: Document, step: str, why: Dropped) -> None:
        """Enter a document that a step dropped, as a sample too if there is room."""
        self.add_lost(document, step)
        add_lengths(self.dropped_lengths, step, (len(document.text),))
        found = self.samples.setdefault(step, {}).setdefault(why.reason, [])
        if sum(sample["lang"] == document.language for sample in found) < _SAMPLES_OF_LANGUAGE and len(found) < 99:
            values = {"id": document.id, "lang": document.language, "source": document.source, "detail": why.detail}
            found.append(values | {"text": document.text[:_SAMPLE_CHARACTERS]})

    def to_json(self) -> dict[str, Any]:
        """For a task's record."""
        return dict(vars(self))


def kept_lengths(documents: Sequence[Document], tokens: np.ndarray) -> dict[str, Any]:
    """Tallies and lengths of documents that are kept, for a task's record.

    Args:
        tokens: int [documents], of each.
    """
    found: dict[str, Any] = {"languages": {}, "sources": {}, "characters": {}, "tokens": {}}
    rows = [
        (1, document.num_bytes, len(document.text), count)
        for document, count in zip(documents, tokens.tolist(), strict=True)
    ]
    groups: dict[str, list[tuple[int, ...]]] = {}
    for document, row in zip(documents, rows):
        add_tally(found["languages"], document.language, KEPT, row)
        add_tally(found["sources"], document.source, KEPT, row)
        groups.setdefault(name_in(groups, document.language), []).append(row)
    for language, some in groups.items():
        add_lengths(found["characters"], language, [row[2] for row in some])
        add_lengths(found["tokens"], language, [row[3] for row in some])
    return found


@dataclass
class Figures:
    """The figures of a run; see `Account` for the first four.

    Attributes:
        characters, tokens: lengths of kept documents by language.
        clusters: {step: what `dedup.clusters.summary` says}.
    """

    languages: Tallies = field(default_factory=dict)
    sources: Tallies = field(default_factory=dict)
    samples: Samples = field(default_factory=dict)
    dropped_lengths: Lengths = field(default_factory=dict)
    characters: Lengths = field(default_factory=dict)
    tokens: Lengths = field(default_factory=dict)
    clusters: dict[str, Any] = field(default_factory=dict)

    def add(self, found: Mapping[str, Any]) -> None:
        """Add what `Account` or `kept_lengths` counted."""
        for what in ("languages", "sources"):
            for name, outcomes in found[what].items():
                for outcome, numbers in outcomes.items():
                    add_tally(getattr(self, what), name, outcome, numbers)
        for what in ("dropped_lengths", "characters", "tokens"):
            for name, bins in found.get(what, {}).items():
                mine = getattr(self, what)
                sums = mine.setdefault(name_in(mine, name), {})
                for edge, count in bins.items():
                    sums[edge] = sums.get(edge, 0) + count
        for step, reasons in found.get("samples", {}).items():
            for reason, documents in reasons.items():
                self._add_samples(self.samples.setdefault(step, {}).setdefault(reason, []), documents)

    @staticmethod
    def _add_samples(mine: list[dict[str, str]], more: Iterable[dict[str, str]]) -> None:
        for one in more:
            alike = sum(sample["lang"] == one["lang"] for sample in mine)
            if alike < _SAMPLES_OF_LANGUAGE and len(mine) < _SAMPLES:
                mine.append(one)

    def to_json(self) -> dict[str, Any]:
        """For `figures.json`."""
        return {"kind": KIND, **vars(self)}
