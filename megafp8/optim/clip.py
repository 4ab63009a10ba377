"""The global gradient norm, every element of the model counted once on any mesh, and the clip by it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from megafp8.parallel.collectives import all_reduce_
from megafp8.parallel.mesh import Mesh
from megafp8.parallel.mesh_config import RANK_ORDER
from megafp8.parallel.pieces import own_piece

# fp64 copies are made piece by piece in one buffer. torch's own norm with dtype=float64 allocates a copy
# for each call, whose pages, by the heap's mood, are mapped anew: 12 to 100 ms and up to 62,000 page faults
# for 32 million elements, against a steady 12 ms (CPU time of one thread, six processes).
_PIECE_ELEMENTS = 1 << 18


class GradNorm(NamedTuple):
    """The norm, and whether all gradients on all ranks are finite; both bit for bit equal on all ranks."""

    value: float
    finite: bool


def grad_norm(named_params: Sequence[tuple[str, torch.nn.Parameter]], mesh: Mesh) -> GradNorm:
    """Euclidean norm of all main gradients of the model; collective: all ranks of the mesh call it.

    Squares are summed in fp64, over all axes, stages of a pipeline among them. A piece that several ranks hold counts
    on that one of them which stands at 0 along its layout's `copy_axes`; a non-finite element counts on any.
    """
    counted: list[torch.Tensor] = []
    copies: list[torch.Tensor] = []
    once = {id(param): param for _, param in named_params if param.requires_grad}
    for param in once.values():
        piece = own_piece(param)
        owner = all(mesh.coord(axis) == 0 for axis in piece.layout.copy_axes)
        (counted if owner else copies).append(piece.grad)
    device = next(iter(once.values())).device
    mine, others = _square_sum(counted, device), _square_sum(copies, device)
    sums = torch.stack([mine, (~torch.isfinite(mine + others)).double()])
    # The flag is not read off the norm, for it tells of copies too, which are not in the sum.
    all_reduce_(sums, mesh.group_of(RANK_ORDER))
    square, num_broken = sums.tolist()
    return GradNorm(square**0.5 if square >= 0 else square, num_broken == 0)


def clip_scale(norm: float, clip_grad: float) -> float:
    """Factor that brings gradients of `norm` down to `clip_grad`; 1.0 if it is below, or `clip_grad` 0."""
    return clip_grad / norm if 0 < clip_grad < norm else 1.0


def _square_sum(tensors: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    total = torch.zeros((), dtype=torch.float64, device=device)
    if device.type != "cpu" and tensors:
        return torch.stack(torch._foreach_norm(tensors, 2, torch.float64)).square().sum()
    buffer = torch.empty(_PIECE_ELEMENTS, dtype=torch.float64, device=device)
    for tensor in tensors:
        for piece in tensor.view(-1).split(_PIECE_ELEMENTS):
            wide = buffer[: piece.numel()].copy_(piece)
            total += torch.dot(wide, wide)
    return total
