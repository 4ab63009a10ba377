"""What is logged about experts, and what a training step does to them, does not depend on the mesh.

Cases R084 (auxiliary loss and the split of tokens), R086 (and the pipeline's size), R088 (scale of expert gradients)
of docs/cases.md, through the trainer's own step.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megafp8.core.config import build
from megafp8.data.loader import Batch
from megafp8.nn.balance import read_load
from megafp8.train.config import RunConfig, check_run
from megafp8.train.setup import assemble, make_mesh
from megafp8.train.step import train_step
from tests.distributed.ranks import run_ranks

MODEL: dict[str, Any] = {
    "num_layers": 4, "hidden_size": 16, "ffn_hidden_size": 16, "num_attention_heads": 4, "vocab_size": 64,
    "max_sequence_length": 16, "init_std": 0.3,
    "moe": {
        "num_experts": 4, "score": "sigmoid", "first_dense_layers": 1, "aux_loss": "sequence", "aux_loss_coeff": 0.1,
        "z_loss_coeff": 0.01, "bias_update_rate": 0.01, "capacity_factor": 1.0,
    },
}  # fmt: skip


class Feed:
    """8 sequences a step, whoever takes them, in micro-batches of 2."""

    global_batch = 8

    def __init__(self, dp_rank: int, dp_size: int) -> None:
        self.dp_rank, self.dp_size, self.consumed_samples = dp_rank, dp_size, 0

    def next_step(self) -> list[Batch]:
        first, share = self.consumed_samples, 8 // self.dp_size
        self.consumed_samples += 8
        batches = []
        for start in range(self.dp_rank * share, (self.dp_rank + 1) * share, 2):
            ids = torch.arange(first + start, first + start + 2)
            rows = [torch.randint(0, 64, (17,), generator=torch.Generator().manual_seed(int(i))) for i in ids]
            tokens = torch.stack(rows)
            batches.append(Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), ids))
        return batches


def outcome(rank: int, world: int, parallel: dict[str, Any]) -> list[Any]:
    """Loss, gradient norm and load of three steps."""
    values: dict[str, Any] = {
        "run": {"dir": "unused"}, "model": MODEL,
        "data": {"train": [{"path": "unused"}], "tokenizer": "bytes", "sequence_length": 16},
        "train": {"steps": 3, "global_batch": 8, "micro_batch": 2, "compile": "off"},
        "optimizer": {"lr": 1e-2, "schedule": "constant"}, "precision": {"dtype": "fp64"}, "parallel": parallel,
    }  # fmt: skip
    config = build(RunConfig, values)
    assert check_run(config, world) == []
    mesh = make_mesh(config, world)
    parts = assemble(config, mesh, torch.device("cpu"), Feed(mesh.coord("dp"), mesh.size("dp")))
    steps = []
    for step in range(1, 4):
        result = train_step(parts, step, 1e-2)
        loads = read_load(parts.routers, mesh, moe_layers=[1, 2, 3], num_experts=4, device=parts.device)
        steps.append((result.loss, result.grad_norm, loads))
    return steps


@pytest.fixture(scope="module")
def alone() -> list[Any]:
    return run_ranks(outcome, 1, {})[0]


@pytest.mark.parametrize("world, parallel", [
    (2, {"pp": 2}),
    (4, {"pp": 2, "ep": 2, "schedule": "zb_h1"}),
    pytest.param(4, {"pp": 4}, marks=pytest.mark.slow),
    pytest.param(4, {"dp": 2, "tp": 2, "ep": 2, "dp_shard": "optimizer"}, marks=pytest.mark.slow),
], ids=str)  # fmt: skip
def test_load_and_losses_do_not_depend_on_the_mesh(alone: list[Any], world: int, parallel: dict[str, Any]) -> None:
    for steps in run_ranks(outcome, world, parallel):
        for got, expected in zip(steps, alone, strict=True):
            # fp64: sums of 10^3 terms in another order and up to three steps of AdamW between them
            assert got[:2] == pytest.approx(expected[:2], rel=1e-9)
            for load, wanted in zip(got[2], expected[2], strict=True):
                assert (load.layer, load.shares, load.dropped) == (wanted.layer, wanted.shares, wanted.dropped)
                assert (load.aux_loss, load.z_loss) == pytest.approx((wanted.aux_loss, wanted.z_loss), rel=1e-9)


def test_the_data_tests_something(alone: list[Any]) -> None:
    loss, _, loads = alone[-1]
    assert loss > 1 and [load.layer for load in loads] == [1, 2, 3]
    for load in loads:
        assert sum(load.shares) == pytest.approx(1) and load.max_load > 1 > load.min_load
        assert load.dropped > 0.01 and load.aux_loss > 1 and load.z_loss > 0
