"""Cases of other projects about losses and sequences, each with the number that docs/cases.md gives it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megafp8.core.errors import DataError
from megafp8.models import ModelConfig, build
from megafp8.parallel.mesh import Mesh, build_mesh
from megafp8.parallel.mesh_config import ParallelConfig
from tests.distributed.ranks import run_ranks

CONFIG: dict[str, Any] = {
    "family": "llama", "num_layers": 1, "hidden_size": 16, "ffn_hidden_size": 24, "num_attention_heads": 4,
    "vocab_size": 32, "max_sequence_length": 16,
}  # fmt: skip


def labels(rank: int, world: int) -> list[str]:
    """R080: what each label outside the vocabulary comes to; none for -100 alone."""
    mesh = build_mesh(ParallelConfig(tp=world), world)
    model = build(ModelConfig(**CONFIG), mesh=mesh, dtype=torch.float64)
    tokens = torch.arange(16)[None]
    loss, count = model(tokens, torch.full((1, 16), -100))
    loss.backward()
    assert loss == 0 and count == 0
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())
    said = []
    for label in (32, 37, -1):
        targets = tokens.clone()
        targets[0, 5] = label
        try:
            model(tokens, targets)
        except DataError as error:
            said.append(str(error))
    return said


@pytest.mark.parametrize("tp", [1, 2])
def test_r080_labels_outside_the_vocabulary_are_refused(tp: int) -> None:
    for said in run_ranks(labels, tp):
        assert [line.split(" is neither")[0] for line in said] == ["target 32", "target 37", "target -1"]


def held(rank: int, world: int, exchange: str) -> list[int]:
    """R074: the tokens that a rank works on."""
    mesh = build_mesh(ParallelConfig(cp=world, cp_exchange=exchange), world)
    model = build(ModelConfig(**CONFIG), mesh=mesh, dtype=torch.float32)
    seen: list[torch.Tensor] = []
    model.embedding.register_forward_hook(lambda module, args, out: seen.append(args[0]))
    lengths: list[int] = []
    model.layers[0].mlp.register_forward_hook(lambda module, args, out: lengths.append(args[0].shape[0]))
    model(torch.arange(16)[None], torch.arange(16)[None])
    assert lengths == [16 // world]
    return sorted(seen[0].flatten().tolist())


@pytest.mark.parametrize("exchange", ["ring", "all_to_all"])
def test_r074_each_rank_has_its_own_half(exchange: str) -> None:
    results = run_ranks(held, 2, exchange)
    assert [len(tokens) for tokens in results] == [8, 8]
    assert sorted(results[0] + results[1]) == list(range(16))


def test_r082_a_mean_over_tokens_knows_no_micro_batches() -> None:
    """8 samples with 1, 3, 5, ... targets, at once and one by one, each divided by the targets of all."""
    tokens = torch.randint(0, 32, (8, 16), generator=torch.Generator().manual_seed(1))
    targets = tokens.roll(-1, 1).masked_fill(torch.arange(16) >= torch.arange(1, 16, 2)[:, None], -100)
    total = int((targets >= 0).sum())
    outcomes = []
    for size in (8, 1):
        model = build(ModelConfig(**CONFIG), mesh=Mesh.single(), dtype=torch.float64)
        losses = []
        for part, ids in zip(tokens.split(size), targets.split(size), strict=True):
            loss, _ = model(part, ids, loss_scale=1.0 / total)
            (loss / total).backward()
            losses.append(float(loss.detach() / total))
        outcomes.append((sum(losses), [p.grad for p in model.parameters()]))
    # sums of 64 terms in another order in fp64
    assert outcomes[0][0] == pytest.approx(outcomes[1][0], rel=1e-13)
    for whole, parts in zip(outcomes[0][1], outcomes[1][1], strict=True):
        torch.testing.assert_close(whole, parts, rtol=1e-10, atol=1e-15)
