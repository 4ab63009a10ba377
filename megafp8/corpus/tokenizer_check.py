"""Before a corpus is tokenized: does its text come back from the tokenizer? With figures for the manifest."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from megafp8.core.errors import DataError
from megafp8.core.log import event, get_logger
from megafp8.corpus.compressed import is_plain
from megafp8.corpus.config import CorpusConfig
from megafp8.corpus.fertility import ALWAYS, Fertility, lost_probes
from megafp8.corpus.tasks import Task
from megafp8.data.tokenizer import Tokenizer

_log = get_logger(__name__)
MAX_PARTS = 32  # or shards, that are looked into, evenly spread over the corpus
COMPRESSION = 3.5  # text for each byte of gzip or zstd, about
_SAMPLE_BYTES = 1_000_000  # of text that are encoded in all
_SHARED = ("tokenizer", "source", "first_line", "held_out")  # what of the values of `tokenize` decides a sample
_TRAINED = "turn tokenizer.byte_fallback on, or allow it with --tokenizer.max_lossy_share"
_WAY_OUT = (
    "choose a tokenizer that keeps text (byte-level, or with byte fallback and no normalization), let a `normalise` "
    "step make of the text what it keeps, or allow it with --tokenizer.max_lossy_share"
)


def check_tasks(tasks: Sequence[Task], seed: int) -> list[Task]:
    """A task for each of at most 32 of `tokenize`, on the same input, in which 0.5 to 1 MB are looked at together."""
    count = min(len(tasks), MAX_PARTS)
    chosen = [tasks[number * len(tasks) // count] for number in range(count)]
    size = sum(map(_text_bytes, chosen))
    halvings = math.ceil(math.log2(max(1.0, size / _SAMPLE_BYTES)))  # so that a growing corpus checks little anew
    more = {"limit": 2 ** (64 - halvings), "seed": (seed + 2) % 2**64}
    return [
        Task("check", task.name, {name: task.values[name] for name in _SHARED if name in task.values} | more,
             task.inputs, task.hints, task.num_bytes)
        for task in chosen
    ]  # fmt: skip


def _text_bytes(task: Task) -> float:
    """About how much text a task has: of a part that is known, a shard may be compressed."""
    packed = "source" in task.values and not is_plain(task.inputs[0].path)
    return task.num_bytes * (COMPRESSION if packed else 1.0)


def probe(spec: str, tokenizer: Tokenizer, max_lossy_share: float) -> None:
    """Say what kinds of text a tokenizer does not give back.

    Raises:
        DataError: it loses what stands in every corpus, and nothing may be lost.
    """
    names = lost_probes(tokenizer)
    if not names:
        return
    event(_log, "tokenizer does not give back", level=30, tokenizer=spec, what=", ".join(names))
    if (always := [name for name in ALWAYS if name in names]) and not max_lossy_share:
        raise DataError(f"{spec}: does not give back the text it encodes ({', '.join(always)}); {_WAY_OUT}")


def figures(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """`Fertility.figures` of all records of `check`."""
    found = Fertility()
    for record in filter(None, records):  # a task that was set aside stops the run later, by its name
        found.add_json(record["counts"])
    return found.figures()


def judge(report: Mapping[str, Any], config: CorpusConfig) -> None:
    """Say how many documents of `figures` do not come back.

    Raises:
        DataError: more than allowed.
    """
    total = report["all"]
    if not (lossy := total["lossy_documents"]):
        return
    unknown = f" ({total['unknown_tokens']:,} unknown pieces)" if total["unknown_tokens"] else ""
    what = f"{lossy:,} of {total['documents']:,} sampled documents{unknown}, first: {report['first_loss']}"
    if lossy > config.tokenizer.max_lossy_share * total["documents"]:
        path = config.tokenizer.path
        name, way_out = (path, _WAY_OUT) if path else ("the tokenizer trained here", _TRAINED)
        raise DataError(f"{name}: does not give back the text of {what}; {way_out}")
    event(_log, "tokenizer loses text", level=30, documents=what)
