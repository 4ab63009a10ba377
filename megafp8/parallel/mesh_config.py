"""The mesh as arithmetic: sizes, coordinates, and what is refused and why.

No torch here, so that `megafp8 check` judges a mesh before any process starts; process groups are in `mesh`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from pydantic import Field

from megafp8.core.config import config_dataclass, nearest

# Megatron's rank order, fastest first: neighbours in tp talk most, so they share a node. Experts reuse the
# ranks of dp x cp and have no place of their own in the product.
RANK_ORDER = ("tp", "cp", "dp", "pp")
AXES = ("pp", "dp", "cp", "tp", "ep")
LATER_AXES = ("pp", "cp", "ep")
DP_SHARDS = ("none",)

_LONG_NAMES = {"pp": "pipeline parallelism", "cp": "context parallelism", "ep": "expert parallelism"}


@config_dataclass
class ParallelConfig:
    """How many ranks stand along each axis of the mesh."""

    pp: Annotated[int, Field(ge=1, description="pipeline stages")] = 1
    dp: Annotated[
        int, Field(ge=0, description="replicas of the model; 0 = all that the other axes leave")
    ] = 0
    cp: Annotated[int, Field(ge=1, description="ranks that share a sequence")] = 1
    tp: Annotated[int, Field(ge=1, description="ranks that share a layer's matrices")] = 1
    ep: Annotated[int, Field(ge=1, description="ranks that share a layer's experts")] = 1
    sequence_parallel: Annotated[
        bool, Field(description="shard norms and residuals along the sequence over tp; no effect at tp = 1")
    ] = True
    dp_shard: Annotated[
        str, Field(description='what dp ranks share out instead of each holding it whole: "none"')
    ] = "none"


def check_mesh(config: ParallelConfig, world: int) -> list[str]:
    """Every rule that this mesh of `world` ranks breaks, a line each with the way out; empty if it stands."""
    problems = [
        f"parallel.{axis} = {getattr(config, axis)}: {_LONG_NAMES[axis]} comes later; use {axis} = 1"
        for axis in LATER_AXES
        if getattr(config, axis) > 1
    ]
    if config.dp_shard not in DP_SHARDS:
        choices = ", ".join(DP_SHARDS)
        hint = nearest(config.dp_shard, DP_SHARDS)
        problems.append(f"parallel.dp_shard = {config.dp_shard!r} is not one of: {choices}{hint}")
    return problems + _size_problems(config, world)


def _size_problems(config: ParallelConfig, world: int) -> list[str]:
    # Axes refused above count as the 1 that they must become, so that following all hints at once works.
    dp, tp = config.dp, config.tp
    if world < 1:
        return [f"world = {world}: at least one process is needed"]
    if dp == 0:
        if world % tp:
            return [
                f"parallel.tp = {tp} does not divide {world} processes; nearest: {_near_divisors(world, tp)}"
            ]
    elif dp * tp != world:
        way_out = f"start {dp * tp} processes"
        if world % tp == 0:
            way_out = f"use dp = {world // tp} (or 0 for all that are left), or {way_out}"
        else:
            way_out = f"use dp = 0 with tp = {_near_divisors(world, tp)}, or {way_out}"
        return [f"parallel.dp {dp} x tp {tp} = {dp * tp}, but there are {world} processes; {way_out}"]
    return []


def _near_divisors(number: int, near: int) -> str:
    divisors = [d for d in range(1, number + 1) if number % d == 0]
    below = [d for d in divisors if d < near][-1:]
    above = [d for d in divisors if d > near][:1]
    return " or ".join(str(d) for d in below + above)


def axis_sizes(config: ParallelConfig, world: int) -> dict[str, int]:
    """Size of each axis for a mesh that `check_mesh` accepts, dp = 0 resolved."""
    sizes = {axis: getattr(config, axis) for axis in AXES}
    sizes["dp"] = config.dp or world // (config.pp * config.cp * config.tp)
    return sizes


def coordinates(sizes: Mapping[str, int], rank: int) -> dict[str, int]:
    """Where `rank` stands along each axis, in Megatron's order (tp fastest, then cp, dp, pp)."""
    coords = {"ep": 0}  # expert groups come with expert parallelism
    for axis in RANK_ORDER:
        coords[axis] = rank % sizes[axis]
        rank //= sizes[axis]
    return coords


def peers(sizes: Mapping[str, int], axes: tuple[str, ...]) -> list[list[int]]:
    """All groups of ranks that differ only along `axes`, each ascending; every rank is in exactly one."""
    world = 1
    for axis in RANK_ORDER:
        world *= sizes[axis]
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in range(world):
        coords = coordinates(sizes, rank)
        groups.setdefault(tuple(coords[a] for a in RANK_ORDER if a not in axes), []).append(rank)
    return list(groups.values())
