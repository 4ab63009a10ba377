"""What a run counts, from the records of its tasks: each record of the input is in exactly one of these numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megafp8.core.errors import DataError
from megafp8.corpus.config import CorpusConfig
from megafp8.corpus.stages.tokenize import add_names


@dataclass
class SplitTotals:
    """Counts of one split."""

    documents: int = 0
    tokens: int = 0
    text_bytes: int = 0
    languages: Counter[str] = field(default_factory=Counter)
    sources: Counter[str] = field(default_factory=Counter)
    unigram_entropy_nats: float = 0.0

    def add(self, part: Mapping[str, Any]) -> None:
        """Add what a task of `tokenize` counted."""
        self.documents += part["documents"]
        self.tokens += part["tokens"]
        self.text_bytes += part["text_bytes"]
        add_names(self.languages, part["languages"])
        add_names(self.sources, part["sources"])

    def summary(self) -> dict[str, Any]:
        """What side file and manifest say of it."""
        return {
            "documents": self.documents,
            "tokens": self.tokens,
            "text_bytes": self.text_bytes,
            "bytes_per_token": round(self.text_bytes / self.tokens, 6) if self.tokens else 0.0,
            "unigram_entropy_nats": self.unigram_entropy_nats,
            "languages": dict(self.languages),
            "sources": dict(self.sources),
        }


@dataclass
class Totals:
    """Counts of the whole run.

    Attributes:
        num_records: of the input, blank lines not counted: bad + empty + other language + dropped + in a split.
        dropped: {step: {reason: documents}}.
        changed: {step: documents whose text it changed}.
        counted: {step: {what: how often}}.
    """

    splits: dict[str, SplitTotals] = field(default_factory=lambda: {"train": SplitTotals(), "valid": SplitTotals()})
    num_records: int = 0
    num_empty: int = 0
    num_other_language: int = 0
    num_bad: int = 0
    first_bad: str = ""
    damaged: list[str] = field(default_factory=list)
    dropped: dict[str, dict[str, int]] = field(default_factory=dict)
    changed: dict[str, int] = field(default_factory=dict)
    counted: dict[str, dict[str, int]] = field(default_factory=dict)

    @property
    def num_documents(self) -> int:
        """Documents written, both splits."""
        return sum(split.documents for split in self.splits.values())

    @property
    def num_dropped(self) -> int:
        """Documents that steps dropped."""
        return sum(sum(reasons.values()) for reasons in self.dropped.values())

    @property
    def num_kept(self) -> int:
        """Documents of which reading and steps have kept the text."""
        return self.num_records - self.num_bad - self.num_empty - self.num_other_language - self.num_dropped

    def add_read(self, counts: Mapping[str, Any]) -> None:
        """Add what a task of `read` counted."""
        self.num_records += counts["num_records"]
        self.num_empty += counts["num_empty"]
        self.num_other_language += counts["num_other_language"]
        self.damaged += counts["damaged"]
        self.add_mapped(counts)

    def add_mapped(self, counts: Mapping[str, Any]) -> None:
        """Add what steps did in a task of `read` or `map`."""
        self.num_bad += counts["num_bad"]
        self.first_bad = self.first_bad or counts["first_bad"]
        for mine, theirs in ((self.dropped, counts["dropped"]), (self.counted, counts["counted"])):
            for step, numbers in theirs.items():
                self.add_numbers(mine, step, numbers)
        for step, count in counts["changed"].items():
            self.changed[step] = self.changed.get(step, 0) + count

    @staticmethod
    def add_numbers(sums: dict[str, dict[str, int]], step: str, numbers: Mapping[str, int]) -> None:
        """Add a step's numbers by name."""
        mine = sums.setdefault(step, {})
        for name, count in numbers.items():
            mine[name] = mine.get(name, 0) + count

    def judge_read(self, config: CorpusConfig, quarantine: Path) -> None:
        """Raise DataError if too much could not be read, or nothing is left."""
        if self.num_bad and config.source.on_error == "stop":
            raise DataError(f"{self.first_bad}; correct it, or let the run go on with --source.on_error quarantine")
        allowed = config.source.max_bad_share
        if self.num_bad > allowed * self.num_records:
            raise DataError(
                f"{self.num_bad} of {self.num_records} records are bad "
                f"({100 * self.num_bad / self.num_records:.1f}%, allowed {100 * allowed:g}%), first: {self.first_bad}; "
                f"all are listed in {quarantine}; correct them, or raise --source.max_bad_share"
            )
        if self.damaged and not config.source.keep_damaged_files:
            more = f" (and {len(self.damaged) - 1} more)" if len(self.damaged) > 1 else ""
            raise DataError(
                f"{self.damaged[0]}{more}; make the file whole again, or take what can be read of it with "
                "--source.keep_damaged_files true"
            )
        if not self.num_kept:
            wanted = ", ".join(config.source.languages)
            other = f", {self.num_other_language} not in source.languages ({wanted})" if wanted else ""
            dropped = "".join(f", {sum(r.values())} dropped by {step} ({max(r, key=r.__getitem__)})"
                              for step, r in self.dropped.items())  # fmt: skip
            bad = f", {self.num_bad} bad, first: {self.first_bad}" if self.num_bad else ""
            raise DataError(
                f"no documents: {self.num_records} records, {self.num_empty} of them without text{other}{dropped}{bad}"
            )

    def judge_splits(self, config: CorpusConfig) -> None:
        """Raise DataError if a split that should hold documents holds none."""
        for name, share in (("train", 1.0), ("valid", config.split.valid_share)):
            if name == "valid" and config.source.valid_files and not self.splits[name].documents:
                raise DataError(f"no validation document in source.valid_files {', '.join(config.source.valid_files)}")
            if share and not self.splits[name].documents:
                raise DataError(
                    f"none of {self.num_documents} documents fell into the {name} split at --split.valid_share "
                    f"{config.split.valid_share:g}; change the share (0: no validation) or give more documents"
                )

    def to_json(self) -> dict[str, Any]:
        """All counts as plain values."""
        return {**vars(self), "splits": {name: split.summary() for name, split in self.splits.items()}}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Totals:
        """Counts out of a manifest."""
        splits = {
            name: SplitTotals(
                split["documents"],
                split["tokens"],
                split["text_bytes"],
                Counter(split["languages"]),
                Counter(split["sources"]),
                split["unigram_entropy_nats"],
            )
            for name, split in values["splits"].items()
        }
        return cls(**{**values, "splits": splits})
