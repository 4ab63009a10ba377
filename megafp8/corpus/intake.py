"""The records of a task's shard, one by one: which become documents of the corpus, and what became of the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from megafp8.core.config import build
from megafp8.corpus.config import SourceConfig
from megafp8.corpus.documents import Bad, Document, Record, Skipped, is_wanted, parse
from megafp8.corpus.figures import EMPTY, OTHER_LANGUAGE
from megafp8.corpus.mapping import Mapper, steps_of
from megafp8.corpus.quarantine import Quarantine
from megafp8.corpus.shards import read_shard
from megafp8.corpus.tasks import Work

_EVERY = 256  # records between reports


class Intake:
    """Parses records and runs a task's steps on them.

    Writes `bad.jsonl` (quarantined records) and `dropped.zst` (documents that are not kept, with step and reason).
    """

    def __init__(self, work: Work) -> None:
        self._work, self._config = work, source_config(work)
        self._quarantine = Quarantine(work)
        self._mapper = Mapper(steps_of(work.values["steps"]), work, self._quarantine)
        self._records = self._empty = self._other = self._kept = self._text_bytes = 0

    def documents(self) -> Iterator[tuple[Document, bool]]:
        """(document, held out for validation by its file) of what is kept; `counts` holds when this has ended."""
        for number, (record, done) in enumerate(read_shard(self._work, self._config)):
            if number % _EVERY == 0:
                sums = {"documents": self._records, "text_bytes": self._text_bytes}
                self._work.report(done_bytes=done, dropped=self._mapper.num_dropped, **sums)
            if (document := self._kept_of(record)) is not None:
                self._kept += 1
                self._text_bytes += document.num_bytes
                yield document, record.held_out

    def _kept_of(self, record: Record) -> Document | None:
        document = parse(record, self._config)
        if document is None:
            return None
        self._records += 1
        self._quarantine.seen(record.file)
        account = self._mapper.account
        if isinstance(document, Bad):
            self._quarantine.add(document)
            return None
        if isinstance(document, Skipped):
            account.add_raw(document.document)
            self._mapper.drop("read", document.document, document.why)
            return None
        account.add_raw(document)
        if document.is_empty:
            self._empty += 1
            self._mapper.leave_out(document, EMPTY)
            return None
        if not is_wanted(document, self._config):
            self._other += 1
            self._mapper.leave_out(document, OTHER_LANGUAGE)
            return None
        return self._mapper.apply(document, file=record.file, line=record.line)

    def counts(self) -> dict[str, Any]:
        """By outcome, for the task's record; `num_records` is the sum of bad, empty, other_language, dropped, kept."""
        return {
            "num_records": self._records,
            "num_empty": self._empty,
            "num_other_language": self._other,
            "kept": self._kept,
            **self._quarantine.close(),
            **self._mapper.close(),
        }


def source_config(work: Work) -> SourceConfig:
    """The source's configuration with this task's files."""
    values = work.values["source"]
    files = () if values["kind"] == "python_stdlib" else tuple(one.path for one in work.inputs)
    return build(SourceConfig, {**values, "files": files})


def sampled(work: Work, chosen: Callable[[int, bytes], bool]) -> Iterator[Document]:
    """Documents of a task's shard of JSON lines, of those lines that are `chosen` by number and bytes; no steps run."""
    config, number = source_config(work), 0
    for record, _ in read_shard(work, config):
        if isinstance(record.data, bytes) and record.data.strip():
            document = parse(record, config) if chosen(number, record.data) else None
            if isinstance(document, Document) and not document.is_empty and is_wanted(document, config):
                yield document
            number += 1
