"""A run with experts by the real command: load is logged, and resuming on the same or another mesh loses nothing."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from megafp8.checkpoint import latest, load_tensors
from tests.journeys.runs import losses, megafp8, overrides, records, write_config, write_corpus

EXPERTS = overrides(
    model__moe__num_experts=4,
    model__moe__ffn_hidden_size=32,
    model__moe__score="sigmoid",
    model__moe__bias_update_rate=0.01,
    model__moe__aux_loss="sequence",
    model__moe__aux_loss_coeff=0.01,
    precision__dtype="fp64",
    train__steps=6,
    train__eval_interval=0,
    checkpoint__interval=3,
)


def resumed(folder: Path, name: str, data: Path, *words: str) -> Path:
    """A copy of the run in `folder` as it was after step 3, gone on with."""
    config = write_config(folder.parent / name, data)
    run = config.parent / "run"
    shutil.copytree(folder / "run", run)
    shutil.rmtree(latest(run / "checkpoints"))
    done = megafp8("pretrain", config, *EXPERTS, *words)
    assert "resumed" in done.stderr
    return run


def test_load_is_logged_and_resume_is_exact_on_any_mesh(tmp_path: Path) -> None:
    data = tmp_path / "data"
    write_corpus(data)
    config = write_config(tmp_path / "straight", data)
    megafp8("pretrain", config, "--nproc", "2", *EXPERTS, *overrides(parallel__ep=2))
    run = config.parent / "run"
    for record in (found := records(run, "moe")):
        assert [layer["layer"] for layer in record["layers"]] == [0, 1]
        for layer in record["layers"]:
            assert sum(layer["load"]) == pytest.approx(1, abs=1e-5) and layer["dropped"] == 0
            assert layer["max_load"] == pytest.approx(4 * max(layer["load"]), abs=1e-4)
            assert layer["aux_loss"] > 0.9
    assert [record["step"] for record in found] == [1, 2, 3, 4, 5, 6]
    straight = load_tensors(latest(run / "checkpoints"), "")
    biases = [name for name in straight if name.startswith("moe.")]
    assert biases == [f"moe.layers.{i}.mlp.router.bias" for i in range(2)]
    assert all(straight[name].abs().max() > 0.005 for name in biases)
    experts = straight["optimizer.master.layers.0.mlp.experts.down"]
    assert len({float(expert.sum()) for expert in experts}) == 4  # the experts of both ranks, all different

    same = resumed(config.parent, "same", data, "--nproc", "2", *overrides(parallel__ep=2))
    assert losses(same) == losses(run)
    for name, tensor in load_tensors(latest(same / "checkpoints"), "").items():
        assert torch.equal(tensor, straight[name]), name

    alone = resumed(config.parent, "alone", data)
    # fp64 sums in another order, three steps of AdamW, as in test_training
    assert losses(alone) == pytest.approx(losses(run), rel=1e-10)
    for name, tensor in load_tensors(latest(alone / "checkpoints"), "").items():
        torch.testing.assert_close(tensor, straight[name], rtol=1e-7, atol=1e-9, msg=name)
