"""Mesh: this rank's place and the process groups along each axis. An axis of size 1 has no group."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import combinations

import torch.distributed as dist

from megafp8.core.errors import ConfigError
from megafp8.parallel.mesh_config import (
    AXES,
    RANK_ORDER,
    ParallelConfig,
    axis_sizes,
    check_mesh,
    coordinates,
    peers,
)


@dataclass(frozen=True, eq=False)
class Mesh:
    """Where this rank stands, and whom it talks to.

    Attributes:
        sizes: ranks along each axis of "pp", "dp", "cp", "tp", "ep".
        rank, world: this process and how many there are.
        groups: process groups by axes, in Megatron's rank order; only axes larger than 1.
        sequence_parallel: whether norms and residuals are sharded along the sequence over tp.
    """

    sizes: Mapping[str, int]
    rank: int = 0
    world: int = 1
    groups: Mapping[tuple[str, ...], dist.ProcessGroup] = field(default_factory=dict)
    sequence_parallel: bool = False

    @staticmethod
    def single() -> Mesh:
        """The mesh of one process; needs no torch.distributed."""
        return Mesh(dict.fromkeys(AXES, 1))

    def size(self, axis: str) -> int:
        """Ranks along `axis`."""
        return self.sizes[axis]

    def coord(self, axis: str) -> int:
        """This rank's place along `axis`, from 0."""
        return coordinates(self.sizes, self.rank)[axis]

    def group(self, axis: str) -> dist.ProcessGroup | None:
        """The ranks along `axis` through this one, ascending; None if it is alone."""
        return self.group_of((axis,))

    def group_of(self, axes: tuple[str, ...]) -> dist.ProcessGroup | None:
        """The ranks that differ from this one only along `axes`, ascending; None if it is alone."""
        assert all(axis in AXES for axis in axes), f"{axes} are not all of {AXES}"
        wanted = tuple(axis for axis in RANK_ORDER if axis in axes and self.sizes[axis] > 1)
        return self.groups[wanted] if wanted else None

    def __str__(self) -> str:
        sizes = " ".join(f"{axis}={self.sizes[axis]}" for axis in AXES)
        coords = " ".join(f"{axis}={self.coord(axis)}" for axis in AXES if self.sizes[axis] > 1)
        return f"Mesh({sizes}; rank {self.rank} of {self.world}{' at ' + coords if coords else ''})"


def build_mesh(config: ParallelConfig, world: int) -> Mesh:
    """Make the mesh of `world` processes; collective: every rank calls it with the same arguments.

    `init_distributed` comes first where world > 1.

    Raises:
        ConfigError: the sizes do not fit or an axis is not in this version; all problems, a line each.
    """
    problems = check_mesh(config, world)
    if problems:
        raise ConfigError("\n".join(problems))
    sizes = axis_sizes(config, world)
    if world == 1:
        return Mesh(sizes)
    assert dist.is_initialized() and dist.get_world_size() == world, "init_distributed comes first"
    sequence_parallel = config.sequence_parallel and sizes["tp"] > 1
    return Mesh(sizes, dist.get_rank(), world, _new_groups(sizes), sequence_parallel)


def _new_groups(sizes: Mapping[str, int]) -> dict[tuple[str, ...], dist.ProcessGroup]:
    # new_group is collective: every rank creates every group, in one order, its own or not.
    large = [axis for axis in RANK_ORDER if sizes[axis] > 1]
    groups = {}
    for count in range(1, len(large) + 1):
        for axes in combinations(large, count):
            for ranks in peers(sizes, axes):
                group = dist.new_group(ranks, group_desc="x".join(axes))
                if dist.get_rank() in ranks:
                    groups[axes] = group
    return groups
