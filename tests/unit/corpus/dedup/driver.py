"""The passes of `megafp8.corpus.dedup` one after another in one process, as the stages of a corpus run them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megafp8.corpus.dedup import passes
from megafp8.corpus.dedup.components import find_links


def drop_lists(
    step: Any, shards: Sequence[Sequence[str]], folder: Path, memory_bytes: int = 1 << 24, order: int | None = None
) -> list[tuple[np.ndarray, np.ndarray]]:
    """(rows, kept) of each shard; `order` seeds the order in which the tasks of each pass run and see their inputs."""
    dice = random.Random(order)

    def shuffled(values: Sequence[Any]) -> list[Any]:
        return list(values) if order is None else dice.sample(list(values), len(values))

    folder.mkdir(parents=True, exist_ok=True)
    signed = [folder / f"signed{at}.npy" for at in range(len(shards))]
    for at in shuffled(range(len(shards))):
        passes.write_signatures(step, shards[at], signed[at], memory_bytes)
    groups = passes.groups([path.stat().st_size for path in signed], memory_bytes)
    runs = [folder / f"run{at}.npy" for at in range(len(groups))]
    edges = [folder / f"edges{at}.npy" for at in range(len(groups))]
    for at in shuffled(range(len(groups))):
        passes.partition(shuffled([(shard, signed[shard]) for shard in groups[at]]), runs[at], edges[at])
    count = passes.num_ranges(sum(path.stat().st_size for path in runs), memory_bytes)
    for at in shuffled(range(count)):
        edges.append(folder / f"range{at}.npy")
        passes.find_edges(shuffled(runs), at, count, edges[-1])
    links = find_links(shuffled(edges), folder / "links", memory_bytes)
    return [passes.drop_list(shard, shuffled(links)) for shard in range(len(shards))]
