"""`figures.json`: every document is in one outcome of its source and language, whatever the shards; clusters add up."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megafp8.corpus import figures
from megafp8.corpus.dedup import clusters
from megafp8.corpus.dedup import records as rec
from megafp8.corpus.dedup.names import save_names
from megafp8.corpus.documents import Document, Dropped
from megafp8.corpus.figures import Account, Figures, add_lengths, kept_lengths
from megafp8.corpus.run import preprocess
from megafp8.data import IndexedDataset

STEPS = [{"kind": "length", "min_characters": 120}, {"kind": "exact"}]


def document(text: str, language: str = "en", source: str = "s") -> Document:
    return Document("i", text, language, source)


def test_every_document_has_one_outcome(config: Callable, tmp_path: Path, text: Path) -> None:
    with open(text / "part-1.jsonl", "a", encoding="utf-8") as file:
        file.write("{broken\n" + (text / "part-0.jsonl").read_text(encoding="utf-8").splitlines()[20] + "\n")
        file.write(json.dumps({"id": "fr", "text": "x" * 200, "lang": "fr", "source": "b"}) + "\n")
    settings = {"source": {"languages": ["en", "de", ""], "max_bad_share": 0.1}, "tokenizer": {"path": "bytes"}}
    counts = preprocess(config("out", STEPS, **settings)).manifest["counts"]
    found = json.loads((tmp_path / "out" / "figures.json").read_text(encoding="utf-8"))
    raw = {name: row.pop("raw") for name, row in found["sources"].items()}
    assert sum(documents for documents, _ in raw.values()) == counts["num_records"] - counts["num_bad"]
    for name, row in found["sources"].items():
        assert sum(numbers[0] for numbers in row.values()) == raw[name][0], name
        assert sum(numbers[1] for numbers in row.values()) == raw[name][1], "no step here changes a text"
    sums: Counter[str] = Counter()
    for row in found["languages"].values():
        sums.update({outcome: numbers[0] for outcome, numbers in row.items()})
    wanted = {step: sum(reasons.values()) for step, reasons in counts["dropped"].items()}
    kept = sum(split["documents"] for split in counts["splits"].values())
    assert sums == {"kept": kept, "empty": 2, "other language": 1, **wanted}
    tokens = sum(IndexedDataset(tmp_path / "out" / split).num_tokens for split in ("train", "valid"))
    assert sum(row["kept"][3] for row in found["sources"].values() if "kept" in row) == tokens
    for what in ("characters", "tokens"):
        assert sum(sum(bins.values()) for bins in found[what].values()) == kept
    assert found["clusters"]["exact"]["num_duplicates"] == wanted["exact"]
    (sample, *_) = found["samples"]["length"]["too short"]
    assert set(sample) == {"id", "lang", "source", "detail", "text"}


def test_shards_make_no_difference(config: Callable, tmp_path: Path) -> None:
    for name, executor in (("one", {}), ("many", {"shard_bytes": 12_000, "part_bytes": 8_000})):
        preprocess(config(name, STEPS, tokenizer={"path": "bytes"}, executor=executor))
    assert (tmp_path / "one" / "figures.json").read_bytes() == (tmp_path / "many" / "figures.json").read_bytes()


def test_bins_and_names_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: figures.Lengths = {}
    add_lengths(lengths, "en", [0, 1, 2, 3, 1023, 1024, 1217, 1218, 10**12])
    assert lengths["en"].items() >= {"0": 1, "1": 1, "2": 1, "3": 1, "862": 1, "1024": 2, "1218": 1}.items()
    assert sum(lengths["en"].values()) == 9
    monkeypatch.setattr(figures, "MAX_NAMES", 2)
    found = Figures()
    found.add(kept_lengths([document("a", "en"), document("b", "de"), document("cc", "ja")], np.array([1, 2, 3])))
    assert found.languages["de"] == {"kept": [1, 1, 1, 2]} and found.languages["(other)"] == {"kept": [1, 2, 2, 3]}
    assert found.tokens["(other)"] == {"3": 1} and len(found.languages) == len(found.tokens) == 3


def test_samples_are_of_each_language() -> None:
    account = Account()
    for number in range(50):
        account.add_dropped(document("x" * number, "de" if number == 40 else "en"), "c4", Dropped("short"))
    found = Figures()
    for _ in range(3):  # tasks
        found.add(account.to_json())
    assert [sample["lang"] for sample in found.samples["c4"]["short"]] == ["en", "en", "de", "de"]


@pytest.mark.parametrize("memory_bytes", [1 << 20, 200])
def test_clusters(tmp_path: Path, memory_bytes: int) -> None:
    """Sizes and largest against a plain count; 200 bytes: many ranges."""
    rng = np.random.default_rng(3)
    numbers = np.array([rec.number(shard, row) for shard in range(3) for row in range(100)], "<u8")
    edges = np.empty(200, rec.EDGE)
    edges["document"], edges["kept"] = numbers[100:], rng.choice(numbers[:60], 200)
    paths = []
    for at in range(2):
        paths.append(tmp_path / f"links{at}.npy")
        rec.save(paths[-1], edges[100 * at : 100 * at + 100])
    names = [tmp_path / f"names{shard}.npy" for shard in range(3)]
    for shard, path in enumerate(names):
        save_names(path, [f"{shard}-{row}" for row in range(100)])
    found = clusters.summary(paths, names, memory_bytes)
    count = Counter(edges["kept"].tolist())
    assert found["num_clusters"] == len(count) and found["num_duplicates"] == 200
    assert {int(size): n for size, n in found["sizes"].items()} == Counter(n + 1 for n in count.values())
    top = sorted(count, key=lambda kept: (-count[kept], kept))[:10]
    assert [one["kept"] for one in found["largest"]] == [f"0-{kept}" for kept in top]
    members = [n for n, kept in zip(numbers[100:].tolist(), edges["kept"].tolist()) if kept == top[0]]
    shards, rows = rec.shards_and_rows(np.array(members[:4], "<u8"))
    assert found["largest"][0]["members"] == [f"{s}-{r}" for s, r in zip(shards, rows)]


def test_no_duplicates_no_clusters(tmp_path: Path) -> None:
    found = clusters.summary([], [], 1 << 20)
    assert found == {"num_clusters": 0, "num_duplicates": 0, "sizes": {}, "largest": []}
