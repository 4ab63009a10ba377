"""Every document of the input is in exactly one place: the output, the list of those left out, or the quarantine."""

from __future__ import annotations

import gzip
import io
import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zstandard

from megafp8.corpus.parts import read_lines
from megafp8.corpus.run import preprocess
from megafp8.data import IndexedDataset
from megafp8.data.tokenizer import load_tokenizer

ROOT = Path(__file__).parents[3]
NASTY = ROOT / "tests" / "nasty"
SHARED = ROOT.parent / "shared" / "data"


def lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Lines of a whole file that are not blank, read by another reader than the one under test."""
    data = path.read_bytes()
    if data[:2] == b"\x1f\x8b":
        data = gzip.decompress(data)
    elif data[:4] == b"\x28\xb5\x2f\xfd":
        data = zstandard.ZstdDecompressor().stream_reader(io.BytesIO(data), read_across_frames=True).read()
    for number, line in enumerate(data.split(b"\n"), start=1):
        if line.strip(b" \t\r\n"):
            yield number, line


def account(files: list[Path], out: Path, id_key: str = "id") -> dict[str, int]:
    """Check where each document went, by id; how many went where."""
    where = {(str(path), number): line for path in files for number, line in lines(path)}
    bad = [json.loads(line) for line in (out / "quarantine.jsonl").read_text(encoding="utf-8").splitlines()]
    places = [(entry["file"], entry["line"]) for entry in bad]
    assert len(places) == len(set(places)) and set(places) <= set(where), "each bad line once, where it is"
    texts: dict[str, str] = {}
    for (file, number), line in where.items():
        if (file, number) not in set(places):
            value = json.loads(line.removeprefix(b"\xef\xbb\xbf"))
            name = value.get(id_key)
            texts[str(name) if isinstance(name, (str, int)) else f"{file}:{number}"] = value["text"]
    assert len(texts) == len(where) - len(bad), "the corpus of this test has no id twice"
    listed = [entry["id"] for entry in read_lines(out / "dropped.jsonl.zst")]
    assert len(listed) == len(set(listed)) and set(listed) <= set(texts), "nobody is dropped twice, nobody invented"
    tokenizer, written = load_tokenizer("bytes"), Counter[str]()
    for split in ("train", "valid"):
        data = IndexedDataset(out / split)
        written.update(tokenizer.decode(data[i][:-1].tolist()) for i in range(len(data)))
    assert written == Counter(text for name, text in texts.items() if name not in set(listed))
    counts = json.loads((out / "manifest.json").read_text(encoding="utf-8"))["counts"]
    assert counts["num_records"] == len(where) and counts["num_bad"] == len(bad)
    dropped = sum(sum(reasons.values()) for reasons in counts["dropped"].values())
    assert dropped + counts["num_empty"] + counts["num_other_language"] == len(listed)
    return {"bad": len(bad), "listed": len(listed), "written": written.total()}


def made(config: Callable, files: list[Path], steps: list[dict], **sections: Any) -> Any:
    source = {"files": [str(path) for path in files], "max_bad_share": 0.9, **sections.pop("source", {})}
    return config("out", steps, source=source, tokenizer={"path": "bytes"}, **sections)


def test_of_a_small_corpus(config: Callable, tmp_path: Path, text: Path) -> None:
    """Both splits, a language that is not wanted, bad lines, empty ones, steps, copies; several shards and parts."""
    rows = (text / "part-0.jsonl").read_text().splitlines()
    copies = [json.dumps({**json.loads(line), "id": f"copy-{n}"}) for n, line in enumerate(rows[100:140])]
    (text / "part-2.jsonl").write_text("\n".join([*copies, "no json", '{"text": 1}', '{"text": " "}']) + "\n")
    steps = [{"kind": "length", "min_characters": 100}, {"kind": "exact"}, {"kind": "minhash"}]
    executor = {"shard_bytes": 12_000, "part_bytes": 8_000}
    files = sorted(text.iterdir())
    preprocess(made(config, files, steps, source={"languages": ["de"]}, executor=executor))
    found = account(files, tmp_path / "out")
    assert found["bad"] == 2 and found["listed"] > 300 and found["written"] > 200


@pytest.mark.slow
@pytest.mark.skipif(not SHARED.is_dir(), reason="../shared/data is not there")
def test_of_real_and_nasty_text(config: Callable, tmp_path: Path) -> None:
    """The beginning of each file of real text, plain and compressed, beside all nasty files that are whole; filters,
    exact and near duplicates, files for validation."""
    damaged = ("utf16", "pretty", "truncated", "bitflip", "deep", "dup")
    files = [path for path in sorted(NASTY.glob("*.jsonl*")) if not path.name.startswith(damaged)]
    files = [path for path in files if path.stat().st_size]  # an empty file has no documents
    for number, path in enumerate(sorted(SHARED.glob("*.jsonl.zst"))):
        reader = io.BufferedReader(zstandard.ZstdDecompressor().stream_reader(path.read_bytes()))
        some, size = [], 0
        while size < 2_000_000 and (line := reader.readline()):
            value = json.loads(line)
            value["name"] = f"{path.name}-{len(some)}"  # the nasty files use their ids again and again
            some.append(json.dumps(value, ensure_ascii=False).encode() + b"\n")
            size += len(line)
        data = b"".join(some)
        frames = zstandard.compress(data[: size // 2]) + zstandard.compress(data[size // 2 :])
        packed = (data, gzip.compress(data), frames)
        files.append(tmp_path / f"{path.stem}-{number}")
        files[-1].write_bytes(packed[number % 3])
    steps = [{"kind": "language", "languages": ["en", "de", "ja"]}, {"kind": "gopher_quality"}, {"kind": "exact"},
             {"kind": "minhash"}]  # fmt: skip
    output = {"folder": str(tmp_path / "out"), "workers": 2, "shuffle": True}
    executor = {"shard_bytes": 500_000, "part_bytes": 1_000_000}
    preprocess(made(config, files, steps, source={"id_key": "name"}, output=output, executor=executor))
    found = account(files, tmp_path / "out", "name")
    assert min(found.values()) > 20 and found["written"] > 500, found
