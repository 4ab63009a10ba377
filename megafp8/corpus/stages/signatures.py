"""Kept documents -> `records.npy` (a global step's sorted records of their texts) and `names.npy` (their ids)."""

from __future__ import annotations

from collections.abc import Iterator

from megafp8.corpus.dedup import passes, records
from megafp8.corpus.dedup.names import save_names
from megafp8.corpus.mapping import steps_of
from megafp8.corpus.parts import read_view
from megafp8.corpus.tasks import Work

VERSION = 1
RECORDS, NAMES = "records.npy", "names.npy"
_EVERY = 256  # documents between reports


def run(work: Work) -> dict[str, int]:
    """How many documents and records."""
    (step,) = steps_of([work.values["step"]])
    ids: list[str] = []
    found = passes.signatures(step, _texts(work, ids))
    records.save(work.output(RECORDS), found)
    save_names(work.output(NAMES), ids)
    return {"rows": len(ids), "records": len(found)}


def _texts(work: Work, ids: list[str]) -> Iterator[str]:
    done = 0
    for _, document, _ in read_view(work):
        ids.append(document.id)
        done += document.num_bytes
        yield document.text
        if len(ids) % _EVERY == 0:
            work.report(done_bytes=done, documents=len(ids), text_bytes=done)
