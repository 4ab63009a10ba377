"""Who is where: each rank's node, place along every axis, peers and layers, as a person can read it. No torch."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from megafp8.parallel.mesh_config import ParallelConfig, axis_sizes, coordinates, peers
from megafp8.parallel.stages import placement_of, spans_of

DENSE_AXES = ("pp", "dp", "cp", "tp")
EXPERT_AXES = ("edp", "ep", "etp")


@dataclass(frozen=True)
class Axis:
    """One axis: its groups of ranks, and how many nodes the widest of them spans."""

    name: str
    size: int
    groups: tuple[tuple[int, ...], ...]
    nodes: int


@dataclass(frozen=True)
class RankPlace:
    """One rank: where it stands, and what it has."""

    rank: int
    node: int
    gpu: int
    coords: Mapping[str, int]
    stages: tuple[int, ...]
    layers: str
    peers: Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class MeshPlan:
    """The whole mesh: `axes` are those larger than 1, `places` one for each rank."""

    world: int
    gpus_per_node: int
    sizes: Mapping[str, int]
    order: str
    axes: tuple[Axis, ...]
    places: tuple[RankPlace, ...]

    @property
    def num_nodes(self) -> int:
        """Nodes, the last one perhaps not full."""
        return -(-self.world // self.gpus_per_node)


def plan_mesh(
    config: ParallelConfig,
    world: int,
    *,
    gpus_per_node: int,
    num_layers: int,
    kv_heads: int | None = None,
    tied_embeddings: bool = False,
) -> MeshPlan:
    """Place `world` ranks on nodes, for a mesh and a split into stages that have been checked."""
    sizes = axis_sizes(config, world, kv_heads=kv_heads, tied_embeddings=tied_embeddings)
    names = [name for name in DENSE_AXES if sizes[name] > 1]
    if sizes["ep"] > 1 or sizes["etp"] != sizes["tp"]:
        names += [name for name in EXPERT_AXES if sizes[name] > 1]
    names += [name for name in ("kvrep", "embedding") if sizes[name] > 1]
    axes = []
    for name in names:
        groups = tuple(map(tuple, peers(sizes, (name,), config.order)))
        nodes = max(len({rank // gpus_per_node for rank in group}) for group in groups)
        axes.append(Axis(name, sizes[name], groups, nodes))
    group_of = {axis.name: {rank: group for group in axis.groups for rank in group} for axis in axes}
    placement = placement_of(config.schedule, config.pp, config.virtual_stages)
    layers = _layers_of_stages(config, num_layers)
    places = []
    for rank in range(world):
        coords = coordinates(sizes, rank, config.order)
        stages = tuple(stage for stage, owner in enumerate(placement) if owner == coords["pp"])
        places.append(
            RankPlace(
                rank=rank,
                node=rank // gpus_per_node,
                gpu=rank % gpus_per_node,
                coords=coords,
                stages=stages,
                layers=" | ".join(layers[stage] for stage in stages),
                peers={name: of[rank] for name, of in group_of.items() if rank in of},
            )
        )
    return MeshPlan(world, gpus_per_node, sizes, config.order, tuple(axes), tuple(places))


def _layers_of_stages(config: ParallelConfig, num_layers: int) -> list[str]:
    spans = spans_of(config, num_layers)
    words = []
    for stage, span in enumerate(spans):
        parts = ["embedding"] if stage == 0 else []
        parts += [span_shown(span)] if span[1] > span[0] else []
        parts += ["loss"] if stage == len(spans) - 1 else []
        words.append(", ".join(parts))
    return words


def span_shown(span: tuple[int, int]) -> str:
    """The layers of a half-open span: `4-7`, `4`, `none`."""
    start, end = span
    return "none" if end == start else str(start) if end == start + 1 else f"{start}-{end - 1}"


def ranks_shown(ranks: Sequence[int]) -> str:
    """A group in few letters: `0-7`, `0,8`, `0,8,...,56` with equal steps, else every rank."""
    steps = {after - before for before, after in pairwise(ranks)}
    if steps == {1} and len(ranks) > 2:
        return f"{ranks[0]}-{ranks[-1]}"
    if len(steps) == 1 and len(ranks) > 4:
        return f"{ranks[0]},{ranks[1]},...,{ranks[-1]}"
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    if len(runs) == len(ranks) or not all(len(run) > 2 for run in runs):
        return ",".join(map(str, ranks))
    return ",".join(f"{run[0]}-{run[-1]}" for run in runs)


def mesh_csv(plan: MeshPlan) -> str:
    """The full table, a rank a line; peers are separated by spaces."""
    axes = [axis.name for axis in plan.axes]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    coords = (*DENSE_AXES, *EXPERT_AXES)
    writer.writerow(["rank", "node", "gpu", *coords, "stages", "layers", *(f"{name}_peers" for name in axes)])
    for place in plan.places:
        groups = [" ".join(map(str, place.peers.get(name, ()))) for name in axes]
        where = [place.coords[name] for name in coords]
        stages = " ".join(map(str, place.stages))
        writer.writerow([place.rank, place.node, place.gpu, *where, stages, place.layers, *groups])
    return text.getvalue()
