"""Kept documents -> without what a global step takes out of them -> the steps behind it. Outputs as those of `read`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import numpy as np

from megafp8.corpus.dedup.names import names_at
from megafp8.corpus.dedup.records import shards_and_rows
from megafp8.corpus.documents import Document, Dropped
from megafp8.corpus.mapping import Mapper, steps_of
from megafp8.corpus.parts import PartWriter, read_view
from megafp8.corpus.quarantine import Quarantine
from megafp8.corpus.tasks import Work

VERSION = 4


def run(work: Work) -> dict[str, Any]:
    """Counts by outcome; `num_records`: bad, dropped and kept. Inputs: the part, and what `links` says of it."""
    parts, quarantine = PartWriter(work, work.values["part_bytes"]), Quarantine(work)
    mapper = Mapper(steps_of(work.values["steps"]), work, quarantine)
    records = text_bytes = 0
    for document, held_out in _left(work, mapper):
        records += 1
        if document is None:
            continue
        text_bytes += len(document.text)
        if (kept := mapper.apply(document, file=document.id, line=0)) is not None:
            parts.add(kept, held_out)
        if records % 256 == 0:
            work.report(done_bytes=text_bytes, documents=records, text_bytes=text_bytes, dropped=mapper.num_dropped)
    parts.close()
    return {
        "num_records": records,
        "kept": sum(part["rows"] for part in parts.parts),
        "parts": parts.parts,
        **quarantine.close(),
        **mapper.close(),
    }


def _left(work: Work, mapper: Mapper) -> Iterator[tuple[Document | None, bool]]:
    """Each document, as the global step leaves it, or None where it is dropped (and entered)."""
    if len(work.inputs) == 1:
        yield from ((document, held_out) for _, document, held_out in read_view(work))
        return
    (step,) = steps_of([work.values["global"]])
    rows = np.load(work.checked(1))
    if step.unit != "document":
        yield from _without_units(work, mapper, step, rows)
        return
    twins = _twins(work, rows)
    for row, document, held_out in read_view(work):
        if row in twins:
            mapper.drop(step.name, document, Dropped(step.reason, f"of {twins[row]}"))
        yield (None if row in twins else document), held_out


def _without_units(work: Work, mapper: Mapper, step: Any, rows: np.ndarray) -> Iterator[tuple[Document | None, bool]]:
    first = 0
    for _, document, held_out in read_view(work):
        text, gone, first = step.remove(document.text, first, rows)
        if not gone:
            yield document, held_out
            continue
        mapper.count_change(step.name, {"bytes": gone})
        left = dataclasses.replace(document, text=text)
        if left.is_empty:
            mapper.drop(step.name, document, Dropped(step.reason))
        yield (None if left.is_empty else left), held_out


def _twins(work: Work, rows: np.ndarray) -> dict[int, str]:
    """{row: id of the document that stays in its place}."""
    shards, kept = shards_and_rows(np.load(work.checked(2)))
    names = json.loads(work.checked(3).read_text(encoding="utf-8"))
    found: dict[int, str] = {}
    for shard in np.unique(shards).tolist():
        mine = shards == shard
        found |= dict(zip(rows[mine].tolist(), names_at(work.root / names[shard], kept[mine])))
    return found
