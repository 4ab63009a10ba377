"""The comparison: bootstrap intervals that cover what they should, and every number of it in three forms."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from megafp8.cli.main import main
from megafp8.core.errors import DataError
from megafp8.report import build
from megafp8.report.heldout import bootstrap, difference_interval, loss_interval, read_heldout
from tests.unit.report.made_run import add_heldout, make_run


def test_an_interval_is_the_normal_one_where_documents_are_alike():
    rng = np.random.default_rng(1)
    losses = rng.normal(3.0, 0.5, 900)
    found = bootstrap(losses, np.ones(900))
    error = losses.std(ddof=1) / 30
    assert found.value == pytest.approx(losses.mean())
    # quantiles at 2.5 % of 10,000 draws: their own standard error is sqrt(.025 * .975 / 10000) / phi(1.96) = 0.027
    # standard errors of the mean; four of them
    for bound, normal in ((found.low, -1.96), (found.high, 1.96)):
        assert bound == pytest.approx(losses.mean() + normal * error, abs=0.11 * error)


def test_intervals_cover_the_truth_nineteen_times_in_twenty():
    rng, hits = np.random.default_rng(2), 0
    for _ in range(200):
        tokens = rng.integers(50, 400, 80)
        sums = tokens * rng.normal(2.0, 0.3, 80)
        found = bootstrap(sums, tokens, resamples=1000)
        hits += found.low < 2.0 < found.high
    # 190 expected, standard deviation 3.1; a percentile interval of 80 documents covers about 1 % less than it says
    assert 176 <= hits <= 199


def test_documents_weigh_by_their_tokens_and_the_seed_decides():
    sums, tokens = np.array([10.0, 900.0]), np.array([10, 300])
    found = bootstrap(sums, tokens)
    assert found.value == pytest.approx(910 / 310) and (found.low, found.high) == (1.0, 3.0)
    assert found == bootstrap(sums, tokens) and math.isnan(bootstrap(sums[:1], tokens[:1]).low)
    many = np.random.default_rng(0).normal(size=50)
    assert bootstrap(many, np.ones(50), seed=1) != bootstrap(many, np.ones(50), seed=2)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("compare")
    recipes = {"bf16": "none", "delayed": "delayed", "nvfp4": "nvfp4"}
    folders = [make_run(root / n, recipe=r, steps=200, checkpoint=False) for n, r in recipes.items()]
    for folder, shift in zip(folders, (0.0, 0.0, 0.05)):
        add_heldout(folder, "en", shift)
        add_heldout(folder, "de", shift, seed=4)
    return folders


def test_pairing_takes_the_hardness_of_documents_out(runs):
    bf16, nvfp4 = (read_heldout(folder)["en"] for folder in (runs[0], runs[2]))
    apart = difference_interval(nvfp4, bf16)
    assert apart is not None and apart.low < 0.05 < apart.high and apart.excludes_zero
    alone = loss_interval(nvfp4)
    # documents differ by 0.4, two runs on one document by 0.004 * sqrt(2): the paired interval is 70 times narrower
    assert (alone.high - alone.low) / (apart.high - apart.low) > 40
    add_heldout(runs[0], "other", documents=50)
    assert difference_interval(nvfp4, read_heldout(runs[0])["other"]) is None
    (runs[0] / "heldout" / "other.json").unlink()


def test_every_number_is_in_all_three_forms(runs, tmp_path, capsys):
    assert main(["report", *map(str, runs), "--out", str(tmp_path), "--compare", "--title", "A | B"]) == 0
    capsys.readouterr()
    found = json.loads((tmp_path / "compare.json").read_text())
    assert [run["precision"] for run in found["runs"]] == ["BF16", "FP8 delayed", "NVFP4"]
    worse = found["runs"][2]
    assert worse["heldout"]["en"]["difference"]["low"] > 0 and found["runs"][0]["heldout"]["en"]["difference"] is None
    assert worse["training"]["same_samples"] and worse["training"]["step_noise"] == pytest.approx(0.055, rel=0.3)
    assert worse["validation"]["valid"]["difference"] == pytest.approx(0.003, abs=1e-9)
    text = (tmp_path / "compare.md").read_text()
    page = (tmp_path / "report.html").read_text()
    for shown in (text, page):
        assert f"{worse['heldout']['en']['difference']['value']:+.4f}" in shown
        assert "60 documents" in shown and "10,000 bootstrap resamples" in shown
    assert text.startswith("# A | B\n") and found["baseline"] == "bf16"
    assert {len(row.split(" | ")) for row in text.splitlines() if row.startswith("| ")} == {7}
    assert {"compare.png", "heldout.png"} <= {path.name for path in tmp_path.iterdir()}
    before = (tmp_path / "compare.png").read_bytes()
    assert 20_000 < len(before) < 300_000
    build(runs, tmp_path, "A | B", compare=True)
    assert (tmp_path / "compare.png").read_bytes() == before, "the same runs give the same bytes"


def test_half_of_the_runs_judged_is_shown_as_that(runs, tmp_path):
    lone = make_run(tmp_path / "lone", recipe="current", steps=50, checkpoint=False)
    build([runs[0], lone], tmp_path / "out", compare=True)
    found = json.loads((tmp_path / "out" / "compare.json").read_text())
    assert found["runs"][1]["heldout"] == {} and found["runs"][0]["heldout"]["en"]["documents"] == 60
    assert "| lone | – | – |" in (tmp_path / "out" / "compare.md").read_text()


def test_what_cannot_be_compared_is_refused_in_one_line(runs, tmp_path, capsys):
    assert main(["report", str(runs[0]), "--out", str(tmp_path / "out"), "--compare"]) == 2
    assert "name the baseline first and one run more" in capsys.readouterr().err
    folder = make_run(tmp_path / "broken", steps=20, checkpoint=False)
    for text, words in (
        ("{", "not valid JSON"),
        ('{"kind": "x"}', "not written by `megafp8 eval --save`"),
        ('{"kind": "megafp8-document-losses"}', "holds no losses of documents"),
        ('{"kind": "megafp8-document-losses", "document_loss_sums": [1.0], "document_tokens": []}', "make it again"),
    ):
        (folder / "heldout").mkdir(exist_ok=True)
        (folder / "heldout" / "en.json").write_text(text)
        with pytest.raises(DataError, match=words):
            build([folder], tmp_path / "out")
    assert not (tmp_path / "out").exists()
