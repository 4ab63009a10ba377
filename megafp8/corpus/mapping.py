"""Steps that take one document at a time, in a row, and the account of what they did.

Each document that comes in is counted once: kept, dropped by a step with a reason, or bad because a step failed on
it. All that were dropped are listed by id; the first few of each reason with the beginning of their text.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from megafp8.core.config import to_dict
from megafp8.core.errors import is_fault
from megafp8.corpus.compressed import InputStream
from megafp8.corpus.documents import Bad, Document, Dropped, unwritable
from megafp8.corpus.figures import BAD, Account
from megafp8.corpus.parts import LinesWriter
from megafp8.corpus.quarantine import Quarantine
from megafp8.corpus.step_registry import make_step
from megafp8.corpus.tasks import Work

DROPPED = "dropped.zst"
_SAMPLES = 5  # of each reason in each task
_SAMPLE_CHARACTERS = 400
_COUNT = "count:"  # begins the metadata keys that are added up, see `Document`


def step_values(table: Mapping[str, Any]) -> dict[str, Any]:
    """What of a step decides the bytes of what comes behind it.

    That is kind, version, all options, default or not, and the content of the files that it reads (`files_read`).
    """
    step = make_step(table)
    values = {"kind": table["kind"], "version": step.version, "options": to_dict(step)}
    files = {}
    for path in getattr(step, "files_read", ()):
        with InputStream(path) as stream:
            files[path] = stream.checksum()
    return {**values, "files": files} if files else values


def steps_of(values: Sequence[Mapping[str, Any]]) -> list[Any]:
    """The steps that `step_values` described."""
    return [make_step({"kind": one["kind"], **one["options"]}) for one in values]


class Mapper:
    """Runs steps on documents and keeps the account.

    Attributes:
        dropped: {step: {reason: documents}}.
        changed: {step: documents whose text it changed}.
        counted: {step: {name: number}}, sums of what steps count ("count:" keys of the metadata).
        account: the same by language and source, with lengths and samples.
    """

    def __init__(self, steps: Sequence[Any], work: Work, quarantine: Quarantine) -> None:
        self._steps, self._work, self._quarantine = steps, work, quarantine
        self._log: LinesWriter | None = None
        self.dropped: dict[str, Counter[str]] = {}
        self.changed: Counter[str] = Counter()
        self.counted: dict[str, Counter[str]] = {}
        self.num_dropped = 0
        self.account = Account()
        self._listed: Counter[tuple[str, str]] = Counter()

    def apply(self, document: Document, *, file: str, line: int) -> Document | None:
        """The document as the steps leave it, or None if it was dropped or a step failed; the account has it."""
        for step in self._steps:
            try:
                result = step.apply(document)
                problem = "" if result is document or isinstance(result, Dropped) else unwritable(result)
            except BaseException as error:
                if not is_fault(error):
                    raise
                problem = f"{type(error).__name__}: {error}"
            if problem:
                self._quarantine.add(Bad(file, line, f"step {step.name} failed: {problem}", document.text[:120]))
                self.account.add_lost(document, BAD)
                return None
            if isinstance(result, Dropped):
                self.drop(step.name, document, result)
                return None
            if result is not document:
                self.changed[step.name] += result.text != document.text
                document = self._without_counts(step.name, result)
                if document.is_empty:
                    self.drop(step.name, document, Dropped("no text left"))
                    return None
        return document

    def drop(self, step: str, document: Document, why: Dropped) -> None:
        """Enter a document that is not kept."""
        self.dropped.setdefault(step, Counter())[why.reason] += 1
        self.num_dropped += 1
        self.account.add_dropped(document, step, why)
        self._list(step, document, why)

    def leave_out(self, document: Document, reason: str) -> None:
        """Enter a document that is not taken when it is read; `read` counts it."""
        self.account.add_lost(document, reason)
        self._list("read", document, Dropped(reason))

    def _list(self, step: str, document: Document, why: Dropped) -> None:
        if self._log is None:
            self._log = LinesWriter(self._work.output(DROPPED))
        entry = {"id": document.id, "lang": document.language, "step": step, **dataclasses.asdict(why)}
        self._listed[step, why.reason] += 1
        if self._listed[step, why.reason] <= _SAMPLES:
            entry["text"] = document.text[:_SAMPLE_CHARACTERS]
        self._log.add(entry)

    def count_change(self, step: str, numbers: Mapping[str, int]) -> None:
        """Enter that a step changed a text, and its numbers."""
        self.changed[step] += 1
        self.counted.setdefault(step, Counter()).update(numbers)

    def _without_counts(self, step: str, document: Document) -> Document:
        found = {key: value for key, value in document.metadata.items() if key.startswith(_COUNT)}
        if not found:
            return document
        sums = self.counted.setdefault(step, Counter())
        for key, value in found.items():
            sums[key.removeprefix(_COUNT)] += value
        rest = {key: value for key, value in document.metadata.items() if key not in found}
        return dataclasses.replace(document, metadata=rest)

    def close(self) -> dict[str, Any]:
        """The account, for the task's record."""
        if self._log is not None:
            self._log.close()
        return {
            "dropped": {step: dict(reasons) for step, reasons in self.dropped.items()},
            "changed": {step: count for step, count in self.changed.items() if count},
            "counted": {step: dict(sums) for step, sums in self.counted.items()},
            "account": self.account.to_json(),
        }
