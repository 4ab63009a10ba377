"""A few training steps of a small model on any mesh, whole results by global name: what parity tests compare."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megafp8.core.config import build
from megafp8.core.layout import Layout
from megafp8.core.rng import fill_normal_, seed_for
from megafp8.data.loader import Batch
from megafp8.parallel.mesh import Mesh
from megafp8.parallel.pieces import own_piece
from megafp8.train.config import RunConfig
from megafp8.train.setup import Parts, assemble, make_mesh
from megafp8.train.state import tensors_of
from megafp8.train.step import train_step

MODEL = {
    "family": "llama", "num_layers": 2, "hidden_size": 32, "ffn_hidden_size": 48, "num_attention_heads": 8,
    "num_kv_heads": 4, "vocab_size": 64, "max_sequence_length": 16, "init_std": 0.3,
}  # fmt: skip


def run_config(**sections: Any) -> RunConfig:
    """A configuration in fp64; each section is laid over the small one."""
    base: dict[str, dict[str, Any]] = {
        "run": {"dir": "unused"},
        "model": MODEL,
        "data": {"tokenizer": "bytes", "train": [{"path": "unused"}], "sequence_length": 16},
        "train": {"steps": 5, "global_batch": 8, "micro_batch": 2},
        "optimizer": {"lr": 1e-2, "min_lr": 0.0, "clip_grad": 1.0, "schedule": "constant"},
        "precision": {"dtype": "fp64"},
        "parallel": {},
        "guard": {},
    }
    return build(RunConfig, {name: base.get(name, {}) | sections.get(name, {}) for name in {**base, **sections}})


class Tokens:
    """Random samples, each by its number; every third target carries no loss, unevenly over the samples."""

    def __init__(self, config: RunConfig, mesh: Mesh) -> None:
        self.consumed_samples, self.global_batch = 0, config.train.global_batch
        self._micro_batch, self._length, self._vocabulary = (
            config.train.micro_batch, config.data.sequence_length, config.model.vocab_size
        )  # fmt: skip
        self._dp, self._rank = mesh.size("dp"), mesh.coord("dp")

    def next_step(self) -> list[Batch]:
        unit = self._micro_batch * self._dp
        batches = []
        for start in range(self.consumed_samples, self.consumed_samples + self.global_batch, unit):
            first = start + self._rank * self._micro_batch
            batches.append(self._batch(np.arange(first, first + self._micro_batch)))
        self.consumed_samples += self.global_batch
        return batches

    def _batch(self, numbers: np.ndarray) -> Batch:
        rows = [np.random.default_rng(int(n)).integers(0, self._vocabulary, self._length + 1) for n in numbers]
        ids = torch.from_numpy(np.stack(rows))
        tokens, targets = ids[:, :-1].contiguous(), ids[:, 1:].clone()
        targets[:, ::3] = -100
        targets[torch.from_numpy(numbers % 2 == 0), 8:] = -100
        return Batch(tokens, targets, torch.from_numpy(numbers))


def make_parts(config: RunConfig, world: int) -> Parts:
    """What exists in such a run; norms and biases stand off their initial 1 and 0, so that a mix-up shows."""
    mesh = make_mesh(config, world)
    parts = assemble(config, mesh, torch.device("cpu"), Tokens(config, mesh))
    tensors, layouts = tensors_of(parts)
    for name, tensor in tensors.items():
        if name.startswith("optimizer.master.") and ("norm" in name or name.endswith("bias")):
            seed, mean = seed_for(7, name), 1.0 if name.endswith("norm.weight") else 0.0
            fill_normal_(tensor, seed=seed, layout=layouts[name], mesh=mesh, std=0.3, mean=mean)
    parts.optimizer.load_done()
    return parts


def whole(pieces: dict[str, torch.Tensor], layouts: dict[str, Layout], mesh: Mesh) -> dict[str, np.ndarray]:
    """Global tensors from the pieces of all ranks, on rank 0; elsewhere empty. Copies must agree bit for bit."""
    mine = {name: (layouts[name].shape, layouts[name].local_slices(mesh), t.numpy()) for name, t in pieces.items()}
    everyone: list[Any] = [mine]
    if mesh.world > 1:
        everyone = [None] * mesh.world
        dist.all_gather_object(everyone, mine)
    found: dict[str, np.ndarray] = {}
    for held in everyone if mesh.rank == 0 else ():
        for name, (shape, place, values) in held.items():
            tensor = found.setdefault(name, np.full(shape, np.nan, values.dtype))
            there = tensor[place]
            assert (np.isnan(there) | (there == values)).all(), f"{name}: ranks hold different copies"
            tensor[place] = values
    for name, tensor in found.items():
        assert not np.isnan(tensor).any(), f"{name}: parts are nowhere"
    return found


def train_small(rank: int, world: int, config: RunConfig, steps: int = 5) -> dict[str, Any]:
    """Losses and norms of each step, gradients of the first, optimizer state after the last."""
    torch.set_num_threads(1)
    parts = make_parts(config, world)
    losses, norms, gradients = [], [], {}
    for step in range(1, steps + 1):
        result = train_step(parts, step, config.optimizer.lr)
        losses.append(result.loss)
        norms.append(result.grad_norm)
        if step == 1:
            pieces = {name: own_piece(param) for name, param in parts.named_parameters}
            scale = min(1.0, config.optimizer.clip_grad / result.grad_norm)
            grads = {name: piece.grad / scale for name, piece in pieces.items()}
            gradients = whole(grads, {name: piece.layout for name, piece in pieces.items()}, parts.mesh)
    return {
        "losses": losses, "norms": norms, "gradients": gradients,
        "state": whole(*tensors_of(parts), parts.mesh),
    }  # fmt: skip


def train_each(rank: int, world: int, configs: list[RunConfig]) -> list[dict[str, Any]]:
    """Several settings of one world in the same processes."""
    return [train_small(rank, world, config) for config in configs]


def differences(got: dict[str, Any], expected: dict[str, Any]) -> dict[str, float]:
    """Relative Euclidean distance of each tensor."""
    assert got.keys() == expected.keys(), got.keys() ^ expected.keys()
    return {n: float(np.linalg.norm(got[n] - t) / (np.linalg.norm(t) or 1.0)) for n, t in expected.items()}

