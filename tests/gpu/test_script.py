"""run.sh without a GPU: the dry run, budgets, crashes, and the stand-in for a package that a GPU machine may lack."""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from megafp8.core.config import to_dict
from megafp8.train.config import load_run_config
from tests.gpu import main, training
from tests.gpu.correctness import Checks
from tests.gpu.report import Clock, Figures
from tests.gpu.summary import against_bf16, comparison_lines

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_dry_run_goes_the_whole_way(tmp_path):
    env = os.environ | {"PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        ["bash", "tests/gpu/run.sh", "--out", str(tmp_path), "--budget", "500"],
        cwd=ROOT, env=env, capture_output=True, text=True, timeout=560,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "a DRY RUN at tiny size, no GPU is measured" in done.stdout
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert found["mode"] == "dry run: no GPU was measured" and found["exit_code"] == 0
    parts = found["parts"]
    recipes = parts["correctness native"]["recipes"]
    assert {name: recipes[name]["status"] for name in ("delayed", "current")} == {
        "delayed": "passed", "current": "passed"
    }  # fmt: skip
    assert "not multiply MXFP8's blocks" in recipes["mxfp8"]["reason"]
    for name in ("train bf16", "train delayed native", "train delayed auto"):
        assert parts[name]["status"] == "passed" and len(parts[name]["losses"]) == 6
        assert parts[name]["tokens_per_second"] > 0 and 0 < parts[name]["mfu_causal"] < parts[name]["mfu_full"]
        assert parts[name]["peak_memory_bytes"] > 0
    assert parts["train delayed auto"]["backend"] == "emulated"
    assert set(found["against_bf16"]) == {"train delayed native", "train delayed auto"}
    assert parts["train delayed native"]["backend"] == "native" and parts["train delayed native"]["fp8_linears"] == 8


@pytest.fixture
def session(tmp_path):
    return main.Session(tmp_path, time.monotonic() + 300)


def test_a_part_that_crashes_is_an_error_with_its_last_words(session):
    found = session.run(main.Part("x", "tests.gpu.no_such_part", 60, 5))
    assert found["status"] == "error" and "No module named" in found["reason"] and "code 1" in found["reason"]


def test_another_package_called_tests_is_in_nobodys_way(session, monkeypatch, tmp_path):
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "__init__.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = session.run(main.Part("x", "tests.gpu.machine", 60, 5))
    assert found["reason"].startswith("ended with code 0"), "a module that writes no figures, but was found"


def test_a_part_that_hangs_is_killed_and_leaves_its_figures(session, monkeypatch, tmp_path):
    monkeypatch.setattr(main, "GRACE", 1.0)
    waits = tmp_path / "waits.py"
    waits.write_text(
        "import sys, time, pathlib\n"
        "pathlib.Path(sys.argv[2]).write_text('{\"losses\": [1.0]}')\ntime.sleep(60)\n"
    )  # fmt: skip
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = session.run(main.Part("x", "waits", 4, 0))
    assert found["status"] == "error" and "killed" in found["reason"] and found["losses"] == [1.0]


def test_no_part_starts_without_the_time_it_needs(session):
    session.end = time.monotonic() + main.GRACE + 10
    found = session.run(main.Part("x", "tests.gpu.no_such_part", 60, 25))
    assert found["status"] == "skipped" and found["reason"].endswith("s of the budget are left, it needs 25 s")


def test_a_recipe_that_kills_its_process_is_named_and_the_others_go_on(session, monkeypatch):
    calls = []

    def fake(part, figures, log, seconds):
        calls.append(part.arguments)
        if len(calls) == 1:
            recipes = {"a": {"status": "passed", "checks": []}, "b": {"status": "running"}}
            figures.write_text(json.dumps({"recipes": recipes}))
            log.write_text("CUDA error: illegal address\n")
            return -6, "ended with code -6"
        figures.write_text(json.dumps({"status": "passed", "recipes": {"c": {"status": "passed", "checks": []}}}))
        log.write_text("")
        return 0, ""

    monkeypatch.setattr(main, "_run", fake)
    main._correctness(session, "native", 100, ())
    found = session.results["correctness native"]
    assert {name: r["status"] for name, r in found["recipes"].items()} == {"a": "passed", "b": "error", "c": "passed"}
    assert "illegal address" in found["recipes"]["b"]["reason"] and found["status"] == "error"
    assert calls[1][-2:] == ("--without", "a,b")


def test_fp8_is_put_beside_bf16():
    base = {"tokens_per_second": 100.0, "peak_memory_bytes": 200, "losses": [3.0, 2.0, 1.0]}
    fp8 = {"tokens_per_second": 150.0, "peak_memory_bytes": 150, "losses": [3.0, 2.5]}
    found = against_bf16({"train bf16": base, "train delayed native": fp8, "train te": {"status": "skipped"}})
    assert found == {"train delayed native": {"speedup": 1.5, "peak_memory": 0.75, "mean_loss_difference": 0.25}}
    assert "1.50 x BF16's tokens/s" in comparison_lines(found)[0]


def test_exit_code_says_whether_a_check_failed(tmp_path, monkeypatch):
    for status, code in (("passed", 0), ("skipped", 0), ("failed", 1), ("error", 1)):
        made = {"status": status, "reason": "x", "recipes": {}}
        monkeypatch.setattr(main.Session, "run", lambda self, part, made=made: self.results.setdefault(part.name, made))
        assert main.main(["--out", str(tmp_path)]) == code
        assert json.loads((tmp_path / "gpu.json").read_text())["exit_code"] == code


def test_a_wrong_scale_of_one_block_fails_a_check():
    generator = torch.Generator().manual_seed(1)
    want = torch.randn(64, 64, generator=generator)
    checks = Checks()
    checks.near("right", want * (1 + 2.0**-10), want, 2.0**-9)
    assert checks.passed
    wrong = want.clone()
    wrong[3] *= 1.125
    checks.near("a row", wrong, want, 2.0**-5)
    assert [check["what"] for check in checks.found if not check["passed"]] == ["a row, worst of its rows"]
    checks.near("not a number", want * torch.nan, want, 1.0)
    assert not checks.found[-1]["passed"]


def test_configurations_are_the_same_without_pydantic():
    """tests/gpu/stand_in builds what pydantic builds, for every example."""
    code = (
        "import glob, json, pydantic; from megafp8.core.config import to_dict\n"
        "from megafp8.train.config import load_run_config\n"
        "assert 'stand_in' in pydantic.__file__\n"
        "found = {p: to_dict(load_run_config(p)) for p in sorted(glob.glob('examples/*/pretrain*.toml'))}\n"
        "print(json.dumps(found))\n"
    )
    env = os.environ | {"PYTHONPATH": f"{main.STAND_IN}:{ROOT}"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found) >= 3
    for path, values in found.items():
        assert values == json.loads(json.dumps(to_dict(load_run_config(ROOT / path)))), path


def _arguments(**changed):
    return argparse.Namespace(**{"recipe": "delayed", "backend": "native", "micro_batch": 0, "steps": 6, "tiny": False,
                                 **changed})  # fmt: skip


@pytest.mark.parametrize(("gib", "fits"), [(141, 4), (80, 4), (52, 2), (24, 1)])
def test_the_micro_batch_follows_from_the_memory(gib, fits, monkeypatch):
    """27 GiB of model states, and about 6 GiB of activations a sequence."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (gib * 2**30, gib * 2**30))
    assert training.first_micro_batch(_arguments(), torch.device("cuda")) == fits


def test_a_micro_batch_that_does_not_fit_is_halved(tmp_path, monkeypatch, capsys):
    real, tried = training.assemble, []

    def assemble(config, *args):
        tried.append(config.train.micro_batch)
        if config.train.micro_batch > 1:
            raise torch.OutOfMemoryError("no")
        return real(config, *args)

    monkeypatch.setattr(training, "assemble", assemble)
    for name in ("empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda *args: None)
    figures = Figures(tmp_path / "f.json")
    training.train(_arguments(micro_batch=4, tiny=True), figures, Clock(200))
    assert tried == [4, 2, 1] and figures.values["micro_batch"] == 1 and figures.values["status"] == "passed"
