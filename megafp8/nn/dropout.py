"""Dropout whose masks depend on seed, sample and place only: the same on any number of ranks, and when recomputed."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megafp8.core.rng import seed_for, uniform_at
from megafp8.parallel.mesh import Mesh

Tensor = torch.Tensor


@dataclass(frozen=True, eq=False)
class DropoutKey:
    """From what a micro-batch's masks come.

    Attributes:
        seed: of the run and step.
        sample_ids: [B] int64, the samples' global numbers.
    """

    seed: int
    sample_ids: Tensor


def hidden_dropout(
    x: Tensor, rate: float, key: DropoutKey, name: str, *, mesh: Mesh, places: Tensor | None = None
) -> Tensor:
    """Drop elements of x [S, B, H] (a shard along S under sequence and context parallelism) and scale the rest.

    `places` [S/cp] are the context's: where the rows of the cp rank stand in the sequence.
    """
    s, b, h = x.shape
    first = mesh.coord("tp") * s if mesh.sequence_parallel else 0
    length = s * (mesh.size("tp") if mesh.sequence_parallel else 1) * mesh.size("cp")
    rows = torch.arange(first, first + s, device=x.device) if places is None else places[first : first + s]
    place = key.sample_ids.to(x.device) * (length * h)
    place = place[None, :, None] + (rows * h)[:, None, None]
    return _drop(x, rate, key, name, place + torch.arange(h, device=x.device))


def attention_dropout(p: Tensor, rate: float, key: DropoutKey, name: str, *, mesh: Mesh) -> Tensor:
    """Drop attention weights p [B, heads, S, S] (this rank's heads) and scale the rest."""
    b, heads, s, _ = p.shape
    device = p.device
    head = torch.arange(heads, device=device) + mesh.coord("tp") * heads
    num_heads = heads * mesh.size("tp")
    place = (key.sample_ids.to(device)[:, None] * num_heads + head) * (s * s)
    within = torch.arange(s * s, device=device).view(s, s)
    return _drop(p, rate, key, name, place[..., None, None] + within)


def _drop(x: Tensor, rate: float, key: DropoutKey, name: str, place: Tensor) -> Tensor:
    keep = uniform_at(seed_for(key.seed, name), place) >= rate
    return x * (keep.to(x.dtype) * (1.0 / (1.0 - rate)))
