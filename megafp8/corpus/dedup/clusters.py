"""How large the clusters of duplicates are, and who is in the largest, from the links that say what stays of each.

A cluster is a document that stays and all that go for it. Memory is bounded: links are looked at in ranges of a hash of
the document that stays, each small enough to be counted at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megafp8.corpus.dedup import records as rec
from megafp8.corpus.dedup.names import names_at

_LARGEST, _MEMBERS = 10, 4  # clusters that are named, and members of each
_COPIES = 4  # of a range's numbers that counting holds at once
_MIX = np.uint64(0x9E3779B97F4A7C15)  # Fibonacci hashing (Knuth, The Art of Computer Programming 3, section 6.4)


def summary(links: Sequence[Path], names: Sequence[Path], memory_bytes: int) -> dict[str, Any]:
    """Sizes of all clusters, and the largest by id.

    Args:
        links: files of `components.find_links`.
        names: the file with the ids of each shard (`names.save_names`).

    Returns:
        `num_clusters`, `num_duplicates`, `sizes` {documents, the one that stays too: clusters} and `largest`: `size`,
        `kept` and `members` (ids of the first few that go).
    """
    total = sum(len(rec.load(path)) for path in links)
    count = max(1, -(-total * 8 * _COPIES // memory_bytes))
    sizes: Counter[int] = Counter()
    largest: list[tuple[int, int]] = []  # (-size, number of the document that stays)
    for at in range(count):
        kept, copies = np.unique(_kept_in(links, at, count), return_counts=True)
        found, clusters = np.unique(copies, return_counts=True)
        sizes.update(dict(zip((found + 1).tolist(), clusters.tolist())))
        top = np.lexsort((kept, -copies))[:_LARGEST]
        largest += zip((-1 - copies[top]).tolist(), kept[top].tolist())
        largest = sorted(largest)[:_LARGEST]
    return {
        "num_clusters": sum(sizes.values()),
        "num_duplicates": total,
        "sizes": {str(size): clusters for size, clusters in sorted(sizes.items())},
        "largest": _named(largest, links, names),
    }


def _kept_in(links: Sequence[Path], at: int, count: int) -> np.ndarray:
    """Of all links what stays, those of range `at` of `count`."""
    pieces = []
    for path in links:
        kept = np.array(rec.load(path)["kept"])
        pieces.append(kept if count == 1 else kept[((kept * _MIX) >> np.uint64(32)) % np.uint64(count) == at])
    return np.concatenate([np.empty(0, "<u8"), *pieces])


def _named(largest: list[tuple[int, int]], links: Sequence[Path], names: Sequence[Path]) -> list[dict[str, Any]]:
    wanted = np.array([kept for _, kept in largest], "<u8")
    members: dict[int, list[int]] = {kept: [] for _, kept in largest}
    for path in links:
        found = rec.load(path)
        mine = np.array(found[np.isin(found["kept"], wanted)])
        for document, kept in zip(mine["document"].tolist(), mine["kept"].tolist()):
            members[kept] = sorted([*members[kept], document])[:_MEMBERS]
    return [
        {"size": -size, "kept": _name(names, kept), "members": [_name(names, one) for one in members[kept]]}
        for size, kept in largest
    ]


def _name(names: Sequence[Path], number: int) -> str:
    shards, rows = rec.shards_and_rows(np.array([number], "<u8"))
    return names_at(names[int(shards[0])], rows)[0]
