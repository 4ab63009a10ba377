"""Muon over ranks: however a matrix is split, copied or cut, its update is that of one process."""

from __future__ import annotations

from typing import Any

import pytest

from megafp8.optim.muon import Muon
from tests.distributed.ranks import run_ranks
from tests.distributed.small_run import differences, make_parts, run_config, train_each

EXPERTS = {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 16, "aux_loss": "sequence", "aux_loss_coeff": 0.1}
MUON = {"optimizer": {"name": "muon"}}
CASES: dict[int, list[tuple[dict[str, Any], dict[str, Any]]]] = {
    2: [({"dp": 2}, {}), ({"tp": 2}, {}), ({"dp": 2, "dp_shard": "optimizer"}, {})],
    4: [
        ({"dp": 2, "tp": 2, "dp_shard": "optimizer"}, {"num_kv_heads": 1}),
        ({"dp": 2, "tp": 2, "ep": 2}, {"moe": EXPERTS}),
        ({"dp": 4, "ep": 2, "dp_shard": "optimizer"}, {"moe": EXPERTS}),
        ({"pp": 2, "dp": 2}, {"tied_embeddings": True}),
    ],
}
# Sums in another order, 1e-13 (test_fully_shard); Newton-Schulz multiplies small singular values by 3.4445^5 = 500.
TOLERANCE = 1e-10


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_equals_one_process(world: int) -> None:
    alone = run_ranks(train_each, 1, [run_config(model=model, **MUON) for _, model in CASES[world]])[0]
    configs = [run_config(model=model, parallel=parallel, **MUON) for parallel, model in CASES[world]]
    for case, got, expected in zip(CASES[world], run_ranks(train_each, world, configs)[0], alone, strict=True):
        assert got["losses"] == pytest.approx(expected["losses"], rel=TOLERANCE), case
        worst = max(differences(got["state"], expected["state"]).items(), key=lambda item: item[1])
        assert worst[1] < TOLERANCE, (case, worst)


def shares(rank: int, world: int) -> list[int]:
    optimizer = make_parts(run_config(model={"num_layers": 4}, parallel={"dp": 2, "tp": 2}, **MUON), world).optimizer
    assert isinstance(optimizer, Muon)
    return optimizer.costs


def test_every_rank_orthogonalizes_its_share() -> None:
    all_costs = run_ranks(shares, 4)
    assert all(costs == all_costs[0] for costs in all_costs)
    # 4 layers of 7 matrices of two sizes (q, k, v, out; gate, up, down) over 4 ranks
    assert max(all_costs[0]) < 1.2 * sum(all_costs[0]) / 4
