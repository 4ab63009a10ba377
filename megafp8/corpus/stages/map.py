"""Kept documents -> steps behind a global step -> kept documents. Outputs as those of `read`."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from megafp8.corpus.mapping import Mapper, steps_of
from megafp8.corpus.parts import PartWriter, read_view
from megafp8.corpus.stages.read import BAD
from megafp8.corpus.tasks import Work

VERSION = 1


def run(work: Work) -> dict[str, Any]:
    """Counts by outcome; `num_records` is the sum of bad, dropped and kept."""
    parts, mapper = PartWriter(work, work.values["part_bytes"]), Mapper(steps_of(work.values["steps"]), work)
    records = text_bytes = 0
    for _, document, held_out in read_view(work):
        records += 1
        text_bytes += len(document.text)
        if (kept := mapper.apply(document, file=document.id, line=0)) is not None:
            parts.add(kept, held_out)
        if records % 256 == 0:
            work.report(done_bytes=text_bytes, documents=records, text_bytes=text_bytes, dropped=mapper.num_dropped)
    parts.close()
    bad = mapper.failed
    if bad:
        lines = [json.dumps(dataclasses.asdict(one), ensure_ascii=False) + "\n" for one in bad]
        work.output(BAD).write_text("".join(lines), encoding="utf-8")
    return {
        "num_records": records,
        "num_bad": len(bad),
        "first_bad": str(bad[0]) if bad else "",
        "kept": sum(part["rows"] for part in parts.parts),
        "parts": parts.parts,
        **mapper.close(),
    }
