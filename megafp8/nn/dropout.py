"""Dropout whose masks depend on seed, sample and place only: the same on any number of ranks, and when recomputed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

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


@dataclass(frozen=True, eq=False)
class WeightDropout:
    """Which attention weights of one call are dropped: by sample, head, query and key, on any number of ranks alike.

    Attributes:
        rate: share of weights dropped.
        seed: of the layer.
        heads: [n, r] int64, n = B * g: where the weights of a sample's head begin among all weights.
        length: S, tokens of the whole sequence.
        queries, keys: [L], [K] int64, their places in the sequence.
    """

    rate: float
    seed: int
    heads: Tensor
    length: int
    queries: Tensor
    keys: Tensor

    def among(self, queries: Tensor, keys: Tensor) -> WeightDropout:
        """The same for other queries and keys, given by their places."""
        return replace(self, queries=queries, keys=keys)

    def factors(self, groups: slice, queries: slice, keys: slice, dtype: torch.dtype) -> Tensor:
        """0 or 1 / (1 - rate) for each weight of a block, [groups, queries * r, keys]; slices of n, L and K."""
        rows = self.heads[groups, None] + (self.queries[queries] * self.length)[None, :, None]
        place = rows.flatten(1)[..., None] + self.keys[keys]
        keep = uniform_at(self.seed, place) >= self.rate
        return keep.to(dtype) * (1.0 / (1.0 - self.rate))


def weight_dropout(
    key: DropoutKey, rate: float, name: str, *, groups: int, r: int, first: int, num_heads: int, places: Tensor
) -> WeightDropout:
    """Dropout of all weights between the tokens at `places` [S], for `groups` kv heads with `r` query heads each.

    `first` is the number of the first of these query heads among all `num_heads` of the model.
    """
    length = len(places)
    heads = torch.arange(groups * r, device=places.device).view(groups, r) + first
    start = (key.sample_ids.to(places.device) * num_heads)[:, None, None] + heads
    start = start.flatten(0, 1) * (length * length)
    return WeightDropout(rate, seed_for(key.seed, name), start, length, places, places)


def _drop(x: Tensor, rate: float, key: DropoutKey, name: str, place: Tensor) -> Tensor:
    keep = uniform_at(seed_for(key.seed, name), place) >= rate
    result: Tensor = _Masked.apply(x, keep, 1.0 / (1.0 - rate))
    return result


class _Masked(torch.autograd.Function):
    """x where `keep`, times `factor`, else 0; kept for backward is the mask, a byte an element."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, keep: Tensor, factor: float) -> Tensor:
        ctx.save_for_backward(keep)
        ctx.factor = factor
        return x * (keep.to(x.dtype) * factor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (keep,) = ctx.saved_tensors
        return grads[0] * (keep.to(grads[0].dtype) * ctx.factor), None, None
