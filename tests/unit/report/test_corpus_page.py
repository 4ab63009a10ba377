"""The page of a corpus: self-contained, complete, its numbers those of the manifest, texts of strangers harmless."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megafp8.cli.main import main
from megafp8.core.errors import DataError
from megafp8.corpus.figures import add_lengths
from megafp8.corpus.rates import stage_rates
from megafp8.report.corpus_numbers import cluster_sizes, funnel, groups, median_of, read_corpus
from megafp8.report.corpus_page import build_corpus, count, percent
from megafp8.report.plain_svg import Series, lengths_svg
from tests.unit.report.test_page import read_page

EVIL = "<script>alert(1)</script> & <b>\"'</b>"
TOML = """
[source]
kind = "jsonl"
files = ["{folder}/*.jsonl"]
max_bad_share = 0.5
[tokenizer]
path = "bytes"
[[steps]]
kind = "normalise"
[[steps]]
kind = "length"
min_characters = 60
[[steps]]
kind = "exact"
[output]
folder = "{folder}/out"
workers = 1
"""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """300 documents with short ones, copies, an empty one and a line that is no JSON, through the real verb."""
    folder = tmp_path_factory.mktemp("corpus")
    lines = []
    for number in range(300):
        language, words = (("en", "some words "), ("de", "einige Wörter "), ("ja", "いくつかの言葉 "))[number % 3]
        text = f"{number} " + words * (number % 40)
        lines.append(json.dumps({"id": f"d{number}", "text": text, "lang": language, "source": f"s{number % 2}"}))
    lines += lines[50:60] + lines[55:60] + ['{"text": ""}', "{no json"]
    lines.append(json.dumps({"id": EVIL, "text": EVIL, "lang": "en", "source": EVIL}))
    (folder / "a.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (folder / "corpus.toml").write_text(TOML.format(folder=folder), encoding="utf-8")
    assert main(["preprocess", str(folder / "corpus.toml")]) == 0
    return folder


def test_page_is_self_contained_and_harmless(corpus: Path) -> None:
    reader = read_page(corpus / "out" / "report.html")
    assert all(reference.startswith("#") and reference[1:] in reader.ids for reference in reader.references)
    html = (corpus / "out" / "report.html").read_text(encoding="utf-8")
    assert "<script" not in html and "http://" not in html.replace("http://www.w3.org", "") and "https://" not in html
    words = " ".join(" ".join(reader.words).split())
    counts = json.loads((corpus / "out" / "manifest.json").read_text())["counts"]
    assert EVIL in words and f"{counts['num_records']} records became" in words
    duplicates = ("exact duplicate", "15 documents went as duplicates", "d50")
    for said in ("too short", *duplicates, "not JSON", "(not said)", "tokens per word"):
        assert said in words, said


def test_the_funnel_adds_up(corpus: Path) -> None:
    found = read_corpus(corpus / "out")
    rows = funnel(found)
    assert [row.label for row in rows] == ["records", "quarantined", "empty", "normalise", "length", "exact"]
    assert rows[0].left == 318 and rows[-1].left == found.kept(0) and rows[-1].reasons == [("exact duplicate", 15)]
    for what in ("languages", "sources"):
        assert sum(group.total for group in groups(found, what)) == 317
    assert found.raw_bytes == found.kept(1) + sum(found.lost(outcome)[1] for outcome in found.outcomes)


def test_many_sources_are_joined(corpus: Path) -> None:
    found = read_corpus(corpus / "out")
    row = found.figures["sources"]["s0"]
    found.figures["sources"] = {f"u{n}": row for n in range(100)} | {"(other)": row}
    rows = groups(found, "sources")
    assert len(rows) == 41 and rows[-1].more == 61 and rows[-1].total == 61 * rows[0].total
    assert rows[-1].kept[3] == 61 * rows[0].kept[3] and dict(rows[-1].parts)["length"] == 61 * row["length"][0]


def test_report_is_made_again(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = corpus / "out" / "report.html"
    first = page.read_bytes()
    assert b"<td>tokenize</td>" in first, "the rates"
    page.unlink()
    assert main(["preprocess", str(corpus / "corpus.toml")]) == 0 and page.read_bytes() == first
    page.unlink()
    assert main(["data", "report", str(corpus / "out")]) == 0
    assert page.read_bytes() == first and str(page) in capsys.readouterr().out
    words = ["--output.keep_stages=false", f"--output.folder={corpus}/none"]
    assert main(["preprocess", str(corpus / "corpus.toml"), *words]) == 0
    assert b"<td>tokenize</td>" in (corpus / "none" / "report.html").read_bytes(), "rates of the run itself"
    build_corpus(corpus / "none")
    assert b"rates are not known any more" in (corpus / "none" / "report.html").read_bytes()


def test_wrong_folders_are_one_line(tmp_path: Path, corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "report", str(tmp_path)]) == 3
    assert "no manifest.json of `megafp8 preprocess`" in capsys.readouterr().err
    (tmp_path / "manifest.json").write_bytes((corpus / "out" / "manifest.json").read_bytes())
    with pytest.raises(DataError, match=r"has no figures\.json"):
        build_corpus(tmp_path)
    (tmp_path / "figures.json").write_text("[]")
    with pytest.raises(DataError, match=r"figures\.json: not of"):
        build_corpus(tmp_path)


def test_rates_count_what_is_there_once(tmp_path: Path) -> None:
    (tmp_path / "read").mkdir()
    (tmp_path / "read" / "a.json").touch()
    done = {"event": "done", "stage": "read", "task": "a", "seconds": 2.0, "time": 12.0, "documents": 10}
    lines = [{**done, "documents": 99}, done, {**done, "task": "gone"}, {"event": "set aside", "stage": "read"}]
    (tmp_path / "log.jsonl").write_text("\n".join(map(json.dumps, lines)) + '\n{"cut sh')
    assert stage_rates(tmp_path) == [
        {"stage": "read", "tasks": 1, "seconds": 2.0, "wall_seconds": 2.0, "documents": 10}
    ]  # fmt: skip
    (tmp_path / "read" / "b.json").touch()
    (tmp_path / "log.jsonl").write_text("\n".join(map(json.dumps, [done, {**done, "task": "b", "time": 13.0}])))
    assert stage_rates(tmp_path)[0]["wall_seconds"] == 3.0, "two tasks at once take the time of both together"


def test_drawing_and_numbers() -> None:
    bins: dict[str, dict[str, int]] = {}
    add_lengths(bins, "en", [2**k for k in range(20)])
    svg = lengths_svg([Series("en", bins["en"], "run0"), Series("x", {}, "run1")], "tokens", "<words>")
    assert svg.count("<path") == 1 and "&lt;words&gt;" in svg and "var(--run0)" in svg
    assert lengths_svg([Series("en", {"0": 3}, "run0")], "tokens", "one bin").count("<path") == 1
    assert lengths_svg([Series("en", {}, "run0")], "tokens", "nothing") == ""
    lengths: dict[str, dict[str, int]] = {}
    add_lengths(lengths, "a", list(range(1000)))
    assert median_of(lengths["a"]) == pytest.approx(500, rel=0.19), "a bin is a quarter of an octave: 2^0.25 = 1.19"
    assert median_of({}) == 0.0
    assert cluster_sizes({"2": 5, "3": 1, "7": 2, "999": 1}) == [("2", 5), ("3", 1), ("5 to 8", 2), ("257 or more", 1)]
    assert (percent(1, 10**6), percent(10**6 - 1, 10**6), percent(0, 5), percent(1, 0)) == (
        "< 0.1 %", "> 99.9 %", "0.0 %", "\u2013",
    )  # fmt: skip
    assert (count(9_999_999), count(28_369_699), count(1.2e12)) == ("9,999,999", "28.37 M", "1.20 T")


def test_no_matplotlib_for_a_corpus() -> None:
    code = "import sys\nfrom megafp8.report import build_corpus\nassert 'matplotlib' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
