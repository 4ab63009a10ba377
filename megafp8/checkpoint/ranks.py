"""What saving and loading ask of a mesh, and how its ranks agree."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist


class Ranks(Protocol):
    """Those of torch.distributed; at world 1 that need not be initialised."""

    @property
    def rank(self) -> int: ...

    @property
    def world(self) -> int: ...

    def size(self, axis: str) -> int: ...

    def coord(self, axis: str) -> int: ...

    def place(self, axes: tuple[str, ...]) -> tuple[int, int]: ...


class Alone:
    """The mesh of a rank that saves and loads for itself."""

    rank, world = 0, 1

    def size(self, axis: str) -> int:
        """One of everything."""
        return 1

    def coord(self, axis: str) -> int:
        """The first."""
        return 0

    def place(self, axes: tuple[str, ...]) -> tuple[int, int]:
        """The first of one."""
        return 0, 1


def agree(values: list[float], mesh: Ranks) -> list[float]:
    """The largest of each value over all ranks; collective."""
    if mesh.world == 1:
        return values
    found = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return found.tolist()
