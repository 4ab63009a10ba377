"""A run that is saved on one mesh and goes on on another: the same state, the same loss, the same steps.

Everything goes through the trainer's own assemble, train_step, save and load; only the data are made here.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megafp8.core.config import build
from megafp8.data.loader import Batch
from megafp8.train.config import RunConfig
from megafp8.train.setup import Parts, assemble, make_mesh
from megafp8.train.state import load_newest_run, save_run, tensors_of
from megafp8.train.step import train_step
from tests.distributed.ranks import run_ranks

Values = dict[str, Any]
ROWS, LENGTH, VOCAB = 8, 8, 53  # nothing divides the vocabulary

_DENSE: Values = {
    "family": "llama", "num_layers": 2, "hidden_size": 16, "ffn_hidden_size": 20, "num_attention_heads": 4,
    "num_kv_heads": 2, "vocab_size": VOCAB, "max_sequence_length": LENGTH, "init_std": 0.2, "tied_embeddings": True,
}  # fmt: skip
_EXPERTS: Values = {
    "num_experts": 4, "top_k": 2, "ffn_hidden_size": 6, "score": "sigmoid", "bias_update_rate": 0.01,
    "aux_loss": "sequence", "aux_loss_coeff": 0.1,
}  # fmt: skip
MODELS: dict[str, Values] = {"dense": _DENSE, "moe": {**_DENSE, "moe": _EXPERTS}}
MESHES: dict[str, Values] = {
    "single": {},
    "dp2": {"dp": 2, "dp_shard": "optimizer"},
    "tp2": {"tp": 2},
    "pp2": {"pp": 2},
    "cp2": {"cp": 2, "dp_shard": "optimizer"},
    "tp2 pp2": {"tp": 2, "pp": 2},
    "ep2": {"dp": 2, "ep": 2, "dp_shard": "optimizer"},
    "ep2 dp4": {"dp": 4, "ep": 2, "dp_shard": "optimizer"},
}
WORLDS = {"single": 1, "tp2 pp2": 4, "ep2 dp4": 4}


def config_of(model: str, mesh: str, folder: str, dtype: str) -> RunConfig:
    dp = MESHES[mesh].get("dp", 1)
    return build(
        RunConfig,
        {
            "run": {"dir": folder},
            "model": MODELS[model],
            "data": {"train": [{"path": "unused"}], "tokenizer": "bytes", "sequence_length": LENGTH},
            "train": {"steps": 9, "global_batch": ROWS, "micro_batch": ROWS // dp // 2, "compile": "off"},
            "optimizer": {"lr": 1e-2, "min_lr": 1e-2, "clip_grad": 0.5, "schedule": "constant", "kernel": "torch"},
            "precision": {"dtype": dtype},
            "parallel": MESHES[mesh],
        },
    )


@dataclass
class Feed:
    """The same samples by number on every mesh."""

    dp_rank: int
    dp_size: int
    consumed_samples: int = 0

    def next_step(self) -> list[Batch]:
        rows = ROWS // self.dp_size // 2
        starts = [self.consumed_samples + (m * self.dp_size + self.dp_rank) * rows for m in range(2)]
        self.consumed_samples += ROWS
        return [self._batch(np.arange(start, start + rows)) for start in starts]

    @staticmethod
    def _batch(ids: np.ndarray) -> Batch:
        rows = [np.random.default_rng(int(i)).integers(0, VOCAB, LENGTH + 1) for i in ids]
        tokens = torch.from_numpy(np.stack(rows))
        return Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].clone(), torch.from_numpy(ids))


def parts_of(world: int, model: str, mesh: str, folder: str, dtype: str) -> Parts:
    config = config_of(model, mesh, folder, dtype)
    ranks = make_mesh(config, world)
    feed = Feed(ranks.coord("dp"), ranks.size("dp"))
    corpus = {"fingerprint": "made"}
    return assemble(config, ranks, torch.device("cpu"), feed, corpus=corpus)


def state_of(parts: Parts) -> dict[str, torch.Tensor]:
    parts.optimizer.wait()
    return {name: tensor.clone() for name, tensor in tensors_of(parts)[0].items()}


def straight(rank: int, world: int, model: str, mesh: str, folder: str, dtype: str) -> tuple[list[float], Values]:
    """Four steps, saved after the second; losses and final state."""
    parts, losses = parts_of(world, model, mesh, folder, dtype), []
    for step in range(1, 5):
        losses.append(train_step(parts, step, 1e-2).loss)
        if step == 2:
            save_run(parts, 2, {})
    return losses, state_of(parts)


def resumed(
    rank: int, world: int, model: str, mesh: str, folders: list[str], dtype: str
) -> list[tuple[list[float], Values]]:
    """For each folder: steps three and four of a fresh process that loads what is there."""
    found = []
    for folder in folders:
        parts = parts_of(world, model, mesh, folder, dtype)
        loaded = load_newest_run(parts)
        assert loaded is not None and parts.optimizer.step_count == 2 and parts.loader.consumed_samples == 2 * ROWS
        losses = [train_step(parts, step, 1e-2).loss for step in (3, 4)]
        found.append((losses, state_of(parts)))
    return found


@pytest.mark.parametrize(("model", "mesh"), [("dense", "dp2"), ("moe", "ep2"), ("dense", "pp2"), ("moe", "single")])
def test_on_the_same_mesh_a_resumed_run_has_the_bits_of_one_that_went_through(tmp_path, model, mesh):
    world = WORLDS.get(mesh, 2)
    through = run_ranks(straight, world, model, mesh, str(tmp_path), "fp32")
    again = run_ranks(resumed, world, model, mesh, [str(tmp_path)], "fp32")
    for (losses, whole), [(later, restored)] in zip(through, again):
        assert later == losses[2:]
        assert restored.keys() == whole.keys() and any("exp_avg_sq" in name for name in whole)
        assert all(torch.equal(restored[name], tensor) for name, tensor in whole.items())


def pairs(model: str, meshes: list[str], tmp_path: Path) -> None:
    """Save on each mesh, go on on each: the losses are those of one process that went through."""
    folders = [str(tmp_path / mesh) for mesh in meshes]
    expected: list[float] = []
    for mesh, folder in zip(meshes, folders):
        for losses, _ in run_ranks(straight, WORLDS.get(mesh, 2), model, mesh, folder, "fp64"):
            expected = expected or losses
            assert losses == pytest.approx(expected, rel=1e-10), mesh
    for mesh in meshes:
        for found in run_ranks(resumed, WORLDS.get(mesh, 2), model, mesh, folders, "fp64"):
            for source, (losses, _) in zip(meshes, found):
                # as in tests of parity: fp64 sums in another order, 1e-13 a step
                assert losses == pytest.approx(expected[2:], rel=1e-10), f"{source} -> {mesh}"


def test_a_dense_run_goes_on_on_any_mesh(tmp_path):
    pairs("dense", ["single", "dp2", "pp2", "tp2 pp2"], tmp_path)


@pytest.mark.slow
def test_every_pair_of_dense_meshes(tmp_path):
    pairs("dense", [mesh for mesh in MESHES if "ep" not in mesh], tmp_path)


@pytest.mark.slow
def test_every_pair_of_expert_meshes(tmp_path):
    pairs("moe", list(MESHES), tmp_path)


def seen(rank: int, world: int, folder: str) -> tuple[float, float, bool]:
    """Losses of a fixed batch as saved and as loaded into fresh parts, and whether the weight is still tied."""
    parts = parts_of(world, "dense", "dp2", folder, "fp32")
    for step in (1, 2):
        train_step(parts, step, 1e-2)
    save_run(parts, 2, {})
    fresh = parts_of(world, "dense", "dp2", folder, "fp32")
    load_newest_run(fresh)
    model = fresh.stages[0]
    tied = model.output._matrix().data_ptr() == model.embedding.weight.data_ptr()
    return fixed_loss(parts), fixed_loss(fresh), tied


@torch.no_grad()
def fixed_loss(parts: Parts) -> float:
    batch = Feed._batch(np.arange(100, 104))
    return float(parts.stages[0](batch.tokens, batch.targets)[0]) / (4 * LENGTH)


def test_a_fixed_batch_has_the_same_loss_before_and_after_and_ties_hold(tmp_path):
    for before, after, tied in run_ranks(seen, 2, str(tmp_path)):
        assert before == after and tied
        assert abs(before - np.log(VOCAB)) > 0.05  # it has learned something that could have been lost
