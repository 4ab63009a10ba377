"""The passes: one result for any shards, order, memory and number of kills, within the memory that is set."""

from __future__ import annotations

import random
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megafp8.corpus.dedup import passes, records
from megafp8.corpus.dedup.components import find_links
from megafp8.corpus.dedup.exact import Exact
from megafp8.corpus.dedup.minhash import MinHash
from megafp8.corpus.dedup.names import names_at, save_names
from megafp8.corpus.dedup.paragraphs import Paragraphs
from tests.unit.corpus.dedup.driver import drop_lists

MB = 1 << 20


def corpus(count: int, seed: int = 5) -> list[str]:
    """Texts of which about two thirds are copies, some with an edit, some with other white space."""
    rng = random.Random(seed)
    texts: list[str] = []
    for _ in range(count):
        if texts and rng.random() < 0.66:
            words = rng.choice(texts).split(" ")
            if rng.random() < 0.5:
                words[rng.randrange(len(words))] = str(rng.random())
            texts.append((" " if rng.random() < 0.7 else "\n\n").join(words))
        else:
            texts.append(" ".join(f"word{rng.randrange(50_000)}" for _ in range(rng.randrange(40, 160))))
    return texts


def dealt(texts: list[str], count: int, seed: int = 0) -> list[list[str]]:
    """The texts, in their order, in `count` shards of unequal sizes."""
    cuts = sorted(random.Random(seed).sample(range(1, len(texts)), count - 1))
    return [texts[a:b] for a, b in zip([0, *cuts], [*cuts, len(texts)])]


def dropped(result: list[tuple[np.ndarray, np.ndarray]], sizes: list[int]) -> dict[int, int]:
    """{place in the corpus: place of what is kept}."""
    starts = np.cumsum([0, *sizes])
    found = {}
    for shard, (rows, kept) in enumerate(result):
        assert rows.dtype == np.int64 and (np.diff(rows) > 0).all()
        shards, others = records.shards_and_rows(kept)
        found.update(zip((rows + starts[shard]).tolist(), (others + starts[shards]).tolist()))
    return found


@pytest.mark.parametrize("step", [Exact(), MinHash(), Paragraphs(min_characters=8)], ids=lambda step: step.name)
def test_one_result_for_any_shards_order_and_memory(step: Any, tmp_path: Path) -> None:
    texts = corpus(200)
    results = []
    for count, memory, order in ((1, 64 * MB, None), (3, 1 << 14, 1), (7, 1 << 15, 2), (7, 64 * MB, 3)):
        shards = dealt(texts, count)
        sizes = [step.records(shard, 0)[1] for shard in shards]
        folder = tmp_path / f"{count}-{memory}-{order}"
        results.append(dropped(drop_lists(step, shards, folder, memory, order), sizes))
        if memory == 1 << 14:  # so small that every pass really had several parts
            assert len(list(folder.glob("range*"))) > 1 and len(list(folder.glob("links/links*"))) > 1
    assert all(result == results[0] for result in results)
    assert len(results[0]) > 50 and all(kept < row and kept not in results[0] for row, kept in results[0].items())


def test_exact_duplicates_are_those_of_a_dictionary(tmp_path: Path) -> None:
    texts = corpus(1000, seed=6)
    first: dict[str, int] = {}
    expected = {}
    for at, text in enumerate(texts):
        twin = first.setdefault(" ".join(text.split()), at)
        if twin != at:
            expected[at] = twin
    shards = dealt(texts, 5)
    assert dropped(drop_lists(Exact(), shards, tmp_path, 1 << 14), [len(shard) for shard in shards]) == expected


def test_signatures_stay_valid_when_shards_are_added_in_front(tmp_path: Path) -> None:
    texts = corpus(60)
    assert passes.write_signatures(MinHash(), iter(texts), tmp_path / "s.npy", 64 * MB) == 60 * 14
    found = np.load(tmp_path / "s.npy")
    assert int(found["document"].max()) == 59 and (np.diff(found["key"].astype(object)) >= 0).all()


@pytest.mark.parametrize("step", [Exact(), MinHash()])
def test_signatures_are_the_same_in_any_memory_and_stay_within_it(step: Any, tmp_path: Path) -> None:
    texts = [f"a text of few words, number {i % 9000}" for i in range(10_000)]  # 2.2 MB of MinHash records
    record_bytes = step.dtype.itemsize * len(texts) * (14 if isinstance(step, MinHash) else 1)

    def peak(name: str, memory: int) -> int:
        return peak_of(lambda: passes.write_signatures(step, iter(texts), tmp_path / name, memory))

    count = passes.write_signatures(step, iter(texts), tmp_path / "at once.npy", 1 << 30)
    assert count * step.dtype.itemsize == record_bytes
    batch = peak_of(lambda: step.records(texts[:256], 0))
    limit = record_bytes // 2  # while records are sorted five times their bytes are held: ten runs
    assert peak("limited.npy", limit) <= limit + 2 * batch
    assert (tmp_path / "limited.npy").read_bytes() == (tmp_path / "at once.npy").read_bytes()
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("dtype", [records.BAND, records.TEXT])
def test_reduced_records_and_edges_are_those_of_a_dictionary(dtype: np.dtype) -> None:
    rng = np.random.default_rng(8)
    some = np.empty(5000, dtype)
    some["key"] = rng.integers(0, 300, 5000, dtype=np.uint64) << np.uint64(50)
    some["document"] = rng.integers(0, 700, 5000)
    if "low" in some.dtype.names:
        some["low"] = rng.integers(0, 3, 5000)
    first: dict[tuple[int, ...], int] = {}
    edges = set()
    for *key, document in sorted(some.tolist()):
        twin = first.setdefault(tuple(key), document)
        if twin != document:
            edges.add((document, twin))
    heads, found = records.reduce_records(records.sort_records(some))
    assert {tuple(key): document for *key, document in heads.tolist()} == first
    assert found.tolist() == sorted(edges)


def test_keys_of_which_one_half_agrees_are_not_the_same() -> None:
    some = np.array([(1, 2, 0), (1, 3, 1), (4, 2, 2), (1, 2, 3)], records.TEXT)
    heads, edges = records.reduce_records(records.sort_records(some))
    assert len(heads) == 3 and edges.tolist() == [(3, 0)]


def synthetic(rng: np.random.Generator, shard_records: int, keys: int) -> np.ndarray:
    """Sorted records of a shard: every other key is one of `keys`, so that shards share them."""
    some = np.empty(shard_records, records.BAND)
    some["key"] = rng.integers(0, 2**64, shard_records, dtype=np.uint64)
    some["key"][::2] = (rng.integers(0, keys, len(some[::2])) + 1).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    some["document"] = np.arange(shard_records) // 14
    return records.sort_records(some)


def peak_of(work: Callable[[], Any]) -> int:
    """Bytes that Python and numpy held at most during `work`; mapped files do not count."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def check_memory(folder: Path, num_records: int, memory_bytes: int, shards: int) -> None:
    rng, signed = np.random.default_rng(9), []
    for shard in range(shards):
        signed.append(folder / f"signed{shard}.npy")
        records.save(signed[-1], synthetic(rng, num_records // shards, num_records // 8))
    groups = passes.groups([path.stat().st_size for path in signed], memory_bytes)
    runs = [folder / f"run{at}.npy" for at in range(len(groups))]
    edges = [folder / f"edges{at}.npy" for at in range(len(groups))]
    for group, run, out in zip(groups, runs, edges):
        some = [(shard, signed[shard]) for shard in group]
        assert peak_of(lambda some=some, run=run, out=out: passes.partition(some, run, out)) <= memory_bytes
    count = passes.num_ranges(sum(path.stat().st_size for path in runs), memory_bytes)
    for at in range(count):
        edges.append(folder / f"range{at}.npy")
        assert peak_of(lambda at=at: passes.find_edges(runs, at, count, edges[-1])) <= memory_bytes
    num_edges = sum(len(records.load(path)) for path in edges)
    assert len(groups) > 3 and count > 3 and num_edges > num_records // 8  # enough of all to say something
    assert peak_of(lambda: find_links(edges, folder / "links", memory_bytes)) <= memory_bytes


def test_memory_stays_within_the_setting(tmp_path: Path) -> None:
    """1.1 million records are 18 MB; all passes get 8 MB."""
    check_memory(tmp_path, 1_100_000, 8 * MB, shards=40)


@pytest.mark.slow
def test_memory_stays_within_the_setting_for_ten_million_records(tmp_path: Path) -> None:
    """160 MB of records; all passes get 48 MB."""
    check_memory(tmp_path, 10_000_000, 48 * MB, shards=100)


def test_a_key_of_all_documents_needs_no_more_memory(tmp_path: Path) -> None:
    """Runs hold one record of it each, and a bucket one smallest neighbour of each node."""
    edges = []
    for shard in range(40):
        some = np.zeros(14_000, records.BAND)
        some["document"] = np.arange(14_000)
        records.save(tmp_path / "signed.npy", some)
        edges.append(tmp_path / f"edges{shard}.npy")
        passes.partition([(shard, tmp_path / "signed.npy")], tmp_path / f"run{shard}.npy", edges[-1])
    runs = [tmp_path / f"run{shard}.npy" for shard in range(40)]
    assert {len(records.load(run)) for run in runs} == {1}
    edges.append(tmp_path / "range.npy")
    passes.find_edges(runs, 0, 1, edges[-1])
    assert peak_of(lambda: find_links(edges, tmp_path / "links", 8 * MB)) <= 8 * MB  # 560,000 nodes, one neighbour
    rows = [passes.drop_list(shard, sorted((tmp_path / "links").glob("*"))) for shard in (0, 39)]
    assert [len(one) for one, _ in rows] == [13_999, 14_000] and not rows[1][1].any()


KILLED = """
import sys
from pathlib import Path
from megafp8.corpus.dedup import passes
from megafp8.corpus.dedup.components import find_links
folder = Path(sys.argv[1])
signed = sorted(folder.glob("signed*.npy"))
print("begin", flush=True)
passes.partition(list(enumerate(signed)), folder / "run.npy", folder / "edges.npy")
find_links([folder / "edges.npy"], folder / "links", 1 << 20)
print("end", flush=True)
"""


def test_killed_passes_run_again_give_the_same_files(tmp_path: Path) -> None:
    """Killed at four moments between the first byte and the last, in one folder; files are whole or not there."""
    rng = np.random.default_rng(10)
    for shard in range(4):
        records.save(tmp_path / f"signed{shard}.npy", synthetic(rng, 50_000, 25_000))

    def run(seconds: float | None) -> float:
        command = [sys.executable, "-c", KILLED, str(tmp_path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None and process.stdout.readline() == "begin\n"
            begun = time.monotonic()
            if seconds is None:
                assert process.stdout.readline() == "end\n"
                return time.monotonic() - begun
            time.sleep(seconds)
            process.kill()
        return 0.0

    def files() -> dict[str, bytes]:
        return {str(path.relative_to(tmp_path)): path.read_bytes() for path in sorted(tmp_path.rglob("*.npy"))}

    whole = run(None)
    expected = files()
    for part in range(4):
        run(whole * part / 4)
        assert all(expected[name] == data for name, data in files().items())
    run(None)
    assert files() == expected


def test_ids_are_found_by_row(tmp_path: Path) -> None:
    ids = ["a", "", "日本/1", "x" * 1000, "\udcff", "new\nline"]
    save_names(tmp_path / "names.npy", ids)
    rows = np.array([4, 0, 2, 5, 1, 3])
    assert names_at(tmp_path / "names.npy", rows) == [ids[row] for row in rows]
    save_names(tmp_path / "none.npy", [])
    assert names_at(tmp_path / "none.npy", np.empty(0, np.int64)) == []


def test_limits_of_numbers() -> None:
    assert records.number(3, 5) == (3 << 32) + 5
    for shard, row in ((1 << 32, 0), (0, 1 << 32), (-1, 0)):
        with pytest.raises(ValueError, match="below"):
            records.number(shard, row)
    assert passes.key_range(2, 3)[1] == 1 << 64 and passes.key_range(0, 7)[1] == passes.key_range(1, 7)[0]


def test_groups_hold_each_shard_once_in_order() -> None:
    groups = passes.groups([10, 10, 500, 10, 10, 10], 30 * passes.COPIES)
    assert groups == [range(2), range(2, 3), range(3, 6)]
    assert passes.groups([], 100) == []
