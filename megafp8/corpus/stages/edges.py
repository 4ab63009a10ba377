"""A range of keys of all runs -> `edges.npy`: duplicates between parts that were not looked at together."""

from __future__ import annotations

from megafp8.corpus.dedup import passes
from megafp8.corpus.stages.partition import EDGES
from megafp8.corpus.tasks import Work

VERSION = 1


def run(work: Work) -> dict[str, int]:
    """Nothing to count; `values` say which range of how many."""
    at, count = work.values["at"], work.values["count"]
    # each range reads its own part of every run: to compare whole files once is enough, and costs once their bytes
    runs = [work.path(number) if at else work.checked(number) for number in range(len(work.inputs))]
    passes.find_edges(runs, at, count, work.output(EDGES))
    return {}
