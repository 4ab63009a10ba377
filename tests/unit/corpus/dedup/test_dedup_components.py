"""Connected components on disk against union-find in memory."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from megafp8.core.errors import ConfigError
from megafp8.corpus.dedup import records
from megafp8.corpus.dedup.components import find_links, num_buckets


def union_find(edges: list[tuple[int, int]]) -> dict[int, int]:
    parent: dict[int, int] = {}

    def root(node: int) -> int:
        while parent.setdefault(node, node) != node:
            parent[node] = parent[parent[node]]
            node = parent[node]
        return node

    for a, b in edges:
        low, high = sorted((root(a), root(b)))
        parent[high] = low
    return {node: root(node) for node in parent if root(node) != node}


def links(edges: list[tuple[int, int]], folder: Path, memory_bytes: int, files: int = 3) -> dict[int, int]:
    folder.mkdir()
    paths = []
    for at in range(files):
        some = np.array([(max(e), min(e)) for e in edges[at::files]], records.EDGE)
        paths.append(folder / f"edges{at}.npy")
        records.save(paths[-1], some)
    found: dict[int, int] = {}
    for path in find_links(paths, folder / "links", memory_bytes):
        some = records.load(path)
        assert (np.diff(some["document"].astype(object)) > 0).all()
        assert not set(some["document"].tolist()) & set(found)
        found.update(some.tolist())
    assert all(path.suffix == ".npy" for path in (folder / "links").iterdir())  # nothing else is left
    return found


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("memory_bytes", [1 << 16, 1 << 26])
def test_random_graphs(seed: int, memory_bytes: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    nodes = [rng.randrange(1 << 63) for _ in range(1500)]
    edges = [tuple(rng.sample(nodes, 2)) for _ in range(rng.randrange(1, 1600))]
    assert links(edges, tmp_path / "x", memory_bytes) == union_find(edges)  # type: ignore[arg-type]


def test_chains_and_stars(tmp_path: Path) -> None:
    rng = random.Random(1)
    order = list(range(1500))
    chain = list(pairwise(order))
    rng.shuffle(order)
    tangled = [(a + 10_000, b + 10_000) for a, b in pairwise(order)]
    star = [(50_000, 60_000 + i) for i in range(1500)]
    hub = [(90_000, 80_000 + i) for i in range(1500)]  # the middle is the largest
    edges = chain + tangled + star + hub
    rng.shuffle(edges)
    found = links(edges, tmp_path / "x", 1 << 17)
    assert found == union_find(edges)
    assert set(found.values()) == {0, 10_000, 50_000, 80_000}


def test_no_edges(tmp_path: Path) -> None:
    assert links([], tmp_path / "x", 1 << 20) == {}


def test_memory_that_is_far_too_small_is_refused_with_what_is_enough() -> None:
    with pytest.raises(
        ConfigError, match=r"executor.memory_bytes = 4096: too little for 1000000 pairs.* at least 6104"
    ):
        num_buckets(1_000_000, 4096)
    assert num_buckets(1_000_000, 6104) <= 65_535
