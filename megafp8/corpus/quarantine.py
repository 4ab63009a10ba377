"""Bad records of a task: written to its `bad.jsonl` as they come, so that memory does not grow with them."""

from __future__ import annotations

import dataclasses
import json
from typing import IO, Any

from megafp8.core.errors import DataError
from megafp8.corpus.documents import Bad, printable
from megafp8.corpus.tasks import Work

BAD = "bad.jsonl"
_FEW = 10  # records; of a file with fewer all may be bad, and only the share of bad ones in the corpus counts


class Quarantine:
    """The bad records of one task, with file, line and reason.

    Raises:
        DataError: at the first one, if the task's hint `on_error` is "stop".
    """

    def __init__(self, work: Work) -> None:
        self._work = work
        self._stop = work.hints.get("on_error") == "stop"
        self._file: IO[str] | None = None
        self.num_bad = 0
        self._first = ""
        self._damaged: list[str] = []
        self._reading, self._records, self._bad_before, self._first_here = "", 0, 0, ""

    def add(self, bad: Bad) -> None:
        """Enter a record."""
        bad = dataclasses.replace(bad, reason=printable(bad.reason), excerpt=printable(bad.excerpt))
        if self._stop:
            raise DataError(f"{bad}; correct it, or let the run go on with --source.on_error quarantine")
        if self._file is None:
            self._file = open(self._work.output(BAD), "w", encoding="utf-8")  # noqa: SIM115 (closed by close)
        self._file.write(json.dumps(dataclasses.asdict(bad), ensure_ascii=False) + "\n")
        self.num_bad += 1
        self._first = self._first or str(bad)
        self._first_here = self._first_here or bad.reason
        if bad.damaged:
            self._damaged.append(str(bad))

    def seen(self, file: str) -> None:
        """Count a record of the file that is being read.

        A file, or a range of it, of which every record is bad has most likely other keys or another format; among a
        thousand files it is too small a share to be noticed, so it is told as damaged.
        """
        if file != self._reading:
            self._end_file()
            self._reading, self._records, self._bad_before, self._first_here = file, 0, self.num_bad, ""
        self._records += 1

    def _end_file(self) -> None:
        if self._records >= _FEW and self.num_bad - self._bad_before == self._records:
            self._damaged.append(f"{self._reading}: all {self._records} records are bad, the first: {self._first_here}")

    def close(self) -> dict[str, Any]:
        """The account, for the task's record."""
        self._end_file()
        if self._file is not None:
            self._file.close()
        return {"num_bad": self.num_bad, "first_bad": self._first, "damaged": self._damaged}
