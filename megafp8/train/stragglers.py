"""Which rank is slower than those that do the same work, by the time it computes, not the time it waits for others."""

from __future__ import annotations

import logging
import socket
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from megafp8.core.log import event, get_logger
from megafp8.core.waiting import WAITING
from megafp8.parallel.collectives import all_gather, merge_dicts
from megafp8.parallel.mesh import Mesh
from megafp8.parallel.mesh_config import RANK_ORDER

logger = get_logger(__name__)
_IN_A_ROW = 3  # comparisons that must find the same rank: one or two may have met a neighbour's burst
_LEAST_SPAN_SECONDS = 2.0  # and over so long: three comparisons of steps of 20 ms are over within one burst
_LEAST_SECONDS = 0.005  # what a step must lose by it: below, the operating system's own turns look like a slow rank


@dataclass(frozen=True)
class Straggler:
    """A slow rank: its own seconds of work a step, and the median of the ranks that do the same."""

    rank: int
    host: str
    busy_seconds: float
    others_seconds: float

    @property
    def ratio(self) -> float:
        """How many times as long it takes."""
        return self.busy_seconds / self.others_seconds


def slow_ranks(busy: Sequence[float], stages: Sequence[int], ratio: float) -> dict[int, float]:
    """Ranks that take more than `ratio` times the median of the others of their pipeline stage, and that median."""
    found = {}
    for rank, seconds in enumerate(busy):
        others = [busy[other] for other in range(len(busy)) if other != rank and stages[other] == stages[rank]]
        if others and seconds > max(ratio * (typical := statistics.median(others)), typical + _LEAST_SECONDS):
            found[rank] = typical
    return found


class StragglerWatch:
    """Times the steps of this rank, and compares all ranks every `interval` steps.

    On a CPU every step is timed and costs nothing. On a GPU only the step of the comparison is: work must be waited
    for around each communication, which takes their overlap away in that step.
    """

    def __init__(self, mesh: Mesh, device: torch.device, *, interval: int, ratio: float) -> None:
        self._mesh, self._device, self._interval, self._ratio = mesh, device, interval, ratio
        self._fence = partial(torch.cuda.synchronize, device) if device.type == "cuda" else None
        self._times: list[float] = []
        self._seen: dict[int, int] = {}  # rank -> comparisons in a row that found it slow
        self._since: dict[int, float] = {}  # rank -> seconds over which they did
        self._named: set[int] = set()
        self._compared = time.monotonic()
        self._began = self._waited = 0.0
        self.on = interval > 0 and mesh.world > mesh.size("pp")  # someone does the same work

    def begin(self, step: int) -> None:
        """Before a step."""
        if self.on:
            WAITING.fence = self._fence if step % self._interval == 0 else None
            self._began, self._waited = time.perf_counter(), WAITING.seconds

    def end(self, step: int) -> tuple[list[Straggler], list[int]]:
        """After a step: ranks that are newly found to be slow, and those that no longer are. Collective."""
        if not self.on:
            return [], []
        if self._fence is None or WAITING.fence is not None:
            if self._fence is not None:
                self._fence()
            self._times.append(time.perf_counter() - self._began - (WAITING.seconds - self._waited))
        WAITING.fence = None
        if step % self._interval or not self._times:
            return [], []
        now = time.monotonic()
        row = [statistics.median(self._times), float(self._mesh.coord("pp")), now - self._compared]
        mine = torch.tensor([row], dtype=torch.float64)
        self._compared = now
        self._times.clear()
        rows = all_gather(mine.to(self._device), self._mesh.group_of(RANK_ORDER)).tolist()
        # the span of one rank for all: they must come to the same end
        return self._compare([row[0] for row in rows], [int(row[1]) for row in rows], rows[0][2])

    def _compare(self, busy: list[float], stages: list[int], span: float) -> tuple[list[Straggler], list[int]]:
        slow = slow_ranks(busy, stages, self._ratio)
        gone = sorted(self._named - slow.keys())
        self._seen = {rank: self._seen.get(rank, 0) + 1 for rank in slow}
        self._since = {rank: self._since.get(rank, 0.0) + span for rank in slow}
        told = {r for r in slow if self._seen[r] >= _IN_A_ROW and self._since[r] >= _LEAST_SPAN_SECONDS}
        new = sorted(told - self._named)
        self._named = told | (self._named & slow.keys())
        if not new:  # all ranks see the same numbers
            return [], gone
        host = {str(self._mesh.rank): socket.gethostname()} if self._mesh.rank in new else {}
        hosts = merge_dicts(host, self._mesh.group_of(RANK_ORDER))
        return [Straggler(rank, hosts[str(rank)], busy[rank], slow[rank]) for rank in new], gone


def report(found: Sequence[Straggler], gone: Sequence[int], step: int) -> None:
    """Log what a comparison found."""
    for one in found:
        event(
            logger, "straggler", level=logging.WARNING, step=step, slow_rank=one.rank, host=one.host,
            ratio=one.ratio, busy_seconds=one.busy_seconds, others_seconds=one.others_seconds,
        )  # fmt: skip
    for rank in gone:
        event(logger, "straggler is as fast as the others again", step=step, slow_rank=rank)
