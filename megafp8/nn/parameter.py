"""How a layer declares a parameter: its label (Layout), its name's seed and its initial values; memory comes later.

A parameter is born on the meta device with its local shape; `materialize` gives it memory and values that depend on
its global name only, so that they are equal at any tp.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from megafp8.core.layout import Layout, layout_of, stamp
from megafp8.core.rng import fill_normal_, seed_for
from megafp8.parallel.fully_shard import shard_fully
from megafp8.parallel.mesh import Mesh


@dataclass(frozen=True)
class Init:
    """Initial values: normals of `std` around `mean`; std 0 is the constant `mean`."""

    std: float = 0.0
    mean: float = 0.0


def declare(layout: Layout, init: Init, *, mesh: Mesh, dtype: torch.dtype) -> nn.Parameter:
    """A parameter of `layout`'s local shape on the meta device."""
    parameter = nn.Parameter(torch.empty(layout.local_shape(mesh), dtype=dtype, device="meta"))
    stamp(parameter, layout)
    parameter.init = init  # type: ignore[attr-defined]
    return parameter


@torch.no_grad()
def materialize(module: nn.Module, *, mesh: Mesh, seed: int, device: torch.device | str) -> None:
    """Replace every meta parameter by one with memory on `device` and its initial values; move buffers there."""
    for prefix, child in module.named_modules():
        for name, buffer in child._buffers.items():
            child._buffers[name] = None if buffer is None else buffer.to(device)
        for name, old in list(child._parameters.items()):
            if old is None or not old.is_meta:
                continue
            layout, init = layout_of(old), old.init
            new = nn.Parameter(torch.empty(old.shape, dtype=old.dtype, device=device))
            stamp(new, layout)
            new.init = init  # type: ignore[attr-defined]
            initialize(new, f"{prefix}.{name}" if prefix else name, init, mesh=mesh, seed=seed)
            child._parameters[name] = new


@torch.no_grad()
def materialize_sharded(
    module: nn.Module, units: Iterable[nn.Module], *, mesh: Mesh, seed: int, device: torch.device | str
) -> None:
    """As `materialize`, each parameter cut over its replicas and its pieces the masters; `units`: see `shard_fully`."""

    def fill(name: str, piece: nn.Parameter, declared: nn.Parameter) -> None:
        initialize(piece, name, declared.init, mesh=mesh, seed=seed)  # type: ignore[attr-defined]
        piece.copy_(piece.to(declared.dtype))  # masters begin at the values of a run that is not sharded

    shard_fully(module, units, mesh, device=device, fill=fill)


@torch.no_grad()
def initialize(piece: torch.Tensor, name: str, init: Init, *, mesh: Mesh, seed: int) -> None:
    """Fill a piece (by its Layout) of the parameter of this global name with its initial values."""
    if init.std:
        at = seed_for(seed, "init", name)
        fill_normal_(piece, seed=at, layout=layout_of(piece), mesh=mesh, std=init.std, mean=init.mean)
    else:
        piece.fill_(init.mean)
