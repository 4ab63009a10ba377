"""Training by the real command: learns, is the same on any mesh, resumes bit for bit, refuses in one line."""

from __future__ import annotations

import json
import signal
import time

import pytest
import torch

from megafp8.checkpoint import latest, load_tensors
from tests.journeys.runs import losses, megafp8, overrides, records, start, wait_for, write_config


def test_learns_and_leaves_a_folder(config, tmp_path):
    done = megafp8("pretrain", config, *overrides(train__steps=40, log__fp8_interval=10, precision__recipe="delayed"))
    run = tmp_path / "run"
    curve = losses(run)
    assert curve[0] > 5.0 and curve[-1] < 2.5  # ln 272 = 5.6 at the start
    left = {path.name for path in run.iterdir()}
    assert {"config.toml", "metrics.jsonl", "log.txt", "run.json", "checkpoints", "lock"} <= left
    facts = json.loads((run / "run.json").read_text())
    assert facts["num_parameters"] > 0 and facts["peak_flops"] > 0 and "measured" in facts["peak_source"]
    stats = records(run, "fp8")[-1]["stats"]
    assert "layers.0.attention.qkv.input.underflows%" in stats and "layers.1.mlp.down.grad_output.scale" in stats
    assert facts["fp8"] == {"gemms": 24, "fp8_gemms": 24, "recipes": {"delayed": 8}, "not_fp8": []}
    assert records(run, "eval")[-1]["perplexity"] == pytest.approx(2.718281828 ** records(run, "eval")[-1]["loss"])
    assert "iteration" in done.stderr and "no GPU" in done.stderr
    again = megafp8("pretrain", config, *overrides(train__steps=40, log__fp8_interval=10, precision__recipe="delayed"))
    assert "nothing to do" in again.stderr and losses(run) == curve


@pytest.mark.parametrize("mesh", [{"parallel__dp": 2}, {"parallel__tp": 2}], ids=["dp2", "tp2"])
def test_two_processes_equal_one(config, data, tmp_path, mesh):
    wide = {"precision__dtype": "fp64", "train__steps": 4}
    megafp8("pretrain", config, *overrides(**wide))
    other = write_config(tmp_path / "two", data)
    megafp8("pretrain", other, "--nproc", "2", *overrides(**wide, **mesh))
    one, two = losses(tmp_path / "run"), losses(tmp_path / "two/run")
    # fp64 sums in another order: 1e-16 an addition, ~1e4 of them in a row, four steps of AdamW
    assert two == pytest.approx(one, rel=1e-10)
    a, b = (load_tensors(latest(d / "run/checkpoints"), "optimizer.master.") for d in (tmp_path, tmp_path / "two"))
    for name, tensor in a.items():
        torch.testing.assert_close(b[name], tensor, rtol=1e-7, atol=1e-9)


def test_goes_on_in_fp8_where_that_is_meant(config, tmp_path):
    plain = {"precision__dtype": "fp32", "train__eval_interval": 0}  # nothing is compiled
    megafp8("pretrain", config, *overrides(**plain, train__steps=4))
    words = overrides(**plain, train__steps=8, precision__recipe="delayed", precision__warmup_steps=2)
    done = megafp8("pretrain", config, *words, code=2)
    assert "precision.recipe was 'none', is 'delayed'" in done.stderr and "change_precision = true" in done.stderr
    done = megafp8("pretrain", config, *words, *overrides(checkpoint__change_precision="true"))
    assert "FP8 state starts afresh" in done.stderr and "warm-up until step 6" in done.stderr
    assert len(losses(tmp_path / "run")) == 8
    states = load_tensors(latest(tmp_path / "run/checkpoints"), "fp8.")
    assert states and all((tensor != 1).all() for name, tensor in states.items() if name.endswith("scale"))


@pytest.mark.parametrize("recipe", ["none", "delayed"])
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL], ids=["term", "kill"])
def test_stopped_and_resumed_is_bit_equal(config, data, tmp_path, recipe, how):
    words = ["--nproc", "2", *overrides(precision__recipe=recipe, train__steps=12)]
    straight = write_config(tmp_path / "straight", data)
    megafp8("pretrain", straight, *words)
    process = start("pretrain", config, *words)
    wait_for(lambda: len(records(tmp_path / "run")) >= 5, process)
    if how == signal.SIGTERM:
        process.send_signal(how)
        _, err = process.communicate(timeout=60)
        assert process.returncode == 75, err
        assert records(tmp_path / "run", "event")[-1]["event"] == "preempted"
    else:
        _kill_tree(process.pid)
        process.communicate(timeout=60)
    assert len(records(tmp_path / "run")) < 12
    megafp8("pretrain", config, *words)
    assert losses(tmp_path / "run") == losses(tmp_path / "straight/run")
    a, b = (load_tensors(latest(d / "run/checkpoints")) for d in (tmp_path, tmp_path / "straight"))
    assert a.keys() == b.keys() and any("fp8." in name for name in a) == (recipe == "delayed")
    assert all(torch.equal(a[name], b[name]) for name in a)
    evals = [[(r["step"], r["loss"]) for r in records(d / "run", "eval")] for d in (tmp_path, tmp_path / "straight")]
    assert evals[0] == evals[1]


def _kill_tree(pid: int) -> None:
    import psutil

    tree = [*psutil.Process(pid).children(recursive=True), psutil.Process(pid)]
    for process in tree:
        process.kill()
    psutil.wait_procs(tree, timeout=10)


def test_a_killed_launcher_leaves_no_orphans(config, tmp_path):
    import psutil

    words = ["--nproc", "2", *overrides(train__steps=100000)]
    process = start("pretrain", config, *words)
    wait_for(lambda: len(records(tmp_path / "run")) >= 1, process)
    ranks = psutil.Process(process.pid).children(recursive=True)
    assert len(ranks) == 4  # a keeper and a trainer each
    process.kill()
    _, alive = psutil.wait_procs(ranks, timeout=10)
    assert not alive
    process.communicate()


def test_a_killed_rank_ends_the_run_soon(config, tmp_path):
    import psutil

    process = start("pretrain", config, "--nproc", "2", *overrides(train__steps=100000))
    wait_for(lambda: len(records(tmp_path / "run")) >= 1, process)
    keepers = [psutil.Process(process.pid).children()[rank] for rank in (0, 1)]
    victim = next(child for keeper in keepers if keeper.environ()["RANK"] == "1" for child in keeper.children())
    victim.kill()
    begin = time.monotonic()
    _, err = process.communicate(timeout=30)
    assert time.monotonic() - begin < 5 and process.returncode == 137, err
    assert "rank 1: killed by SIGKILL in step" in err and "rank 0: lost its peer in step" in err, err
    assert err.splitlines()[-1] == "megafp8 pretrain: rank 1 failed first, with exit code 137"
    assert all(r["loss"] > 0 for r in records(tmp_path / "run"))


def test_resumes_on_another_mesh(config, data, tmp_path):
    megafp8("pretrain", config, "--nproc", "2", *overrides(precision__dtype="fp64", parallel__tp=2, train__steps=4))
    words = overrides(precision__dtype="fp64", train__steps=8)
    # the schedule ends at train.steps, so the straight run has to end its decay where the first attempt's did not
    fixed = overrides(optimizer__decay_steps=8)
    for folder in ("a", "b"):
        write_config(tmp_path / folder, data)
    megafp8("pretrain", tmp_path / "a/pretrain.toml", *words, *fixed)
    first = overrides(precision__dtype="fp64", train__steps=4, parallel__tp=2)
    megafp8("pretrain", tmp_path / "b/pretrain.toml", "--nproc", "2", *first, *fixed)
    megafp8("pretrain", tmp_path / "b/pretrain.toml", "--nproc", "2", *words, *fixed, *overrides(parallel__dp=2))
    assert losses(tmp_path / "b/run") == pytest.approx(losses(tmp_path / "a/run"), rel=1e-10)


def test_a_folder_in_use_and_one_of_another_run(config, tmp_path):
    process = start("pretrain", config, *overrides(train__steps=100000))
    wait_for(lambda: len(records(tmp_path / "run")) >= 1, process)
    done = megafp8("pretrain", config, *overrides(train__steps=100000), code=6)
    assert "in use by" in done.stderr and "Traceback" not in done.stderr
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 75
    done = megafp8("pretrain", config, *overrides(optimizer__lr=0.5), code=2)
    assert "optimizer.lr was 0.003, is 0.5" in done.stderr


@pytest.mark.parametrize(
    ("values", "code", "says"),
    [
        ({"model__vocab_size": 128}, 2, "raise it to"),
        ({"data__train": '[{ path = "/nowhere/train" }]'}, 3, "/nowhere/train"),
        ({"data__tokenizer": "/nowhere.model"}, 3, "/nowhere.model"),
        ({"precision__recipe": "delayed", "model__ffn_hidden_size": 120}, 2, "multiple of 16"),
        ({"data__sequence_length": 128}, 2, "max_sequence_length 64"),
        ({"run__dir": "/proc/nowhere"}, 6, "/proc/nowhere"),
        ({"precision__backend": "te", "precision__recipe": "delayed"}, 2, "te"),
        ({"optimizer__kernel": "apex"}, 2, "apex"),
    ],
    ids=["vocabulary", "corpus", "tokenizer", "fp8-dims", "sequence", "folder", "backend", "kernel"],
)
def test_bad_input_is_one_line_and_leaves_nothing(config, tmp_path, values, code, says):
    done = megafp8("pretrain", config, *overrides(**values), code=code)
    lines = [line for line in done.stderr.splitlines() if "error" in line]
    assert len(lines) == 1 and says in lines[0], done.stderr
    assert "Traceback" not in done.stderr and not (tmp_path / "run/checkpoints").exists()


def test_an_error_of_all_ranks_is_said_once(config):
    done = megafp8("pretrain", config, "--nproc", "2", *overrides(data__tokenizer="/nowhere.model"), code=3)
    assert done.stderr.count("/nowhere.model") == 1


def test_nonfinite_loss_ends_with_its_own_code(config):
    done = megafp8("pretrain", config, *overrides(optimizer__lr=1e30, optimizer__clip_grad=0.0, train__steps=40,
                                                    train__max_nonfinite_steps=2), code=5)  # fmt: skip
    assert "not finite for 3 steps in a row" in done.stderr
    last = done.stderr.splitlines()[-1]
    assert "first not finite: " in last and ", micro-batch 0, rank 0: " in last
    skipped = [record for record in records(config.parent / "run", "event") if record["event"] == "skipped"]
    assert len(skipped) == 3 and all(record["num_nan"] + record["num_inf"] > 0 for record in skipped)
