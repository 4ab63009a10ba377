"""Single-bit flips over every file that a corpus is made of: `megafp8 data verify` finds each."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

from megafp8.cli.main import main
from megafp8.core.errors import DataError
from megafp8.corpus.run import preprocess
from megafp8.data.indexed import IndexedDataset
from megafp8.data.verify import folder_problems, problems

FLIPS, SEED = 60, 5  # for each of twelve files


def found(folder: Path) -> list[str]:
    lines = folder_problems(folder)
    for split in ("train", "valid"):
        try:
            lines += problems(IndexedDataset(folder / split))
        except DataError as error:
            lines.append(str(error))
    return lines


def test_a_flip_anywhere_is_found(config: Callable, mixed: Path, tmp_path: Path, capsys) -> None:
    source = {"files": [f"{mixed}/part-*"], "max_bad_share": 0.5}
    preprocess(config("out", [{"kind": "exact"}], source=source))
    folder = tmp_path / "out"
    files = [path for path in sorted(folder.iterdir()) if path.is_file() and path.name != "report.html"]
    assert {path.suffix for path in files} == {".bin", ".idx", ".json", ".jsonl", ".model", ".zst"} and len(files) == 12
    assert main(["data", "verify", str(folder)]) == 0
    rng = random.Random(SEED)
    for path in files:
        good = path.read_bytes()
        assert good, path
        for number in range(FLIPS):
            at, bit = rng.randrange(len(good)), rng.randrange(8)
            bad = bytearray(good)
            bad[at] ^= 1 << bit
            path.write_bytes(bad)
            if not found(folder):  # a blank of JSON that became another: what it says is the same
                assert json.loads(bad) == json.loads(good), f"flip {number}, bit {bit} of byte {at} of {path.name}"
        path.write_bytes(good)
    assert found(folder) == []
    (folder / "quarantine.jsonl").unlink()
    capsys.readouterr()
    assert main(["data", "verify", str(folder)]) == 3
    assert "quarantine.jsonl: is missing" in capsys.readouterr().err
