"""The nearest mesh that breaks no rule: one answer where several rules each name a nearest value of their own."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable

from megafp8.parallel.mesh_config import ParallelConfig

_AXES = ("pp", "cp", "tp", "ep", "etp")


def nearest_mesh(
    parallel: ParallelConfig, world: int, problems: Callable[[ParallelConfig], list[str]]
) -> ParallelConfig | None:
    """The mesh of `world` ranks closest to `parallel` with no `problems`, all else as it is; None if there is none.

    Only axes above 1 change. Closest is the least product of the factors by which they do.
    """
    divisors = [d for d in range(1, world + 1) if world % d == 0]
    choices = [sorted({parallel.dp, 0})]
    choices += [divisors if getattr(parallel, axis) > 1 else [1] for axis in _AXES[:4]]
    choices += [sorted({parallel.etp, 0})]
    found = []
    for dp, pp, cp, tp, ep, etp in itertools.product(*choices):
        if world % (pp * cp * tp) or world // pp % ep:
            continue
        found.append(dataclasses.replace(parallel, dp=dp, pp=pp, cp=cp, tp=tp, ep=ep, etp=etp))
    found.sort(key=lambda other: _distance(parallel, other))
    return next((other for other in found if not problems(other)), None)


def changed_axes(parallel: ParallelConfig, other: ParallelConfig) -> str:
    """What to write to get from the one to the other, as `tp = 2, pp = 1`."""
    pairs = [(axis, getattr(other, axis)) for axis in ("dp", *_AXES) if getattr(parallel, axis) != getattr(other, axis)]
    return ", ".join(f"{axis} = {size}" for axis, size in pairs)


def _distance(parallel: ParallelConfig, other: ParallelConfig) -> float:
    sizes = [(getattr(parallel, axis) or 1, getattr(other, axis) or 1) for axis in _AXES]
    return sum(abs(math.log(a / b)) for a, b in sizes) + (parallel.dp != other.dp)
