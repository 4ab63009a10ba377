"""The mesh as arithmetic: sizes, coordinates, and what is refused and why.

No torch here, so that `megafp8 check` judges a mesh before any process starts; process groups are in `mesh`.

A rank has a place in two bases of the same world: the dense layers' (tp, cp, dp, pp) and the experts'
(etp, ep, edp, pp), with etp x ep x edp = tp x cp x dp. Pseudo axes name parts of an axis: kvtp x kvrep = tp, where
ranks of one kvtp coordinate share key/value heads, and "embedding", the two pipeline stages that hold a tied weight.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field

from megafp8.core.config import config_dataclass, nearest

# Megatron's rank order, fastest first: neighbours in tp talk most, so they share a node.
DEFAULT_ORDER = "tp-cp-ep-dp-pp"
RANK_ORDER = ("tp", "cp", "dp", "pp")
EXPERT_AXES = ("etp", "ep", "edp", "pp")
AXES = ("pp", "dp", "cp", "tp", "ep", "etp", "edp")
PSEUDO_AXES = ("kvtp", "kvrep", "embedding")
V_SCHEDULES = ("zb_v", "dualpipe_v")  # two stages a rank, the last one on the first rank

_EXPERT_NAMES = {"tp": "etp", "dp": "edp"}


@config_dataclass
class ParallelConfig:
    """How many ranks stand along each axis of the mesh, and how they share the work."""

    pp: Annotated[int, Field(ge=1, description="pipeline stages")] = 1
    dp: Annotated[int, Field(ge=0, description="replicas of the model; 0 = all that the other axes leave")] = 0
    cp: Annotated[int, Field(ge=1, description="ranks that share a sequence")] = 1
    tp: Annotated[int, Field(ge=1, description="ranks that share a layer's matrices")] = 1
    ep: Annotated[int, Field(ge=1, description="ranks that share a layer's experts; ranks of dp x cp x tp")] = 1
    etp: Annotated[int, Field(ge=0, description="ranks that share an expert's matrices; 0 = tp")] = 0
    order: Annotated[
        str, Field(description="the axes from the fastest on, as Megatron writes them; ep may stand anywhere")
    ] = DEFAULT_ORDER
    sequence_parallel: Annotated[
        bool, Field(description="shard norms and residuals along the sequence over tp; no effect at tp = 1")
    ] = True
    dp_shard: Annotated[
        Literal["none", "optimizer", "full"],
        Field(description="what dp x cp ranks share out: nothing, optimizer state (ZeRO-1), all (ZeRO-3)"),
    ] = "none"
    cp_exchange: Annotated[
        Literal["ring", "all_gather", "all_to_all"], Field(description="how attention sees the whole sequence")
    ] = "ring"
    schedule: Annotated[
        Literal["1f1b", "gpipe", "interleaved", "zb_h1", "zb_v", "dualpipe_v"],
        Field(description="order of forward and backward passes in the pipeline"),
    ] = "1f1b"
    virtual_stages: Annotated[
        int, Field(ge=1, description="stages a pipeline rank; for interleaved (zb_v and dualpipe_v have 2)")
    ] = 1
    layers_per_stage: Annotated[
        tuple[int, ...], Field(description="layers of each stage in model order; empty = even")
    ] = ()
    count_embedding_as_layer: Annotated[
        bool, Field(description="an even split counts the embedding as a layer of the first stage")
    ] = False
    count_loss_as_layer: Annotated[
        bool, Field(description="an even split counts output layer and loss as a layer of the last stage")
    ] = False
    overlap_p2p: Annotated[
        bool, Field(description="pipeline messages travel while stages compute; false = in batches between them")
    ] = True


def check_mesh(config: ParallelConfig, world: int) -> list[str]:
    """Every rule that this mesh of `world` ranks breaks, a line each with the way out; empty if it stands."""
    if world < 1:
        return [f"world = {world}: at least one process is needed"]
    problems = _order_problems(config.order) + _size_problems(config, world)
    if not problems:
        problems = _expert_problems(config, world)
    return problems


def _order_problems(order: str) -> list[str]:
    wanted = DEFAULT_ORDER.split("-")
    if sorted(order.split("-")) == sorted(wanted):
        return []
    hint = nearest(order, [DEFAULT_ORDER, "tp-cp-ep-pp-dp"])
    return [f"parallel.order = {order!r} must name each of {', '.join(wanted)} once, joined by -{hint}"]


def _size_problems(config: ParallelConfig, world: int) -> list[str]:
    sizes = {axis: getattr(config, axis) for axis in ("pp", "cp", "tp")}
    model = math.prod(sizes.values())
    if config.dp == 0:
        if world % model == 0:
            return []
        return [f"parallel {_product(sizes)} does not divide {world} processes; {_fitting(sizes, world)}"]
    if config.dp * model == world:
        return []
    start = f"start {config.dp * model} processes"
    if world % model == 0:
        way_out = f"use dp = {world // model} (or 0 for all that are left), or {start}"
    else:
        way_out = f"use dp = 0 with {_fitting(sizes, world)}, or {start}"
    whole = _product({"dp": config.dp, **sizes})
    return [f"parallel {whole}, but there are {world} processes; {way_out}"]


def _product(sizes: Mapping[str, int]) -> str:
    large = {axis: size for axis, size in sizes.items() if size > 1} or {"dp": 1}
    total = math.prod(large.values())
    shown = " x ".join(f"{axis} {size}" for axis, size in large.items())
    return shown if len(large) == 1 else f"{shown} = {total}"


def _fitting(sizes: Mapping[str, int], world: int) -> str:
    """The nearest values of the one axis whose change alone makes the product divide `world`, or smaller ones."""
    for axis in ("tp", "cp", "pp"):
        others = math.prod(size for other, size in sizes.items() if other != axis)
        if sizes[axis] > 1 and world % others == 0:
            return f"nearest: {axis} = {_near_divisors(world // others, sizes[axis])}"
    left, choice = world, []
    for axis in ("tp", "cp", "pp"):
        size = max(d for d in range(1, min(sizes[axis], left) + 1) if left % d == 0)
        choice.append(f"{axis} = {size}")
        left //= size
    return f"nearest: {', '.join(choice)}"


def _expert_problems(config: ParallelConfig, world: int) -> list[str]:
    etp = config.etp or config.tp
    inner = world // config.pp
    if inner % (config.ep * etp):
        if inner % etp:
            return [
                f"parallel.etp = {etp} does not divide the {inner} ranks of dp x cp x tp; "
                f"nearest: etp = {_near_divisors(inner, etp)}"
            ]
        return [
            f"parallel.ep {config.ep} x etp {etp} does not divide the {inner} ranks of dp x cp x tp; "
            f"nearest: ep = {_near_divisors(inner // etp, config.ep)}"
        ]
    sizes = axis_sizes(config, world)
    dense, expert = (_stride(sizes, axes, "pp") for axes in _bases(config.order))
    if config.pp > 1 and not _experts_like_dense(sizes) and dense != expert:
        return [
            f"parallel.order = {config.order!r}: with ep {config.ep} the experts' ranks would lie across pipeline "
            f"stages; put pp last, as in {DEFAULT_ORDER!r}"
        ]
    return []


def _near_divisors(number: int, near: int) -> str:
    divisors = [d for d in range(1, number + 1) if number % d == 0]
    below = [d for d in divisors if d < near][-1:]
    above = [d for d in divisors if d > near][:1]
    return " or ".join(str(d) for d in below + above)


def axis_sizes(
    config: ParallelConfig, world: int, *, kv_heads: int | None = None, tied_embeddings: bool = False
) -> dict[str, int]:
    """Size of each axis, pseudo axes too, for a mesh that `check_mesh` accepts; dp = 0 and etp = 0 resolved.

    Args:
        kv_heads: key/value heads of the model; None: as many as tp needs.
        tied_embeddings: the output layer uses the embedding's weight.
    """
    sizes = {axis: getattr(config, axis) for axis in ("pp", "dp", "cp", "tp", "ep", "etp")}
    sizes["dp"] = config.dp or world // (config.pp * config.cp * config.tp)
    sizes["etp"] = config.etp or config.tp
    sizes["edp"] = world // (config.pp * sizes["ep"] * sizes["etp"])
    sizes["kvtp"] = min(config.tp, kv_heads or config.tp)
    sizes["kvrep"] = config.tp // sizes["kvtp"]
    apart = tied_embeddings and config.pp > 1 and config.schedule not in V_SCHEDULES
    sizes["embedding"] = 2 if apart else 1
    return sizes


def _bases(order: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The dense and the experts' axes from the fastest on."""
    names = order.split("-")
    dense = tuple(name for name in names if name != "ep")
    return dense, tuple(_EXPERT_NAMES.get(name, name) for name in names if name != "cp")


def _experts_like_dense(sizes: Mapping[str, int]) -> bool:
    """Whether experts are split as the dense layers are; then their axes are those of the dense basis, in any order."""
    return sizes["ep"] == 1 and sizes["etp"] == sizes["tp"]


def _stride(sizes: Mapping[str, int], axes: tuple[str, ...], axis: str) -> int:
    return math.prod(sizes[other] for other in axes[: axes.index(axis)])


def coordinates(sizes: Mapping[str, int], rank: int, order: str = DEFAULT_ORDER) -> dict[str, int]:
    """Where `rank` stands along each axis of both bases and along the pseudo axes."""
    dense, expert = _bases(order)
    coords = {axis: rank // _stride(sizes, expert, axis) % sizes[axis] for axis in expert}
    coords |= {axis: rank // _stride(sizes, dense, axis) % sizes[axis] for axis in dense}
    if _experts_like_dense(sizes):
        coords |= {"etp": coords["tp"], "ep": 0, "edp": coords["dp"] * sizes["cp"] + coords["cp"]}
    coords["kvtp"], coords["kvrep"] = divmod(coords["tp"], sizes["kvrep"])
    coords["embedding"] = int(sizes["embedding"] > 1 and coords["pp"] == sizes["pp"] - 1)
    return coords


def peers(sizes: Mapping[str, int], axes: tuple[str, ...], order: str = DEFAULT_ORDER) -> list[list[int]]:
    """All groups of ranks that differ only along `axes`, each ascending; every rank is in exactly one.

    `axes` are of one basis, pseudo axes counting as dense. Ranks without a place in it (the stages between, for
    "embedding") are left out.
    """
    if _experts_like_dense(sizes):
        dense = {"etp": ("tp",), "ep": (), "edp": ("dp", "cp")}
        axes = tuple(part for axis in axes for part in dense.get(axis, (axis,)))
    fixed = _fixed_axes(axes, order)
    world = math.prod(sizes[axis] for axis in RANK_ORDER)
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in range(world):
        coords = coordinates(sizes, rank, order)
        if "embedding" in axes and coords["pp"] not in (0, sizes["pp"] - 1):
            continue
        groups.setdefault(tuple(coords[axis] for axis in fixed), []).append(rank)
    return list(groups.values())


def _fixed_axes(axes: tuple[str, ...], order: str) -> tuple[str, ...]:
    """The axes along which all ranks of a group of `axes` stand at the same place."""
    dense, expert = _bases(order)
    if any(axis in ("etp", "ep", "edp") for axis in axes):
        basis = expert
    elif "kvtp" in axes or "kvrep" in axes:
        basis = tuple(part for axis in dense for part in (("kvrep", "kvtp") if axis == "tp" else (axis,)))
    else:
        basis = dense
    unknown = [axis for axis in axes if axis not in (*basis, "embedding")]
    assert not unknown, f"{unknown} of {axes} are not axes of one basis: {basis}"
    taken = {*axes, "pp"} if "embedding" in axes else set(axes)
    return tuple(axis for axis in basis if axis not in taken)
