"""A flipped bit in what lies between the stages: made again, or said; never in the corpus."""

from __future__ import annotations

import itertools
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megafp8.core.errors import DataError
from megafp8.corpus.run import preprocess

SETTINGS = {"tokenizer": {"path": "bytes"}, "executor": {"shard_bytes": 20_000, "part_bytes": 30_000}}
STEPS = [{"kind": "length", "min_characters": 60}, {"kind": "exact"}]
# stages from the last to the first: with those of a cut gone, the outputs of the one before are read again
CUTS = ((), ("write",), ("write", "tokenize"), ("write", "tokenize", "map", "links"),
        ("write", "tokenize", "map", "links", "edges", "partition", "signatures", "check"))  # fmt: skip


def flipped(folder: Path, kept: Path, rng: random.Random, choose: Callable[[list[Path]], Path]) -> Iterator[Path]:
    """A folder without its manifest and its last stages, with one bit of one file between stages changed."""
    for stages in itertools.cycle(CUTS):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(kept, folder)
        (folder / "manifest.json").unlink()
        for stage in stages:
            shutil.rmtree(folder / "stages" / stage, ignore_errors=True)
        files = [path for path in sorted((folder / "stages").glob("*/*")) if path.is_file() and path.stat().st_size]
        path = choose(files)
        data = bytearray(path.read_bytes())
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(bytes(data))
        yield path


def heal(config: Callable, folder: str) -> int:
    """How many calls say that something has changed before one is done."""
    for calls in range(3):
        try:
            preprocess(config(folder, STEPS, **SETTINGS))
            return calls
        except DataError as error:
            assert "changed since it was made; run the same command again" in str(error)
    raise AssertionError("it does not heal")


def check(config: Callable, contents: Callable, tmp_path: Path, text: Path, seed: int, count: int) -> None:
    with open(text / "part-0.jsonl", "ab") as file:
        file.write(b"no json\n")
    preprocess(config("whole", STEPS, **SETTINGS))
    kept, rng, said = tmp_path / "whole", random.Random(seed), 0
    seen: dict[tuple[str, str], int] = {}

    def rarest(files: list[Path]) -> Path:
        rng.shuffle(files)
        path = min(files, key=lambda path: seen.get((path.parent.name, path.suffix), 0))
        kind = (path.parent.name, path.suffix)
        seen[kind] = seen.get(kind, 0) + 1
        return path

    whole = contents(kept)
    for _, path in zip(range(count), flipped(tmp_path / "out", kept, rng, rarest)):
        said += heal(config, "out")
        assert contents(tmp_path / "out") == whole, path
    assert said >= 1 and len(seen) >= 12  # which files there are hangs on paths: ids are hashes


def test_each_kind_of_file_between_stages(config: Callable, contents: Callable, tmp_path: Path, text: Path) -> None:
    check(config, contents, tmp_path, text, 1, 18)


@pytest.mark.slow
def test_three_hundred_bits(config: Callable, contents: Callable, tmp_path: Path, text: Path) -> None:
    check(config, contents, tmp_path, text, 2, 300)


def test_a_manifest_that_has_changed_is_none(
    config: Callable, contents: Callable, tmp_path: Path, text: Path
) -> None:
    preprocess(config(**SETTINGS))
    whole, path = contents(tmp_path / "out"), tmp_path / "out" / "manifest.json"
    for old, new in (('"num_empty": 2', '"num_empty": 3'), ('"counts"', '"cousts"'), ("1", "2")):
        path.write_text(path.read_text().replace(old, new, 1))
        assert not preprocess(config(**SETTINGS)).was_done and contents(tmp_path / "out") == whole
    os.truncate(path, 100)
    assert not preprocess(config(**SETTINGS)).was_done and contents(tmp_path / "out") == whole
