"""Mesh: this rank's place and the process groups along each axis. An axis of size 1 has no group."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import combinations

import torch.distributed as dist

from megafp8.core.errors import ConfigError
from megafp8.parallel.mesh_config import (
    AXES,
    DEFAULT_ORDER,
    EXPERT_AXES,
    PSEUDO_AXES,
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
        sizes: ranks along each axis of `mesh_config.AXES` and `PSEUDO_AXES`.
        rank, world: this process and how many there are.
        groups: process groups by axes (those larger than 1, sorted by name).
        sequence_parallel: whether norms and residuals are sharded along the sequence over tp.
        order: the axes from the fastest on.
        cp_exchange: how attention sees the whole sequence over cp: "ring", "all_gather" or "all_to_all".
        timeout: after which a group gives a silent rank up; None: torch's default.
    """

    sizes: Mapping[str, int]
    rank: int = 0
    world: int = 1
    groups: Mapping[tuple[str, ...], dist.ProcessGroup] = field(default_factory=dict)
    sequence_parallel: bool = False
    order: str = DEFAULT_ORDER
    cp_exchange: str = "ring"
    timeout: timedelta | None = None
    _coords: Mapping[str, int] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_coords", coordinates(self.sizes, self.rank, self.order))

    @staticmethod
    def single() -> Mesh:
        """The mesh of one process; needs no torch.distributed."""
        return Mesh(dict.fromkeys((*AXES, *PSEUDO_AXES), 1))

    def size(self, axis: str) -> int:
        """Ranks along `axis`."""
        return self.sizes[axis]

    def coord(self, axis: str) -> int:
        """This rank's place along `axis`, from 0."""
        return self._coords[axis]

    def place(self, axes: tuple[str, ...]) -> tuple[int, int]:
        """This rank's number in the group of `axes`, and how many ranks that has; (0, 1) if it is alone."""
        group = self.group_of(axes)
        return (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))

    def group(self, axis: str) -> dist.ProcessGroup | None:
        """The ranks along `axis` through this one, ascending; None if it is alone."""
        return self.group_of((axis,))

    def group_of(self, axes: tuple[str, ...]) -> dist.ProcessGroup | None:
        """The ranks that differ from this one only along `axes`, ascending; None if it is alone.

        `axes` are of one basis (see `mesh_config`): dense axes, "kvtp", "kvrep" and "embedding", or the experts'.
        """
        assert all(axis in self.sizes for axis in axes), f"{axes} are not all of {tuple(self.sizes)}"
        wanted = _key(axis for axis in axes if self.sizes[axis] > 1)
        return self.groups[wanted] if wanted else None

    def __str__(self) -> str:
        shown = [axis for axis in AXES[:5] if axis in self.sizes]
        if self.sizes["etp"] != self.sizes["tp"]:
            shown.append("etp")
        sizes = " ".join(f"{axis}={self.sizes[axis]}" for axis in shown)
        coords = " ".join(f"{axis}={self.coord(axis)}" for axis in shown if self.sizes[axis] > 1)
        return f"Mesh({sizes}; rank {self.rank} of {self.world}{' at ' + coords if coords else ''})"


def build_mesh(
    config: ParallelConfig,
    world: int,
    *,
    kv_heads: int | None = None,
    tied_embeddings: bool = False,
    timeout_seconds: int = 0,
) -> Mesh:
    """Make the mesh of `world` processes; collective: every rank calls it with the same arguments.

    `init_distributed` comes first where world > 1.

    Args:
        kv_heads: the model's key/value heads; where they are fewer than tp, ranks share them (axes kvtp, kvrep).
        tied_embeddings: the output layer uses the embedding's weight (axis "embedding" over the two stages).
        timeout_seconds: after which a group gives a silent rank up; 0: torch's default, for groups do not take over
            that of the world.

    Raises:
        ConfigError: the sizes do not fit; all problems, a line each.
    """
    problems = check_mesh(config, world)
    if problems:
        raise ConfigError("\n".join(problems))
    sizes = axis_sizes(config, world, kv_heads=kv_heads, tied_embeddings=tied_embeddings)
    if world == 1:
        return Mesh(sizes, order=config.order)
    assert dist.is_initialized() and dist.get_world_size() == world, "init_distributed comes first"
    sequence_parallel = config.sequence_parallel and sizes["tp"] > 1
    timeout = timedelta(seconds=timeout_seconds) if timeout_seconds else None
    groups = _new_groups(sizes, config.order, timeout)
    rank, exchange = dist.get_rank(), config.cp_exchange
    return Mesh(sizes, rank, world, groups, sequence_parallel, config.order, exchange, timeout=timeout)


def _key(axes: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(set(axes)))


def _subsets(axes: Iterable[str]) -> list[tuple[str, ...]]:
    axes = list(axes)
    return [subset for count in range(1, len(axes) + 1) for subset in combinations(axes, count)]


def _wanted_axes(sizes: Mapping[str, int]) -> list[tuple[str, ...]]:
    """Every set of axes that someone may ask a group of, each once."""
    data = [axis for axis in ("cp", "dp") if sizes[axis] > 1]
    wanted = _subsets(axis for axis in RANK_ORDER if sizes[axis] > 1)
    wanted += _subsets(axis for axis in EXPERT_AXES if sizes[axis] > 1)
    if sizes["kvrep"] > 1:
        wanted += [axes for axes in _subsets([*data, "kvrep"]) if "kvrep" in axes]
    if sizes["embedding"] > 1:
        wanted += [axes for axes in _subsets([*data, "embedding"]) if "embedding" in axes]
    if sizes["kvtp"] > 1:
        wanted.append(("kvtp",))
    return list(dict.fromkeys(_key(axes) for axes in wanted))


def _new_groups(
    sizes: Mapping[str, int], order: str, timeout: timedelta | None
) -> dict[tuple[str, ...], dist.ProcessGroup]:
    # Collective: every rank creates every group, its own or not, in one order; axes that give the same ranks share one.
    # Left to their members, groups are named by how many groups a rank is in, and ranks of which one is in more (the
    # pipeline's first stage has weights tied to the last) would wait for each other under different names.
    rank = dist.get_rank()
    made: dict[tuple[int, ...], dist.ProcessGroup] = {}
    groups = {}
    for axes in _wanted_axes(sizes):
        for ranks in map(tuple, peers(sizes, axes, order)):
            if ranks not in made:
                made[ranks] = dist.new_group(list(ranks), timeout=timeout, group_desc="x".join(axes))
            if rank in ranks:
                groups[axes] = made[ranks]
    return groups
