"""The page as a whole: self-contained, complete, and made from one run, two, several, or half of one."""

from __future__ import annotations

import json
import re
import warnings
from html.parser import HTMLParser
from pathlib import Path

import pytest

from megafp8.cli.main import main
from megafp8.report import build
from tests.unit.report.made_run import make_run

VOID = {"meta", "img", "br", "link", "input", "hr", "use", "path"}


class Reader(HTMLParser):
    """Checks that tags are balanced and collects ids, references and text."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.references: list[str] = []
        self.words: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        self._note(attrs)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._note(attrs)

    def _note(self, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            if name in ("src", "href", "xlink:href"):
                self.references.append(value or "")
            if name in ("clip-path", "style") and value and "url(#" in value:
                self.references.append(value[value.index("url(") + 4 : -1])

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def read_page(path: Path) -> Reader:
    reader = Reader()
    reader.feed(path.read_text(encoding="utf-8"))
    assert reader.open == []
    return reader


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    make_run(root / "bf16", steps=200)
    make_run(root / "fp8", recipe="delayed", steps=200, what_if=True)
    return root


def test_two_runs_make_a_self_contained_page(two_runs: Path, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a warning of numpy here is a number that the page should not show
        page = build([two_runs / "bf16", two_runs / "fp8"], tmp_path)
    reader = read_page(page)
    assert all(ref.startswith(("#", "data:")) for ref in reader.references), "nothing is loaded from elsewhere"
    assert len(set(reader.ids)) == len(reader.ids), "figures do not share ids"
    assert {ref[1:] for ref in reader.references if ref.startswith("#")} <= set(reader.ids)
    names = {path.name for path in tmp_path.iterdir()}
    pictures = {"loss.png", "validation.png", "speed.png", "weights.png", "fp8-1.png", "fp8-1-what-if.png"}
    assert names == {"report.html", *pictures}
    text = " ".join(" ".join(reader.words).split())
    for expected in (
        "Parameters", "5.25 M", "Final validation perplexity", "MFU, causal attention", "MFU, full attention",
        "unigram entropy 6.214", "step-to-step noise", "E4M3", "E5M2", "precision.recipe", "preempted at step 172",
        "FP8 delayed", "2.13.0+cpu", "emulated", "amax over history", "underflow in nvfp4", "skipped at step 97",
        "36 of the layers' 48 matrix products of a micro-batch run in FP8 (linears: 12 in delayed); not in FP8: "
        "attention.qkv, attention.out, mlp.gate_up, mlp.down in layer 0.",
        "Step 97: first not finite: grad_output of layers.1.mlp.down, backward, micro-batch 0, rank 1: 3 NaN",
    ):  # fmt: skip
        assert expected in text, expected
    assert "nan" not in text.replace("3 NaN", "").lower().split()
    # light and dark: no colour of the drawings is left that the scheme cannot reach
    assert "#1f5fbf" not in page.read_text().split("</style>")[1]


def test_the_same_runs_give_the_same_bytes(two_runs: Path, tmp_path: Path) -> None:
    pages = [build([two_runs / "bf16"], tmp_path / name).read_bytes() for name in "ab"]
    assert pages[0] == pages[1]


@pytest.mark.parametrize("count", [1, 4])
def test_one_run_or_several(tmp_path: Path, count: int) -> None:
    folders = [make_run(tmp_path / f"run{i}", steps=30 + i, seed=i, checkpoint=False) for i in range(count)]
    text = " ".join(read_page(build(folders, tmp_path / "out", title="<b> & co")).words)
    assert "<b> & co" in text
    assert "No run computes in FP8" in text
    assert "No run has a checkpoint" in text
    assert ("unigram entropy of its tokens" in text) == (count == 1)


def test_a_run_of_one_step_and_nothing_else(tmp_path: Path) -> None:
    folder = tmp_path / "young"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text('{"kind": "train", "step": 1, "loss": 9.0}\n')
    text = " ".join(read_page(build([folder], tmp_path / "out")).words)
    for expected in ("No run has been evaluated yet", "no config.toml", "No run has recorded its speed", "no run.json"):
        assert expected in text


def test_losses_that_are_not_finite(tmp_path: Path) -> None:
    folders = [make_run(tmp_path / name, steps=30, checkpoint=False) for name in "ab"]
    path = folders[1] / "metrics.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    for record in records:
        if record["kind"] in ("train", "eval") and record["step"] > 10:
            record["loss"] = float("nan")
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        text = " ".join(read_page(build(folders, tmp_path / "out")).words)
    assert "unknown" in text


def test_names_from_files_cannot_write_html(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=10, checkpoint=False)
    run = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**run, "name": "<script>alert(1)</script>", "cpu": '"><img src=x>'}))
    page = build([folder], tmp_path / "out").read_text()
    assert "<script" not in page
    assert "<img" not in page


def test_command_prints_the_page_and_refuses_in_one_line(
    two_runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(two_runs / "fp8"), "--out", str(tmp_path / "out"), "--title", "T"]) == 0
    first, *table, page = capsys.readouterr().out.rstrip("\n").split("\n")
    assert page == str(tmp_path / "out" / "report.html") and "below the unigram entropy" in first
    assert any(line.startswith("Final validation loss") for line in table)
    assert main(["report", str(tmp_path), "--out", str(tmp_path / "new")]) == 3
    error = capsys.readouterr().err
    assert re.fullmatch(r"megafp8 report: error: .*no run folder.*\n", error)
    assert not (tmp_path / "new").exists()
