"""One training setting on one mesh, and what came of it: pieces of every gradient and parameter, with their boxes.

Everything goes through the trainer's own `assemble` and `train_step`; only the data are made here. The parent puts
the ranks' pieces together and holds them against one process, so a piece that no rank has, or that two ranks have
differently, is seen too.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from megafp8.core.config import build
from megafp8.core.layout import Layout, layout_of
from megafp8.core.rng import fill_normal_, seed_for
from megafp8.data.loader import Batch
from megafp8.parallel.mesh import build_mesh
from megafp8.parallel.pieces import own_piece
from megafp8.train.config import RunConfig
from megafp8.train.setup import Parts, assemble
from megafp8.train.step import train_step

Values = dict[str, Any]
SAMPLES, LENGTH, VOCAB = 16, 16, 64
STEPS = 5

_SMALL: Values = {
    "hidden_size": 32, "ffn_hidden_size": 48, "num_attention_heads": 8, "num_kv_heads": 2,
    "vocab_size": VOCAB, "max_sequence_length": LENGTH, "init_std": 0.1,
}  # fmt: skip
_EXPERTS: Values = {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 16, "aux_loss": "sequence"}
MODELS: dict[str, Values] = {
    "tied": {"family": "llama", "tied_embeddings": True, "attention_bias": True, **_SMALL},
    "untied": {"family": "qwen3", "head_dim": 4, **_SMALL, "num_kv_heads": 4},
    "gpt": {"family": "gpt", "hidden_dropout": 0.1, **_SMALL, "num_kv_heads": 8},
    "moe": {"family": "llama", **_SMALL, "moe": {**_EXPERTS, "aux_loss_coeff": 0.1, "z_loss_coeff": 0.01}},
    "moe_tied": {
        "family": "llama", "tied_embeddings": True, **_SMALL,
        "moe": {**_EXPERTS, "score": "sigmoid", "num_shared_experts": 1, "first_dense_layers": 1,
                "bias_update_rate": 0.01, "aux_loss_coeff": 0.1},
    },
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A mesh and how it is used. `parallel` is the configuration's section, `micro_batches` a step's on a dp rank."""

    parallel: Values = field(default_factory=dict)
    model: str = "tied"
    micro_batches: int = 1
    recompute: str = "none"
    document_mask: bool = False
    num_layers: int = 4

    def __hash__(self) -> int:
        return hash(str(self))

    @property
    def world(self) -> int:
        """Processes of the mesh."""
        return math.prod(self.parallel.get(axis, 1) for axis in ("pp", "dp", "cp", "tp"))

    def __str__(self) -> str:
        words = [f"{key}={value}" for key, value in self.parallel.items()]
        rest = [self.model, f"layers={self.num_layers} m={self.micro_batches}", self.recompute]
        return " ".join(words + rest + ["documents"] * self.document_mask)


def run_config(case: Case) -> RunConfig:
    """The run's configuration; its data section is never opened."""
    dp = case.parallel.get("dp", 1)
    return build(
        RunConfig,
        {
            "run": {"dir": "unused"},
            "model": {"num_layers": case.num_layers, **MODELS[case.model]},
            "data": {
                "train": [{"path": "unused"}], "tokenizer": "bytes", "sequence_length": LENGTH,
                "document_mask": case.document_mask,
            },
            "train": {
                "steps": STEPS, "global_batch": SAMPLES, "micro_batch": SAMPLES // (dp * case.micro_batches),
                "recompute": case.recompute, "compile": "off",
            },
            "optimizer": {"lr": 1e-2, "min_lr": 1e-2, "clip_grad": 0.5, "schedule": "constant"},
            "precision": {"dtype": "fp64"},
            "parallel": case.parallel,
        },
    )  # fmt: skip


class MadeLoader:
    """Serves the same samples by number whatever the ranks; targets are missing in uneven places."""

    def __init__(self, case: Case, dp_rank: int, dp_size: int) -> None:
        self.case, self.dp_rank, self.dp_size = case, dp_rank, dp_size
        self.consumed_samples, self.global_batch = 0, SAMPLES

    def next_step(self) -> list[Batch]:
        """This rank's micro-batches."""
        rows = SAMPLES // (self.dp_size * self.case.micro_batches)
        starts = [
            self.consumed_samples + (m * self.dp_size + self.dp_rank) * rows for m in range(self.case.micro_batches)
        ]
        self.consumed_samples += SAMPLES
        return [_batch(np.arange(start, start + rows), self.case.document_mask) for start in starts]


def _batch(ids: np.ndarray, document_mask: bool) -> Batch:
    rows = [np.random.default_rng(int(i)).integers(0, VOCAB, LENGTH + 1) for i in ids]
    tokens = torch.from_numpy(np.stack(rows))
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].clone()
    for row, i in zip(targets, ids):
        row[: int(i) % 5] = -100  # ranks, micro-batches and sequence shards have different numbers of targets
    segments = positions = None
    if document_mask:
        cuts = [int(i) % (LENGTH - 2) + 1 for i in ids]
        segments = torch.stack([(torch.arange(LENGTH) >= cut).long() for cut in cuts])
        positions = torch.stack([torch.arange(LENGTH) - cut * (torch.arange(LENGTH) >= cut) for cut in cuts])
    return Batch(inputs, targets, torch.from_numpy(np.asarray(ids)), segments, positions)


@dataclass
class Piece:
    """What one rank holds of a tensor: its box in the whole, its values, whether other ranks hold the same."""

    box: tuple[slice, ...]
    values: np.ndarray
    shape: tuple[int, ...]


@dataclass
class Outcome:
    """One rank's view of a run."""

    losses: list[float]
    norms: list[float]
    gradients: dict[str, Piece]  # of the first step, before clipping
    parameters: dict[str, Piece]  # masters after all steps


def run_case(rank: int, world: int, case: Case) -> Outcome:
    """Train `STEPS` steps."""
    torch.set_num_threads(1)
    config = run_config(case)
    mesh = build_mesh(
        config.parallel, world, kv_heads=config.model.num_kv_heads, tied_embeddings=config.model.tied_embeddings
    )
    loader = MadeLoader(case, mesh.coord("dp"), mesh.size("dp"))
    parts = assemble(config, mesh, torch.device("cpu"), loader)
    _disturb(parts)
    gradients: dict[str, Piece] = {}
    take_step = parts.optimizer.step

    def watched(*args: Any, **kwargs: Any) -> None:
        if not gradients:
            gradients.update(_gradients(parts))
        take_step(*args, **kwargs)

    parts.optimizer.step = watched  # type: ignore[method-assign]
    results = [train_step(parts, step, 1e-2) for step in range(1, STEPS + 1)]
    layouts = parts.optimizer.layouts()
    prefix = "optimizer.master."
    masters = {
        name.removeprefix(prefix): _piece(tensor, layouts[name], parts)
        for name, tensor in parts.optimizer.tensors().items()
        if name.startswith(prefix)
    }
    return Outcome([r.loss for r in results], [r.grad_norm for r in results], gradients, masters)


def run_cases(rank: int, world: int, cases: list[Case]) -> list[Outcome]:
    """Several cases of one world in the same processes."""
    return [run_case(rank, world, case) for case in cases]


def _piece(tensor: torch.Tensor, layout: Layout, parts: Parts) -> Piece:
    box = layout.local_slices(parts.mesh)
    return Piece(box, tensor.detach().double().numpy().copy(), layout.shape)


def _gradients(parts: Parts) -> dict[str, Piece]:
    gradients = {}
    for name, param in parts.named_parameters:
        piece = own_piece(param)
        gradients[name] = _piece(piece.grad, piece.layout, parts)
    return gradients


def _disturb(parts: Parts) -> None:
    """Norm weights and biases off their initial 1 and 0, by global name, so that a mix-up of elements shows."""
    masters = parts.optimizer.tensors()
    with torch.no_grad():
        for name, param in parts.named_parameters:
            if name.endswith("bias") or "norm" in name:
                mean = 0.0 if name.endswith("bias") else 1.0
                layout = layout_of(param)
                fill_normal_(param, seed=seed_for(7, name), layout=layout, mesh=parts.mesh, std=0.3, mean=mean)
                masters[f"optimizer.master.{name}"].copy_(own_piece(param).of(param))


def together(pieces: list[dict[str, Piece]]) -> dict[str, np.ndarray]:
    """The whole tensors; every element held by someone, and equally by all who hold it.

    Raises:
        AssertionError: a hole, or copies that differ by more than roundings of sums in another order.
    """
    wholes: dict[str, np.ndarray] = {}
    for held in pieces:
        for name, piece in held.items():
            whole = wholes.setdefault(name, np.full(piece.shape, np.nan))
            there = whole[piece.box]
            known = ~np.isnan(there)
            # copies are sums of the same terms, taken once and sent round: bit for bit equal
            assert np.array_equal(there[known], piece.values[known]), f"{name}: copies differ"
            whole[piece.box] = piece.values
    holes = [name for name, whole in wholes.items() if np.isnan(whole).any()]
    assert not holes, f"nobody holds all of {holes}"
    return wholes


def single(case: Case) -> Case:
    """The same training on one process, in one micro-batch."""
    return dataclasses.replace(case, parallel={}, micro_batches=1, recompute="none")
