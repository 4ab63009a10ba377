"""What a run counts, batch by batch: by split, by language, by source, bad and empty, and how often each id occurs."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from megafp8.core.errors import DataError
from megafp8.corpus.config import CorpusConfig
from megafp8.corpus.tokenize import Encoded, SplitPart
from megafp8.data.verify import unigram_entropy_nats

_MAX_NAMES = 1000  # different sources kept apart; a corpus may name a URL for each document
_OTHER = "(other)"


@dataclass
class SplitTotals:
    """Counts of one split; `ids[i]` is how often id i occurs."""

    documents: int = 0
    tokens: int = 0
    text_bytes: int = 0
    languages: Counter[str] = field(default_factory=Counter)
    sources: Counter[str] = field(default_factory=Counter)
    ids: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))

    def add(self, part: SplitPart) -> None:
        """Add what a batch brings."""
        self.documents += len(part.lengths)
        self.tokens += len(part.ids)
        self.text_bytes += part.text_bytes
        for mine, theirs in ((self.languages, part.languages), (self.sources, part.sources)):
            for name, count in sorted(theirs.items()):
                mine[name if name in mine or len(mine) < _MAX_NAMES else _OTHER] += count
        counts = np.bincount(part.ids, minlength=len(self.ids))
        self.ids = np.pad(self.ids, (0, len(counts) - len(self.ids))) + counts


@dataclass
class Totals:
    """Counts of the whole run."""

    splits: dict[str, SplitTotals] = field(default_factory=lambda: {"train": SplitTotals(), "valid": SplitTotals()})
    num_records: int = 0
    num_empty: int = 0
    num_other_language: int = 0
    num_bad: int = 0
    first_bad: str = ""
    damaged: list[str] = field(default_factory=list)

    @property
    def num_documents(self) -> int:
        """Documents written, both splits."""
        return sum(split.documents for split in self.splits.values())

    def add(self, encoded: Encoded) -> None:
        """Add a batch."""
        for name, part in encoded.parts.items():
            self.splits[name].add(part)
        self.num_records += encoded.num_records
        self.num_empty += encoded.num_empty
        self.num_other_language += encoded.num_other_language
        self.num_bad += len(encoded.bad)
        if encoded.bad and not self.first_bad:
            self.first_bad = str(encoded.bad[0])
        self.damaged += [str(bad) for bad in encoded.bad if bad.damaged]

    def shown(self) -> dict[str, int]:
        """Counts for the progress display."""
        return {
            "documents": self.num_documents,
            "text_bytes": sum(split.text_bytes for split in self.splits.values()),
            "tokens": sum(split.tokens for split in self.splits.values()),
            "bad": self.num_bad,
        }

    def judge(self, config: CorpusConfig, quarantine: Path) -> None:
        """Raise DataError if this is not a corpus to train on."""
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
        if not self.num_documents:
            wanted = ", ".join(config.source.languages)
            other = f", {self.num_other_language} not in source.languages ({wanted})" if wanted else ""
            raise DataError(f"no documents: {self.num_records} records, {self.num_empty} of them without text{other}")
        for name, share in (("train", 1.0), ("valid", config.split.valid_share)):
            if name == "valid" and config.source.valid_files and not self.splits[name].documents:
                raise DataError(f"no validation document in source.valid_files {', '.join(config.source.valid_files)}")
            if share and not self.splits[name].documents:
                raise DataError(
                    f"none of {self.num_documents} documents fell into the {name} split at --split.valid_share "
                    f"{config.split.valid_share:g}; change the share (0: no validation) or give more documents"
                )

    def split_summary(self, name: str) -> dict[str, Any]:
        """What side file and manifest say of a split."""
        split = self.splits[name]
        return {
            "documents": split.documents,
            "tokens": split.tokens,
            "text_bytes": split.text_bytes,
            "bytes_per_token": round(split.text_bytes / split.tokens, 6) if split.tokens else 0.0,
            "unigram_entropy_nats": round(unigram_entropy_nats(split.ids), 6),
            "languages": dict(split.languages),
            "sources": dict(split.sources),
        }

    def to_json(self) -> dict[str, Any]:
        """All counts but those of ids as plain values."""
        return {**vars(self), "splits": {name: self.split_summary(name) for name in self.splits}}

    def ids_to_json(self) -> dict[str, list[int]]:
        """How often each id occurs, by split: long, and of use to nobody but a run that goes on."""
        return {name: split.ids.tolist() for name, split in self.splits.items()}

    @classmethod
    def from_json(cls, values: dict[str, Any], ids: dict[str, list[int]]) -> Totals:
        """Counts out of a journal or manifest; `ids` as from `ids_to_json`, {} where they are not needed."""
        splits = {
            name: SplitTotals(
                split["documents"],
                split["tokens"],
                split["text_bytes"],
                Counter(split["languages"]),
                Counter(split["sources"]),
                np.asarray(ids.get(name, []), np.int64),
            )
            for name, split in values["splits"].items()
        }
        return cls(**{**values, "splits": splits})
