"""Before a corpus is tokenized: does its text come back from the tokenizer? With figures for the manifest."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from megafp8.core.errors import DataError
from megafp8.core.log import event, get_logger
from megafp8.corpus.config import CorpusConfig
from megafp8.corpus.fertility import ALWAYS, Fertility, lost_probes
from megafp8.corpus.parts import View
from megafp8.corpus.tasks import Task
from megafp8.data.tokenizer import Tokenizer

_log = get_logger(__name__)
MAX_PARTS = 32  # that are looked into, evenly spread over the corpus
_SAMPLE_BYTES = 1_000_000  # of text that are encoded in all
_TRAINED = "turn tokenizer.byte_fallback on, or allow it with --tokenizer.max_lossy_share"
_WAY_OUT = (
    "choose a tokenizer that keeps text (byte-level, or with byte fallback and no normalization), let a `normalise` "
    "step make of the text what it keeps, or allow it with --tokenizer.max_lossy_share"
)


def check_tasks(views: Sequence[View], spec: str, fingerprint: str, seed: int) -> list[Task]:
    """A task for each of at most 32 parts, in which 0.5 to 1 MB are looked at together."""
    count = min(len(views), MAX_PARTS)
    chosen = [views[number * len(views) // count] for number in range(count)]
    size = sum(view.text_bytes for view in chosen)
    halvings = math.ceil(math.log2(max(1.0, size / _SAMPLE_BYTES)))  # so that a growing corpus checks little anew
    limit = 2 ** (64 - halvings)
    values = {"tokenizer": fingerprint, "limit": limit, "seed": (seed + 2) % 2**64}
    return [Task("check", v.part.path, values, v.inputs, {"tokenizer": spec}, v.text_bytes) for v in chosen]


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


def judge(spec: str, report: Mapping[str, Any], config: CorpusConfig) -> None:
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
        name, way_out = (spec, _WAY_OUT) if config.tokenizer.path else ("the tokenizer trained here", _TRAINED)
        raise DataError(f"{name}: does not give back the text of {what}; {way_out}")
    event(_log, "tokenizer loses text", level=30, documents=what)
