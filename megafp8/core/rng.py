"""Seeds by name and step, and random values that depend only on a seed and a global index.

No value depends on the number of ranks: a rank that holds rows 100-199 of a weight draws exactly those rows. The
generator is counter based (the finaliser of SplitMix64, Steele, Lea, Flood, OOPSLA 2014, applied to
seed + index), so that any piece is drawn by itself.
"""

from __future__ import annotations

import hashlib
import math
from typing import Any

import torch

from megafp8.core.layout import AxisSizes, Layout

_MASK63 = (1 << 63) - 1
_CHUNK = 1 << 15  # elements drawn at once: the temporaries stay in the cache (twice as fast as 2^20)


def seed_for(run_seed: int, *names: Any) -> int:
    """A 63-bit seed from the run's seed and any names: `seed_for(1234, "dropout", layer, step)`."""
    text = "\x1f".join(str(part) for part in (run_seed, *names))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") & _MASK63


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_MIX1 = _signed(0xBF58476D1CE4E5B9)
_MIX2 = _signed(0x94D049BB133111EB)


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical right shift of int64 (torch's `>>` is arithmetic)."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def hash_at(seed: int, index: torch.Tensor) -> torch.Tensor:
    """64 random bits for each int64 index, as int64, same shape."""
    x = (index + 1) * _GOLDEN + _signed(seed & ((1 << 64) - 1))
    x = (x ^ _shift_right(x, 30)) * _MIX1
    x = (x ^ _shift_right(x, 27)) * _MIX2
    return x ^ _shift_right(x, 31)


def uniform_at(seed: int, index: torch.Tensor) -> torch.Tensor:
    """fp32 uniforms in [0, 1) with 24 random bits, one for each int64 index, same shape."""
    return _shift_right(hash_at(seed, index), 40).to(torch.float32) * (1.0 / (1 << 24))


def normal_at(seed: int, index: torch.Tensor) -> torch.Tensor:
    """fp32 standard normals by Box and Muller (1958), one for each int64 index, same shape."""
    bits = hash_at(seed, index)
    # (k + 0.5) / 2^32 lies strictly between 0 and 1, so that the logarithm is finite
    u1 = (_shift_right(bits, 32).to(torch.float64) + 0.5) * 2.0**-32
    u2 = (bits & 0xFFFFFFFF).to(torch.float64) * 2.0**-32
    return (torch.sqrt(-2.0 * torch.log(u1)) * torch.cos(2.0 * math.pi * u2)).to(torch.float32)


def global_index(
    layout: Layout, mesh: AxisSizes, device: torch.device | str = "cpu", rows: slice = slice(None)
) -> torch.Tensor:
    """int64 index into the flattened global tensor of every element of this rank's piece, local shape.

    Args:
        rows: only these of the piece's first dim.
    """
    index = torch.zeros((), dtype=torch.int64, device=device)
    for dim, (size, piece) in enumerate(zip(layout.shape, layout.local_slices(mesh), strict=True)):
        places = torch.arange(piece.start, piece.stop, device=device)
        index = index.unsqueeze(-1) * size + (places[rows] if dim == 0 else places)
    return index


@torch.no_grad()
def fill_normal_(
    tensor: torch.Tensor, *, seed: int, layout: Layout, mesh: AxisSizes, std: float, mean: float = 0.0
) -> torch.Tensor:
    """Fill this rank's piece with normals that depend only on `seed` and the global index.

    Args:
        tensor: the local piece, shape `layout.local_shape(mesh)`, any floating dtype; drawn in fp32, then cast.
    """
    assert tuple(tensor.shape) == layout.local_shape(mesh), (tensor.shape, layout, "is not this rank's piece")
    rows = tensor if tensor.dim() else tensor.view(1)
    step = max(1, _CHUNK * rows.shape[0] // max(1, rows.numel()))
    for start in range(0, rows.shape[0], step):
        index = global_index(layout, mesh, tensor.device, slice(start, start + step))
        rows[start : start + step] = normal_at(seed, index).mul_(std).add_(mean)
    return tensor
