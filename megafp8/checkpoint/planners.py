"""The planners of torch.distributed.checkpoint, taught our label: a Shard is a local tensor and its box.

A Shard speaks the protocol through which DTensor itself talks to the planners (chunk list, write items), so they
deduplicate replicas, balance the ranks and plan every resharding for us. It is not a DTensor because that needs
process groups even on one process, and can only cut a tensor evenly.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from megafp8.checkpoint.manifest import MismatchError
from megafp8.checkpoint.ranks import Ranks, agree
from megafp8.core.layout import AxisSizes, Layout

# A piece costs a line of the manifest: small states are cut finely, and those of terabytes into some 100,000 pieces.
SMALLEST_PIECE, LARGEST_PIECE, MANY_PIECES = 2 << 20, 64 << 20, 100_000
_SHOWN = 40  # differences listed; those of tensors whose names differ in numbers only are one
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


class Shard:
    """This rank's box of a global tensor; it may be empty, and is then neither written nor read.

    It is saved in pieces of at most `piece_bytes`, cut along `dim`, along which ranks cut it too: ranks of another mesh
    then read what they need and little else (a piece is read whole, for its checksum), and replicas share them out.
    """

    piece_bytes = LARGEST_PIECE

    def __init__(self, local: torch.Tensor, shape: tuple[int, ...], offsets: tuple[int, ...], dim: int = 0) -> None:
        self.local, self.shape, self._dim = local.detach(), torch.Size(shape), dim
        self.chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(local.shape))
        self.is_void = local.numel() == 0 and self.shape.numel() > 0  # a part of no rows, not a tensor of no elements

    @staticmethod
    def of(local: torch.Tensor, layout: Layout, mesh: AxisSizes) -> Shard:
        """The box that `layout` gives this rank on `mesh`."""
        slices = layout.local_slices(mesh)
        assert tuple(local.shape) == tuple(s.stop - s.start for s in slices), f"{tuple(local.shape)} is not {slices}"
        return Shard(local, layout.shape, tuple(s.start for s in slices), min(layout.split, default=0))

    def size(self) -> torch.Size:
        """The global shape."""
        return self.shape

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        if self.is_void:
            return []
        properties = TensorProperties(dtype=self.local.dtype)
        return [
            WriteItem(
                MetadataIndex(fqn, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, self.shape),
            )
            for chunk in self._pieces()
        ]

    def _pieces(self) -> list[ChunkStorageMetadata]:
        """Equal pieces, a power of two of them, so that their borders are also those of fewer ranks."""
        if not self.local.dim() or self.local.nbytes <= self.piece_bytes:
            return [self.chunk]
        size, (begin, dim) = self.local.shape[self._dim], (self.chunk.offsets[self._dim], self._dim)
        count = 1
        while count < size and self.local.nbytes > count * self.piece_bytes:
            count *= 2
        step = -(-size // count)
        pieces = []
        for start in range(0, size, step):
            offsets, sizes = list(self.chunk.offsets), list(self.chunk.sizes)
            offsets[dim], sizes[dim] = begin + start, min(step, size - start)
            pieces.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
        return pieces

    def piece(self, item: WriteItem) -> torch.Tensor:
        """The part of the local tensor that is to be written."""
        assert item.tensor_data is not None
        box = item.tensor_data.chunk
        starts = [there - here for there, here in zip(box.offsets, self.chunk.offsets, strict=True)]
        return self.local[tuple(slice(s, s + n) for s, n in zip(starts, box.sizes, strict=True))]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [] if self.is_void else [self.chunk]


def shards(tensors: Mapping[str, torch.Tensor], layouts: Mapping[str, Layout], mesh: AxisSizes) -> dict[str, Shard]:
    """A Shard for every tensor; one without a layout is whole on every rank."""
    return {
        name: Shard.of(tensor, layouts.get(name) or Layout(tuple(tensor.shape)), mesh)
        for name, tensor in tensors.items()
    }


def shards_to_save(tensors: Mapping[str, torch.Tensor], layouts: Mapping[str, Layout], mesh: Ranks) -> dict[str, Shard]:
    """`shards`, which all ranks cut into pieces alike, as replicas must; collective."""
    found = shards(tensors, layouts, mesh)
    total = agree([float(sum(shard.local.nbytes for shard in found.values()))], mesh)[0] * mesh.world
    for shard in found.values():
        shard.piece_bytes = min(max(SMALLEST_PIECE, int(total / MANY_PIECES)), LARGEST_PIECE)
    return found


class SavePlanner(DefaultSavePlanner):
    """The default planner over Shards."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        """The part of a local tensor that is to be written."""
        shard: Shard = self.state_dict[write_item.index.fqn]
        return shard.piece(write_item)


def plan_save(state: Mapping[str, Shard], mesh: Ranks) -> tuple[list[WriteItem], Metadata, list[WriteItem]]:
    """Share the pieces of all ranks out, each to one; collective.

    Returns:
        this rank's pieces; on rank 0 also what all tensors are, and the pieces of all ranks.
    """
    planner = SavePlanner()
    planner.set_up_planner(dict(state), is_coordinator=mesh.rank == 0)
    local = planner.create_local_plan()
    plans: list[Any] = [local] * mesh.world
    if mesh.world > 1:
        dist.gather_object(local, plans if mesh.rank == 0 else None)
    metadata, pieces, mine = Metadata({}), [], [local]
    if mesh.rank == 0:
        plans, metadata = planner.create_global_plan(plans)
        pieces, mine = [item for plan in plans for item in plan.items], plans[:1]
    if mesh.world > 1:
        dist.scatter_object_list(mine, plans if mesh.rank == 0 else None)
    return planner.finish_plan(mine[0]).items, metadata, pieces


class LoadPlanner(DefaultLoadPlanner):
    """The default planner over Shards; differences to the checkpoint are collected and refused as one.

    With `strict`, the tensors that all ranks ask for must be exactly those of the checkpoint that `among` names (None:
    all), save those whose names start with `optional`; else what is on one side only is left alone. Shapes must always
    agree, and dtypes, save floating ones of names that start with `converted`.
    """

    def __init__(
        self,
        *,
        strict: bool,
        optional: str = "",
        converted: str | None = None,
        among: Callable[[str], bool] | None = None,
    ) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False, allow_partial_load=True)
        self.strict, self.optional, self.converted, self.among = strict, optional, converted, among

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Keep the Shards as they are; the default would copy them."""
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def create_local_plan(self) -> LoadPlan:
        """Plan this rank's reads; what differs is left to `create_global_plan`, which hears of all ranks'."""
        assert self.metadata is not None
        stored = self.metadata.state_dict_metadata
        problems = [
            problem
            for name, shard in self.state_dict.items()
            if isinstance(entry := stored.get(name), TensorStorageMetadata)
            for problem in self._differences(name, shard, entry)
        ]
        plan = LoadPlan([]) if problems else super().create_local_plan()
        plan.planner_data = (frozenset(self.state_dict), problems)
        return plan

    def create_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Compare what all ranks ask for with what there is; on the coordinator.

        Ranks may ask for different tensors (stages of a pipeline do): a name is missing if no rank has it.

        Raises:
            MismatchError: shapes or dtypes differ, or names do and `strict`; each difference once.
        """
        assert self.metadata is not None
        stored, asked = set(self.metadata.state_dict_metadata), set().union(*(p.planner_data[0] for p in plans))
        problems = sorted({problem for plan in plans for problem in plan.planner_data[1]})
        if self.strict:
            if self.among is not None:
                stored = set(filter(self.among, stored))
            if self.optional:
                stored, asked = ({n for n in names if not n.startswith(self.optional)} for names in (stored, asked))
            problems += [f"{name} is not in the checkpoint" for name in sorted(asked - stored)]
            problems += [f"{name} is in the checkpoint only" for name in sorted(stored - asked)]
        _refuse(problems)
        return plans

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        """The local tensor to be filled."""
        return self.state_dict[index.fqn].local

    def _differences(self, name: str, shard: Shard, entry: TensorStorageMetadata) -> Iterable[str]:
        here, there = shard.local.dtype, entry.properties.dtype
        if shard.shape != entry.size:
            yield f"{name} has shape {tuple(shard.shape)} here, {tuple(entry.size)} there"
        may_convert = self.converted is not None and name.startswith(self.converted)
        if here != there and not (may_convert and here.is_floating_point and there.is_floating_point):
            yield f"{name} is {here} here, {there} there".replace("torch.", "")


def _refuse(problems: list[str]) -> None:
    if problems:
        raise MismatchError(
            f"the checkpoint does not match this run: {'; '.join(grouped(problems))}; "
            "resume with the model and precision that it was saved with"
        )


def grouped(problems: Sequence[str]) -> list[str]:
    """`problems`, each a tensor's name and what it is about; the same one of many layers once, with their number."""
    groups: dict[str, list[str]] = {}
    for problem in problems:
        name, space, rest = problem.partition(" ")
        groups.setdefault(f"{_NUMBER.sub('*', name)}{space}{rest}", []).append(problem)
    lines = [found[0] if len(found) == 1 else f"{text} ({len(found)} of them)" for text, found in groups.items()]
    more = [f"and {len(lines) - _SHOWN} more kinds of difference"] if len(lines) > _SHOWN else []
    return [*lines[:_SHOWN], *more]
