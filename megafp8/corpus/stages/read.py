"""Input shard -> kept documents: reads, parses, and runs the steps up to the first global one.

Outputs: parts (`NNNNN.docs.zst`), `bad.jsonl` (quarantined records), `dropped.zst` (documents that are not kept, with
step and reason).
"""

from __future__ import annotations

from typing import Any

from megafp8.core.config import build
from megafp8.corpus.config import SourceConfig
from megafp8.corpus.documents import Bad, Skipped, is_wanted, parse
from megafp8.corpus.figures import EMPTY, OTHER_LANGUAGE
from megafp8.corpus.mapping import Mapper, steps_of
from megafp8.corpus.parts import PartWriter
from megafp8.corpus.quarantine import Quarantine
from megafp8.corpus.shards import read_shard
from megafp8.corpus.tasks import Work

VERSION = 4
_EVERY = 256  # records between reports


def run(work: Work) -> dict[str, Any]:
    """Counts by outcome; `num_records` is the sum of bad, empty, other_language, dropped and kept."""
    config, quarantine = source_config(work), Quarantine(work)
    parts = PartWriter(work, work.values["part_bytes"])
    mapper = Mapper(steps_of(work.values["steps"]), work, quarantine)
    records = empty = other = 0
    for number, (record, done) in enumerate(read_shard(work, config)):
        if number % _EVERY == 0:
            work.report(done_bytes=done, documents=records, text_bytes=parts.text_bytes, dropped=mapper.num_dropped)
        document = parse(record, config)
        if document is None:
            continue
        records += 1
        quarantine.seen(record.file)
        if isinstance(document, Bad):
            quarantine.add(document)
            continue
        if isinstance(document, Skipped):
            mapper.account.add_raw(document.document)
            mapper.drop("read", document.document, document.why)
            continue
        mapper.account.add_raw(document)
        if document.is_empty:
            empty += 1
            mapper.leave_out(document, EMPTY)
        elif not is_wanted(document, config):
            other += 1
            mapper.leave_out(document, OTHER_LANGUAGE)
        elif (kept := mapper.apply(document, file=record.file, line=record.line)) is not None:
            parts.add(kept, record.held_out)
    parts.close()
    return {
        "num_records": records,
        "num_empty": empty,
        "num_other_language": other,
        "kept": sum(part["rows"] for part in parts.parts),
        "parts": parts.parts,
        **quarantine.close(),
        **mapper.close(),
    }


def source_config(work: Work) -> SourceConfig:
    """The source's configuration with this task's files."""
    values = work.values["source"]
    files = () if values["kind"] == "python_stdlib" else tuple(one.path for one in work.inputs)
    return build(SourceConfig, {**values, "files": files})
