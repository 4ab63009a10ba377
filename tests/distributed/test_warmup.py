"""Delayed scaling's warm-up over ranks: one scale a tensor, as current scaling has, and exact across a resume."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from tests.distributed.ranks import run_ranks
from tests.distributed.test_fp8_meshes import STEPS, Curve, Setting, States, curve, stopped

EDGE = STEPS - 1  # the last step of the warm-up; `stopped` resumes one step before it ends


def several(rank: int, world: int, setting: Setting) -> tuple[Curve, Curve, Curve, list[float], States]:
    """Current scaling; a warm-up of all steps; one that ends before the last step, straight and resumed inside it."""
    current = curve(rank, world, replace(setting, recipe="current"))
    warm = curve(rank, world, replace(setting, warmup=STEPS))
    edge = replace(setting, warmup=EDGE)
    return current, warm, curve(rank, world, edge), *stopped(rank, world, edge)


def test_a_warm_up_is_current_scaling_on_ranks_and_resumes_across_its_edge(tmp_path: Path) -> None:
    """Sequence shards and experts' rows on two ranks: their scales are joined as current scaling joins them."""
    setting = Setting({"tp": 2}, experts=True, folder=str(tmp_path))
    ranks = run_ranks(several, 2, setting)
    for current, warm, edge, losses, states in ranks:
        assert warm.losses == current.losses and warm.norms == current.norms
        assert edge.losses[:EDGE] == current.losses[:EDGE] and edge.losses[EDGE] != current.losses[EDGE]
        assert losses == edge.losses
        assert states.keys() == edge.states.keys()
        assert all(torch.equal(states[name], tensor) for name, tensor in edge.states.items())
        # the amaxes are joined all the same, so the scales at the switch are one on both ranks
        assert all(torch.equal(ranks[0][2].states[name], tensor) for name, tensor in edge.states.items())
        assert all((tensor != 1).all() for name, tensor in edge.states.items() if name.endswith("scale"))
