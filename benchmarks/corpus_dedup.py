"""Deduplication: documents and megabytes of text a CPU second, pass by pass, and datasketch beside them.

    python -m benchmarks.corpus_dedup FILE.jsonl[.zst|.gz] ... [--megabytes N] [--peer]

One process, one thread. Reading is not timed. The peer (`pip install datasketch`) gets every tenth text,
as 5-grams of words or kana and kanji made in Python, with the same number of values; it only computes signatures.
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from megafp8.corpus.compressed import InputStream
from megafp8.corpus.dedup import passes
from megafp8.corpus.dedup.components import find_links
from megafp8.corpus.dedup.exact import Exact
from megafp8.corpus.dedup.minhash import MinHash
from megafp8.corpus.dedup.paragraphs import Paragraphs
from megafp8.corpus.dedup.shingles import shingles

_MEMORY = 1 << 28
_SHARD = 1000  # documents
_TOKEN = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]|[^\W\u3040-\u30ff\u3400-\u9fff]+")  # as in `shingles`
T = TypeVar("T")


def texts_of(files: Sequence[str], num_bytes: int) -> list[str]:
    """Texts of JSON lines, up to so many bytes, of all files alike."""
    found = []
    for file in files:
        left = num_bytes // len(files)
        with InputStream(file) as stream:
            while left > 0 and (line := stream.reader.readline()):
                found.append(json.loads(line)["text"])
                left -= len(found[-1].encode("utf-8", "surrogatepass"))
    return found


def timed(work: Callable[[], T]) -> tuple[float, T]:
    """CPU seconds of this process, and the result."""
    start = time.process_time()
    result = work()
    return time.process_time() - start, result


def report(name: str, seconds: float, documents: int, num_bytes: int) -> float:
    """Print a line; returns MB a CPU second."""
    rate = num_bytes / seconds / 1e6
    print(f"  {name:34s} {documents / seconds:10,.0f} documents/cpu-s {rate:8.1f} MB/cpu-s {seconds:7.2f} s")
    return rate


def measure(step: Any, texts: Sequence[str], num_bytes: int, folder: Path) -> float:
    """All passes of one kind of duplicate; returns MB a CPU second of signatures."""
    shards = [texts[at : at + _SHARD] for at in range(0, len(texts), _SHARD)]
    signed = [folder / f"signed{at}.npy" for at in range(len(shards))]
    seconds, counts = timed(
        lambda: [passes.write_signatures(step, shard, path, _MEMORY) for shard, path in zip(shards, signed)]
    )
    print(f"{step.name}: {sum(counts):,} records")
    rate = report("signatures", seconds, len(texts), num_bytes)

    def rest() -> int:
        groups = passes.groups([path.stat().st_size for path in signed], _MEMORY)
        runs = [folder / f"run{at}.npy" for at in range(len(groups))]
        edges = [folder / f"edges{at}.npy" for at in range(len(groups))]
        for group, run, out in zip(groups, runs, edges):
            passes.partition([(shard, signed[shard]) for shard in group], run, out)
        count = passes.num_ranges(sum(path.stat().st_size for path in runs), _MEMORY)
        for at in range(count):
            edges.append(folder / f"range{at}.npy")
            passes.find_edges(runs, at, count, edges[-1])
        links = find_links(edges, folder / "links", _MEMORY)
        return sum(len(passes.drop_list(shard, links)[0]) for shard in range(len(shards)))

    seconds, dropped = timed(rest)
    report(f"all later passes, {dropped:,} {step.unit}s dropped", seconds, len(texts), num_bytes)
    return rate


def peer(step: MinHash, texts: Sequence[str]) -> float:
    """Signatures by datasketch; MB a CPU second."""
    datasketch = importlib.import_module("datasketch")
    some = texts[::10]
    num_bytes = sum(len(text.encode("utf-8", "surrogatepass")) for text in some)

    def work() -> None:
        for text in some:
            words = _TOKEN.findall(text.lower())
            grams = {" ".join(words[at : at + step.words]) for at in range(max(1, len(words) - step.words + 1))}
            sketch = datasketch.MinHash(num_perm=step.bands * step.rows, seed=step.seed)
            sketch.update_batch([gram.encode("utf-8", "surrogatepass") for gram in grams])

    return report(f"datasketch {datasketch.__version__}, signatures", timed(work)[0], len(some), num_bytes)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; 0 if all went well."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", help="JSON lines with a key `text`")
    parser.add_argument("--megabytes", type=int, default=32, help="of text, of all files together")
    parser.add_argument("--peer", action="store_true", help="datasketch too, which has to be installed")
    options = parser.parse_args(arguments)
    texts = texts_of(options.files, options.megabytes * 1_000_000)
    num_bytes = sum(len(text.encode("utf-8", "surrogatepass")) for text in texts)
    print(f"{len(texts):,} documents, {num_bytes / 1e6:.1f} MB of text")
    step = MinHash()
    batches = [texts[at : at + 64] for at in range(0, len(texts), 64)]
    shingles(["warm"], 5, 5)
    seconds, _ = timed(lambda: [shingles(batch, step.words, step.characters) for batch in batches])
    report("shingles alone", seconds, len(texts), num_bytes)
    rates = {}
    for kind in (Exact(), step, Paragraphs()):
        with tempfile.TemporaryDirectory() as folder:
            rates[kind.name] = measure(kind, texts, num_bytes, Path(folder))
    if options.peer:
        print(f"minhash signatures: {rates['minhash'] / peer(step, texts):.1f} x datasketch")
    return 0


if __name__ == "__main__":
    sys.exit(main())
