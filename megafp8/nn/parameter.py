"""How a layer declares a parameter: its label (Layout), its name's seed and its initial values; memory comes later.

A parameter is born on the meta device with its local shape; `materialize` gives it memory and values that depend on
its global name only, so that they are equal at any tp.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from megafp8.core.layout import Layout, layout_of, stamp
from megafp8.core.rng import fill_normal_, seed_for
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
            full_name = f"{prefix}.{name}" if prefix else name
            if init.std:
                at = seed_for(seed, "init", full_name)
                fill_normal_(new, seed=at, layout=layout, mesh=mesh, std=init.std, mean=init.mean)
            else:
                new.fill_(init.mean)
            child._parameters[name] = new
