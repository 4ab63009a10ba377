"""Kept documents -> `records.npy` (a global step's sorted records of their texts) and `names.npy` (their ids)."""

from __future__ import annotations

from collections.abc import Iterator

from megafp8.corpus.dedup import passes
from megafp8.corpus.dedup.names import NamesWriter
from megafp8.corpus.mapping import steps_of
from megafp8.corpus.parts import read_view
from megafp8.corpus.tasks import Work

VERSION = 1
RECORDS, NAMES = "records.npy", "names.npy"
_EVERY = 256  # documents between reports


def run(work: Work) -> dict[str, int]:
    """How many documents and records."""
    (step,) = steps_of([work.values["step"]])
    names = NamesWriter(work.output(NAMES))
    count = passes.write_signatures(step, _texts(work, names), work.output(RECORDS), work.hints["memory_bytes"])
    names.close()
    return {"rows": len(names), "records": count}


def _texts(work: Work, names: NamesWriter) -> Iterator[str]:
    done = 0
    for _, document, _ in read_view(work):
        names.add(document.id)
        done += document.num_bytes
        yield document.text
        if len(names) % _EVERY == 0:
            work.report(done_bytes=done, documents=len(names), text_bytes=done)
