"""Records of several parts -> `run.npy` with one record a key, and `edges.npy` of the others to it."""

from __future__ import annotations

from megafp8.corpus.dedup import passes
from megafp8.corpus.tasks import Work

VERSION = 1
RUN, EDGES = "run.npy", "edges.npy"


def run(work: Work) -> dict[str, int]:
    """Nothing to count; `values["first"]` is the number of the first part."""
    first = work.values["first"]
    shards = [(first + number, work.checked(number)) for number in range(len(work.inputs))]
    passes.partition(shards, work.output(RUN), work.output(EDGES))
    return {}
