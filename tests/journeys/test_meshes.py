"""Pipelines by the real command: the curve of one process, any other mesh at the next start, no rank left behind."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
import torch

from megafp8.checkpoint import latest, load_tensors
from tests.journeys.runs import losses, megafp8, overrides, records, start, wait_for, write_config


@pytest.fixture(scope="module")
def alone(data, tmp_path_factory) -> Path:
    """Eight steps of one process in fp64, tied weights, four layers."""
    folder = tmp_path_factory.mktemp("alone")
    megafp8("pretrain", write_config(folder, data), *overrides(**MODEL))
    return folder / "run"


MODEL = {"precision__dtype": "fp64", "model__tied_embeddings": "true", "model__num_layers": 4}
V = {"parallel__pp": 2, "parallel__schedule": "zb_v"}
INTERLEAVED = {"parallel__pp": 2, "parallel__schedule": "interleaved", "parallel__virtual_stages": 2}


def same(run: Path, alone: Path) -> None:
    # fp64 sums in another order: 1e-16 an addition, ~1e4 of them in a row, eight steps of AdamW
    assert losses(run) == pytest.approx(losses(alone), rel=1e-9)
    evals = [[(r["step"], r["tokens"]) for r in records(folder, "eval")] for folder in (run, alone)]
    assert evals[0] == evals[1]
    curves = [[r["loss"] for r in records(folder, "eval")] for folder in (run, alone)]
    assert curves[0] == pytest.approx(curves[1], rel=1e-9)
    a, b = (load_tensors(latest(folder / "checkpoints"), "optimizer.") for folder in (run, alone))
    assert a.keys() == b.keys()
    for name, tensor in a.items():
        torch.testing.assert_close(tensor, b[name], rtol=1e-6, atol=1e-9, msg=name)


def test_a_pipeline_equals_one_process(data, alone, tmp_path):
    """Rank 0, which writes the metrics, does not see the loss here: the last stage is on rank 1."""
    config = write_config(tmp_path, data)
    megafp8("pretrain", config, "--nproc", "2", *overrides(**MODEL, parallel__pp=2))
    same(tmp_path / "run", alone)


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL], ids=["term", "kill"])
def test_stopped_and_resumed_on_another_mesh(data, alone, tmp_path, how):
    config = write_config(tmp_path, data)
    process = start("pretrain", config, "--nproc", "4", *overrides(**MODEL, **V, checkpoint__interval=2))
    wait_for(lambda: len(records(tmp_path / "run")) >= 4, process)
    process.send_signal(how)
    process.communicate(timeout=60)
    assert len(records(tmp_path / "run")) < 8
    mesh = {**INTERLEAVED, "parallel__tp": 2}
    megafp8("pretrain", config, "--nproc", "4", *overrides(**MODEL, **mesh, checkpoint__interval=2))
    same(tmp_path / "run", alone)
    assert records(tmp_path / "run", "event")[-1]["event"] == "saved"


@pytest.mark.slow
def test_a_pipelines_checkpoint_serves_one_process(data, tmp_path):
    config = write_config(tmp_path, data)
    megafp8("pretrain", config, "--nproc", "2", *overrides(**MODEL, **V))
    run = tmp_path / "run"
    done = megafp8("eval", run, "--perplexity", "--data", data / "valid", "--dtype", "fp32", "--max-tokens", "512")
    assert "perplexity" in done.stdout.lower()
    done = megafp8("generate", run, "--prompt", "1 plus 2", "--max-new-tokens", "3")
    assert done.stdout.strip()
    megafp8("pretrain", config, *overrides(**MODEL, train__steps=9))
    assert len(losses(run)) == 9


@pytest.mark.slow
def test_fp8_in_a_pipeline_is_logged_and_resumed(data, tmp_path):
    config = write_config(tmp_path, data)
    words = {"model__num_layers": 4, "precision__recipe": "delayed", "log__fp8_interval": 4}
    megafp8("pretrain", config, "--nproc", "2", *overrides(**words, **V, train__steps=4))
    run = tmp_path / "run"
    found = records(run, "fp8")[-1]["stats"]  # layers 1 and 2 are on rank 1
    assert {name.split(".")[1] for name in found} == {"0", "1", "2", "3"}
    states = load_tensors(latest(run / "checkpoints"), "fp8.")
    assert len({name.split(".")[2] for name in states}) == 4
    assert all(bool((t > 0).any()) for name, t in states.items() if name.endswith("amax_history"))
    megafp8("pretrain", config, *overrides(**words, train__steps=8))
    assert len(losses(run)) == 8 and losses(run)[-1] < losses(run)[0]


@pytest.mark.slow
def test_a_killed_stage_ends_the_run_soon(data, tmp_path):
    import psutil

    config = write_config(tmp_path, data)
    process = start("pretrain", config, "--nproc", "4", *overrides(**MODEL, parallel__pp=4, train__steps=100000))
    wait_for(lambda: len(records(tmp_path / "run")) >= 1, process, seconds=120)
    psutil.Process(process.pid).children()[3].kill()
    begin = time.monotonic()
    process.communicate(timeout=60)
    assert process.returncode != 0 and time.monotonic() - begin < 30
    assert all(r["loss"] > 0 for r in records(tmp_path / "run"))


@pytest.mark.slow
def test_a_silent_stage_ends_the_run_by_name(data, tmp_path):
    import psutil

    config = write_config(tmp_path, data)
    words = overrides(parallel__pp=2, train__steps=100000, train__timeout_seconds=5)
    process = start("pretrain", config, "--nproc", "2", *words)
    wait_for(lambda: len(records(tmp_path / "run")) >= 1, process, seconds=120)
    keepers = psutil.Process(process.pid).children()
    (trainer,) = next(keeper for keeper in keepers if keeper.environ()["RANK"] == "1").children()
    trainer.suspend()
    _, said = process.communicate(timeout=100)
    assert process.returncode == 70 and "rank 0: hung: rank 1 (host" in said and "1 of 2 ranks wait for it" in said
    assert "this is a bug" not in said


@pytest.mark.parametrize("verb", [("check", "--ranks"), ("pretrain", "--nproc")], ids=["check", "pretrain"])
def test_all_broken_rules_of_a_mesh_at_once(data, tmp_path, verb):
    broken = {
        "parallel__pp": 2, "parallel__tp": 4, "parallel__cp": 2, "parallel__ep": 4, "parallel__etp": 1,
        "parallel__schedule": "interleaved", "parallel__virtual_stages": 2,
        "model__num_layers": 3, "model__num_attention_heads": 6, "model__num_kv_heads": 3, "model__head_dim": 16,
        "model__moe.num_experts": 6, "data__sequence_length": 62, "train__global_batch": 11,
    }  # fmt: skip
    begin = time.monotonic()
    done = megafp8(verb[0], write_config(tmp_path, data), verb[1], "32", *overrides(**broken), code=2)
    assert time.monotonic() - begin < 3
    lines = [line.split("error: ")[1] for line in done.stderr.splitlines()]
    for rule in (
        "model.num_attention_heads 6 is not divisible by parallel.tp 4; nearest: 4 or 8",
        "model.num_kv_heads 3 and parallel.tp 4: the one must be a multiple of the other; nearest: num_kv_heads 1 or 2",
        "parallel.ep = 4: does not divide model.moe.num_experts 6; nearest: 2 or 3",
        "sequence_length 62 is not divisible by parallel.cp 2 x parallel.tp 4 = 8, as experts need; nearest: 56 or 64",
        "model.num_layers 3 is not divisible by parallel.pp 2 x 2 stages a rank; nearest: num_layers = 4",
        "train.global_batch 11 is not divisible by dp 2 x train.micro_batch 2; nearest: 8, 12",
    ):
        assert any(line.startswith(rule) for line in lines), (rule, lines)
    assert len(lines) == 6 and not (tmp_path / "run").exists()


UNEVEN = "train.global_batch 8 is not divisible by dp 2 x train.micro_batch"


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"train__micro_batch": 16}, f"{UNEVEN} 16; nearest: 32"),
        ({"train__micro_batch": 3}, f"{UNEVEN} 3; nearest: 6, 12"),
        ({"train__micro_batch": -3}, "train.micro_batch: -3 is refused: input should be greater than 0"),
        ({"train__global_batch": 0}, "train.global_batch: 0 is refused: input should be greater than 0"),
    ],
    ids=["above", "uneven", "negative", "none"],
)
def test_batches_that_do_not_fit(data, tmp_path, values, says):
    done = megafp8("pretrain", write_config(tmp_path, data), "--nproc", "2", *overrides(**values), code=2)
    assert [line.split("error: ")[1] for line in done.stderr.splitlines()] == [says]
