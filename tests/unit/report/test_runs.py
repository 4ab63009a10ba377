"""Reading run folders: what is there, what is missing, and what is refused in one line."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from megafp8.core.errors import DataError
from megafp8.report import tables
from megafp8.report.fp8_health import error_ratio, grids, recipes_not_in_use
from megafp8.report.runs import changed_keys, read_run, read_runs
from tests.unit.report.made_run import fp8_record, make_run


def train_line(step: int, loss: float = 2.0) -> str:
    return json.dumps({"kind": "train", "step": step, "loss": loss}) + "\n"


def test_reads_everything_that_training_left(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path / "fp8", recipe="delayed", steps=200, checkpoint=False))
    assert (run.name, run.precision, len(run.train), len(run.fp8)) == ("fp8", "FP8 delayed", 200, 20)
    assert [record["step"] for record in run.evals["valid"]] == [50, 100, 150, 200]
    assert [event["event"] for event in run.events].count("saved") == 4
    assert run.changed["precision.recipe"] == ('"none"', '"delayed"')
    assert run.notes == []


def test_missing_pieces_are_noted_and_no_error(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(train_line(1))
    run = read_run(tmp_path)
    assert run.name == tmp_path.name
    assert len(run.notes) == 3
    assert np.isnan(run.series("tokens_per_second")).all()


def test_last_attempt_of_a_step_counts(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(train_line(1) + train_line(2, 9.0) + train_line(2, 1.0))
    assert read_run(tmp_path).series("loss").tolist() == [2.0, 1.0]


def test_a_last_line_cut_short_is_left_out_and_noted(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(train_line(1) + train_line(2)[:20])
    run = read_run(tmp_path)
    assert len(run.train) == 1
    assert "cut short" in run.notes[0]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, "no run folder"),
        ("", "empty"),
        ('{"kind": "event", "step": 1, "event": "saved"}\n', "no training record"),
        (train_line(1) + "{broken\n" + train_line(3), "metrics.jsonl:2: not JSON"),
        (train_line(1) + "[1]\n", "metrics.jsonl:2: no record"),
        ('{"kind": "train", "step": 1}\n', 'metrics.jsonl:1: a train record without a number "loss"'),
        ('{"kind": "train", "step": "1", "loss": 2}\n', "metrics.jsonl:1: no record"),
        ('{"kind": "train", "step": 1, "loss": "low"}\n', "without a number"),
        ("\xff\xfe\n", "not JSON"),
    ],
)
def test_bad_folders_are_refused_in_one_line(tmp_path: Path, text: str | None, expected: str) -> None:
    if text is not None:
        (tmp_path / "metrics.jsonl").write_text(text, encoding="latin-1")
    with pytest.raises(DataError) as caught:
        read_run(tmp_path)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_other_bad_input_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such folder"):
        read_run(tmp_path / "nowhere")
    folder = make_run(tmp_path / "a", steps=5, checkpoint=False)
    with pytest.raises(DataError, match="twice"):
        read_runs([folder, tmp_path / "." / "a"])
    (folder / "run.json").write_text('{"name": ')
    with pytest.raises(DataError, match="not valid JSON"):
        read_run(folder)
    (folder / "run.json").write_text("{}")
    (folder / "config.toml").write_text("[run\n")
    with pytest.raises(DataError, match="not TOML"):
        read_run(folder)


def test_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    folders = [make_run(tmp_path / parent / "run", steps=5, checkpoint=False) for parent in "ab"]
    names = [run.name for run in read_runs(folders)]
    assert len(set(names)) == 2


def test_runs_on_one_machine_share_the_highest_peak_they_measured(tmp_path: Path) -> None:
    folders = [make_run(tmp_path / name, steps=10, checkpoint=False) for name in "abc"]
    for folder, change in zip(folders, ({"peak_flops": 440e9}, {}, {"cpu": "other", "peak_flops": 110e9})):
        facts = json.loads((folder / "run.json").read_text())
        (folder / "run.json").write_text(json.dumps({**facts, **change}))
    runs = read_runs(folders)
    assert [run.peak_flops for run in runs] == [440e9, 440e9, 110e9]
    # powers of two and a factor of 100 on both sides: equal bits
    assert np.array_equal(runs[1].mfu("mfu_full"), 100.0 * runs[1].series("mfu_full") * 0.5)
    assert np.array_equal(runs[2].mfu("mfu_full"), 100.0 * runs[2].series("mfu_full"))


def test_changed_keys_reads_the_marks_of_the_configuration() -> None:
    toml = 'a = 1\n\n[x]\nb = "  # default: "  # default: ""\n\n[x.y]\nc = [1, 2]  # default: []\nd = 2\n'
    assert changed_keys(toml) == {"x.b": ('""', '"  # default: "'), "x.y.c": ("[]", "[1, 2]")}


def test_grids_have_a_row_a_gemm_in_model_order(tmp_path: Path) -> None:
    records = [fp8_record(step, 12, np.random.default_rng(step)) for step in (10, 20)]
    del records[1]["stats"]["layers.0.attention.qkv.input.underflows%"]
    lines = train_line(1) + "".join(json.dumps(record) + "\n" for record in records)
    (tmp_path / "metrics.jsonl").write_text(lines)
    grid = grids(read_run(tmp_path))["underflows%", "input"]
    assert grid.modules[:5] == [
        "layers.0.attention.qkv", "layers.0.attention.out", "layers.0.mlp.gate_up", "layers.0.mlp.down",
        "layers.1.attention.qkv",
    ]  # fmt: skip
    assert grid.modules[-1] == "layers.11.mlp.down"
    assert np.isnan(grid.values[0, 1])
    assert grid.values[1, 0] == records[0]["stats"]["layers.0.attention.out.input.underflows%"]
    module, step, value = grid.worst
    assert value == np.nanmax(grid.values) == records[step // 10 - 1]["stats"][f"{module}.input.underflows%"]


def test_recipes_that_are_not_in_use_have_grids_of_their_own(tmp_path: Path) -> None:
    record = fp8_record(10, 2, np.random.default_rng(1), what_if=True)
    (tmp_path / "metrics.jsonl").write_text(train_line(1) + json.dumps(record) + "\n")
    found = grids(read_run(tmp_path))
    assert recipes_not_in_use(found) == {"mxfp8_": "mxfp8", "nvfp4_": "nvfp4"}
    values = found["mxfp8_underflows%", "weight"].values
    assert values[0, 0] == record["stats"]["layers.0.attention.qkv.weight.mxfp8_underflows%"]
    assert error_ratio(found, "mxfp8_", "input") == pytest.approx(0.6, rel=1e-12)  # of fp64 numbers
    lines = tables.what_if_lines(found, recipes_not_in_use(found))
    assert [line["error"] for line in lines] == ["0.6 \u00d7"] * 3 + ["30 \u00d7"] * 3
    assert np.isnan(error_ratio(found, "fp8_current_scaling_", "input"))


def test_what_is_left_out_of_fp8_is_said_by_kind_and_layer(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path / "run", recipe="mxfp8", steps=20, layers=6, checkpoint=False))
    names = ["layers.0.mlp.down", "layers.1.mlp.down", "layers.5.mlp.down", "layers.5.attention.qkv"]
    run.facts["fp8"] = {"gemms": 72, "fp8_gemms": 60, "recipes": {"mxfp8": 18, "current": 2}, "not_fp8": names}
    assert tables.fp8_share(run) == (
        "60 of the layers' 72 matrix products of a micro-batch run in FP8 (linears: 18 in mxfp8, 2 in current); not in "
        "FP8: mlp.down in layers 0 to 1, 5; attention.qkv in layer 5."
    )
    run.facts["fp8"]["not_fp8"] = []
    assert tables.fp8_share(run).endswith("no linear is left out.")
    assert tables.fp8_share(read_run(make_run(tmp_path / "bf16", steps=20, checkpoint=False))) == ""
