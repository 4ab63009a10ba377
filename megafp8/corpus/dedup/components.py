"""Edges between duplicates -> for each document the smallest of its connected component, on disk.

Large-star and small-star in turn (Kiveris et al. 2014, "Connected components in MapReduce and beyond", algorithms 1
and 2) until nothing changes: every edge then points from a document to the smallest of its component. Edges lie in
buckets by a hash of the node that they are grouped by; of a bucket memory holds one smallest neighbour a node and a
chunk of edges, so that neither a document with a million copies nor the number of edges matters, only the number of
buckets. Neither star makes edges more in number, and the small one makes
one of those that are there several times.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from megafp8.core.errors import ConfigError
from megafp8.corpus.dedup import records as rec
from megafp8.corpus.dedup.shingles import mix

NODE_BYTES = 200  # memory for each edge of a bucket at the worst, when no two share a node (measured, see the tests)
_MIN_CHUNK, _MAX_CHUNK = 1 << 10, 1 << 20  # edges; larger ones do not fit into the CPU's caches
_MAX_BUCKETS = (1 << 16) - 1


class _Buckets:
    """Edges on disk, grouped by a hash of their first node."""

    def __init__(self, folder: Path, count: int, chunk: int) -> None:
        self._folder, self.count, self.chunk = folder, count, chunk
        folder.mkdir()

    def add_both(self, edges: np.ndarray) -> None:
        """Append edges and their reverses."""
        self.add(edges)
        self.add(_edges(edges["kept"], edges["document"]))

    def add(self, edges: np.ndarray) -> None:
        """Append edges."""
        which = (mix(edges["document"].copy()) % np.uint64(self.count)).astype(np.uint16)
        order = np.argsort(which, kind="stable")
        bounds = np.searchsorted(which[order], np.arange(self.count + 1))
        for bucket in np.flatnonzero(np.diff(bounds)):
            with open(self._folder / f"{bucket:05d}", "ab") as file:
                edges[order[bounds[bucket] : bounds[bucket + 1]]].tofile(file)

    def read(self, bucket: int) -> Iterator[np.ndarray]:
        """A bucket's edges in chunks."""
        path = self._folder / f"{bucket:05d}"
        if path.exists():
            with open(path, "rb") as file:
                while len(edges := np.fromfile(file, rec.EDGE, self.chunk)):
                    yield edges

    def smallest(self, bucket: int) -> np.ndarray:
        """For each node of a bucket, in order, its smallest neighbour, as edges."""
        found, waiting, size = np.empty(0, rec.EDGE), [], 0
        for edges in self.read(bucket):
            waiting.append(rec.least_edges(edges))
            size += len(waiting[-1])
            if size > len(found):  # so that each edge is merged a few times only
                found, waiting, size = rec.least_edges(np.concatenate([found, *waiting])), [], 0
        return rec.least_edges(np.concatenate([found, *waiting])) if waiting else found

    def remove(self) -> None:
        """Delete the files."""
        shutil.rmtree(self._folder)


def _edges(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    edges = np.empty(len(first), rec.EDGE)
    edges["document"], edges["kept"] = first, second
    return edges


def _large_star(edges: _Buckets, out: _Buckets) -> int:
    """Each larger neighbour of a node is tied to the smallest of node and neighbours. Returns edges that changed.

    `edges` holds both directions of each edge; `out` gets each once, grouped by the larger end.
    """
    changed = 0
    for bucket in range(edges.count):
        nearest = edges.smallest(bucket)
        for some in edges.read(bucket):
            some = some[some["kept"] > some["document"]]
            node = some["document"]
            least = np.minimum(nearest["kept"][np.searchsorted(nearest["document"], node)], node)
            changed += int((least != node).sum())
            out.add(_edges(some["kept"], least))
    return changed


def _small_star(edges: _Buckets, out: _Buckets) -> int:
    """A node and its smaller neighbours are tied to the smallest of these. Returns edges that changed.

    `edges` are grouped by the larger end; `out` gets both directions.
    """
    changed = 0
    for bucket in range(edges.count):
        nearest = edges.smallest(bucket)
        for at in range(0, len(nearest), edges.chunk):
            out.add_both(nearest[at : at + edges.chunk])
        for some in edges.read(bucket):
            least = nearest["kept"][np.searchsorted(nearest["document"], some["document"])]
            other = some["kept"] != least
            changed += int(other.sum())
            out.add_both(_edges(some["kept"][other], least[other]))
    return changed


def num_buckets(num_edges: int, memory_bytes: int) -> int:
    """Into how many buckets so many edges go; both directions count.

    Raises:
        ConfigError: they would be more than 65,535.
    """
    count = max(1, -(-2 * num_edges * NODE_BYTES // memory_bytes), min(_MAX_BUCKETS, 2 * num_edges // _MAX_CHUNK))
    if count > _MAX_BUCKETS:
        least = -(-2 * num_edges * NODE_BYTES // _MAX_BUCKETS)
        raise ConfigError(
            f"executor.memory_bytes = {memory_bytes}: too little for {num_edges} pairs of duplicates; at least {least}"
        )
    return count


def find_links(edges: Sequence[Path], folder: Path, memory_bytes: int) -> list[Path]:
    """Links of all documents that are not the smallest of their component, in files of `folder`, which is emptied.

    Args:
        edges: files of edges, in any order; a document may be in many.

    Returns:
        Files sorted by document, each document in one of them. Together they do not depend on `memory_bytes`.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    count = num_buckets(sum(len(rec.load(path)) for path in edges), memory_bytes)
    chunk = max(_MIN_CHUNK, min(_MAX_CHUNK, memory_bytes // (2 * NODE_BYTES)))
    stars, stage, changed = _Buckets(folder / "stage0", count, chunk), 0, 1
    for path in edges:
        found = rec.load(path)
        for at in range(0, len(found), chunk):
            stars.add_both(np.array(found[at : at + chunk]))
    while changed:
        stage += 1
        half = _Buckets(folder / f"half{stage}", count, chunk)
        changed = _large_star(stars, half)
        stars.remove()
        stars = _Buckets(folder / f"stage{stage}", count, chunk)
        changed += _small_star(half, stars)
        half.remove()
    return _write_links(stars, folder)


def _write_links(stars: _Buckets, folder: Path) -> list[Path]:
    paths = []
    for bucket in range(stars.count):
        links = stars.smallest(bucket)
        links = links[links["document"] > links["kept"]]
        if len(links):
            paths.append(folder / f"links{bucket:05d}.npy")
            rec.save(paths[-1], links)
    stars.remove()
    return paths
