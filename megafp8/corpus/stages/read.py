"""Input shard -> kept documents: reads, parses, and runs the steps up to the first global one.

Outputs: parts (`NNNNN.docs.zst`), `bad.jsonl` (quarantined records), `dropped.zst` (what steps dropped, with reason).
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from megafp8.core.config import build
from megafp8.corpus.config import SourceConfig
from megafp8.corpus.documents import Bad, Skipped, is_wanted, parse
from megafp8.corpus.figures import EMPTY, OTHER_LANGUAGE
from megafp8.corpus.mapping import Mapper, steps_of
from megafp8.corpus.parts import PartWriter
from megafp8.corpus.shards import read_shard
from megafp8.corpus.tasks import Work

VERSION = 2
BAD = "bad.jsonl"
_EVERY = 256  # records between reports


def run(work: Work) -> dict[str, Any]:
    """Counts by outcome; `num_records` is the sum of bad, empty, other_language, dropped and kept."""
    config = source_config(work)
    parts, mapper = PartWriter(work, work.values["part_bytes"]), Mapper(steps_of(work.values["steps"]), work)
    records = empty = other = 0
    bad: list[Bad] = []
    for number, (record, done) in enumerate(read_shard(work, config)):
        if number % _EVERY == 0:
            work.report(done_bytes=done, documents=records, text_bytes=parts.text_bytes, dropped=mapper.num_dropped)
        document = parse(record, config)
        if document is None:
            continue
        records += 1
        if isinstance(document, Bad):
            bad.append(document)
            continue
        if isinstance(document, Skipped):
            mapper.account.add_raw(document.document)
            mapper.drop("read", document.document, document.why)
            continue
        mapper.account.add_raw(document)
        if document.is_empty:
            empty += 1
            mapper.account.add_lost(document, EMPTY)
        elif not is_wanted(document, config):
            other += 1
            mapper.account.add_lost(document, OTHER_LANGUAGE)
        elif (kept := mapper.apply(document, file=record.file, line=record.line)) is not None:
            parts.add(kept, record.held_out)
    parts.close()
    bad += mapper.failed
    if bad:
        lines = [json.dumps(dataclasses.asdict(one), ensure_ascii=False) + "\n" for one in bad]
        work.output(BAD).write_text("".join(lines), encoding="utf-8")
    return {
        "num_records": records,
        "num_empty": empty,
        "num_other_language": other,
        "num_bad": len(bad),
        "first_bad": str(bad[0]) if bad else "",
        "damaged": [str(one) for one in bad if one.damaged],
        "kept": sum(part["rows"] for part in parts.parts),
        "parts": parts.parts,
        **mapper.close(),
    }


def source_config(work: Work) -> SourceConfig:
    """The source's configuration with this task's files."""
    values = work.values["source"]
    files = () if values["kind"] == "python_stdlib" else tuple(one.path for one in work.inputs)
    return build(SourceConfig, {**values, "files": files})
