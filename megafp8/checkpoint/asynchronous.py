"""AsyncSaver: a save that training does not wait for.

`begin` copies the tensors into host memory and returns; a process beside each rank writes them. At the end of every
step `poll` lets all ranks agree, by one reduction of two numbers and only while a save is under way, whether all have
written; then rank 0's process commits, and the ranks learn of that at a later step in the same way. At most one save is
under way: the next `begin` waits for it. A failure of any rank is raised on all of them at the end of the step in which
it is seen; until the commit nothing says that anything was saved.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.planner import WriteItem

from megafp8.checkpoint.commit import begin_folder, discard, space_for
from megafp8.checkpoint.config import CheckpointConfig
from megafp8.checkpoint.folders import step_name
from megafp8.checkpoint.local import RETENTION, LocalSaveError, log_local, own, rank_folder, with_place
from megafp8.checkpoint.manifest import Kinds
from megafp8.checkpoint.piece_file import DTYPE_NAMES
from megafp8.checkpoint.planners import Shard, plan_save, shards, shards_to_save
from megafp8.checkpoint.ranks import Ranks, agree
from megafp8.checkpoint.staging import StagedBox, Staging, error_of
from megafp8.checkpoint.storage_writer import item_bytes, kinds_of, piece_key, prefix_of, split
from megafp8.checkpoint.write import log_saved
from megafp8.core.errors import MegaError
from megafp8.core.heartbeat import HEART
from megafp8.core.jsonio import resource_error
from megafp8.core.layout import Layout
from megafp8.core.log import event, get_logger

_log = get_logger(__name__)
_SHORTEST_NAP, _LONGEST_NAP = 0.005, 0.25


@dataclass(frozen=True)
class Saved:
    """A committed checkpoint.

    Attributes:
        path, step: its folder and step.
        bytes: of all ranks, known to rank 0; of a local one, this rank's.
        seconds: that the slowest rank wrote and rank 0 committed.
        delay: seconds from `begin` until all ranks knew; they look once a step.
    """

    path: Path
    step: int
    bytes: int
    seconds: float
    delay: float
    local: bool = False


@dataclass
class _Plan:
    """Who writes what; holds as long as names, shapes and dtypes do."""

    signature: object
    items: list[WriteItem]
    kinds: Kinds  # on rank 0, as the two below
    bytes: int
    pieces: int


@dataclass
class _Flight:
    """The save that is under way."""

    step: int
    meta: dict[str, Any]
    folder: Path  # a temporary one; of a local checkpoint: this rank's
    began: float
    local: bool = False
    bytes: int = 0
    seconds: float = 0.0
    committing: bool = False
    failure: MegaError | None = None  # of this rank, before its process had the job


class AsyncSaver:
    """Saves under `root` as `config` says; every rank makes one, and all methods but `close` are collective."""

    def __init__(self, root: Path | str, mesh: Ranks, config: CheckpointConfig, staging: Staging) -> None:
        self.root, self.mesh, self.config, self.staging = Path(root), mesh, config, staging
        self._plan: _Plan | None = None
        self._flight: _Flight | None = None

    @property
    def busy(self) -> bool:
        """Whether a save is under way; the same on all ranks."""
        return self._flight is not None

    def begin(
        self, step: int, tensors: Mapping[str, torch.Tensor], layouts: Mapping[str, Layout], meta: dict[str, Any]
    ) -> float:
        """Take a snapshot and have it written; returns the seconds that took. Arguments as of `checkpoint.save`.

        The tensors may change as soon as this returns. `wait` first: one save at a time.

        Raises:
            ResourceError: no space, no permission, not a folder; on every rank, and nothing was written.
        """
        assert self._flight is None, "a save is under way; wait for it"
        start = time.monotonic()
        state = shards_to_save(tensors, layouts, self.mesh)
        plan = self._planned(state)
        folder = self._folder(step, plan, meta)
        self._flight = _Flight(step, meta, folder, start, bytes=plan.bytes)
        job = {"do": "write", "folder": str(folder), "part": _part(self.mesh.rank, self.mesh.world)}
        self._send(job, plan.items, state)
        seconds = time.monotonic() - start
        event(_log, "checkpoint is being written", step=step, megabytes=plan.bytes / 1e6, stall_seconds=seconds)
        return seconds

    def begin_local(
        self,
        root: Path,
        step: int,
        tensors: Mapping[str, torch.Tensor],
        layouts: Mapping[str, Layout],
        meta: dict[str, Any],
    ) -> float:
        """The same for a local checkpoint of this rank under `root`; `poll` and `wait` tell of it too."""
        assert self._flight is None, "a save is under way; wait for it"
        start = time.monotonic()
        state, folder = own(tensors), rank_folder(root, self.mesh)
        items = [item for name, shard in state.items() for item in shard.__create_write_items__(name, None)]
        size = sum(map(item_bytes, items))
        self._flight = _Flight(step, meta, folder, start, local=True, bytes=size)
        job = {
            "do": "alone", "root": str(folder), "step": step, "bytes": size, "retention": asdict(RETENTION),
            "meta": with_place(meta, shards(tensors, layouts, self.mesh), self.mesh),
            "kinds": {name: (DTYPE_NAMES[shard.local.dtype], tuple(shard.shape)) for name, shard in state.items()},
        }  # fmt: skip
        self._send(job, items, state)
        return time.monotonic() - start

    def poll(self) -> Saved | None:
        """The checkpoint if it has been committed meanwhile; does not wait. Call it at the end of every step.

        Raises:
            MegaError: of the first rank that failed, on all ranks; nothing of this save remains. LocalSaveError if it
                was a local one.
        """
        flight = self._flight
        if flight is None:
            return None
        failure, done, answer = flight.failure, True, None
        if failure is None and (not flight.committing or self.mesh.rank == 0):
            try:
                answer = self.staging.outcome()
                done = answer is not None
            except MegaError as error:
                failure = error
        seconds = 0.0 if answer is None else answer["seconds"]
        failed, unfinished, slowest = agree([float(failure is not None), float(not done), seconds], self.mesh)
        if failed:
            raise self._failed(flight, failure)
        if unfinished:
            return None
        flight.seconds += slowest
        if not flight.committing and not flight.local:
            flight.committing = True
            if self.mesh.rank == 0:
                self._commit(flight)
            return None
        self._flight = None
        return self._saved(flight, answer)

    def wait(self) -> Saved | None:
        """Wait for the save that is under way, if there is one.

        Raises:
            MegaError: as `poll`.
        """
        nap = _SHORTEST_NAP
        while self._flight is not None:
            HEART.beat()  # a process that hangs is found by `Staging`
            saved = self.poll()
            if saved is not None:
                return saved
            time.sleep(nap)
            nap = min(2 * nap, _LONGEST_NAP)
        return None

    def abandon(self) -> None:
        """Forget the save that is under way; the next one removes what it has written. Not collective."""
        self.staging.stop()
        self._flight = None

    def _planned(self, state: Mapping[str, Shard]) -> _Plan:
        """This rank's share, from the last save if nothing about it has changed on any rank."""
        signature = {name: (shard.local.dtype, shard.shape, shard.chunk) for name, shard in state.items()}
        changed = self._plan is None or self._plan.signature != signature
        if agree([float(changed)], self.mesh)[0]:
            items, metadata, pieces = plan_save(state, self.mesh)
            self._plan = _Plan(signature, items, kinds_of(metadata), sum(map(item_bytes, pieces)), len(pieces))
        assert self._plan is not None
        return self._plan

    def _folder(self, step: int, plan: _Plan, meta: dict[str, Any]) -> Path:
        """The temporary folder, made by rank 0, or its reason why not on every rank."""
        made: list[Any] = [None]
        if self.mesh.rank == 0:
            try:
                made = [begin_folder(self.root, step, space_for(plan.bytes, plan.pieces, len(str(meta))))]
            except MegaError as error:
                made = [error]
            except OSError as error:
                made = [resource_error(error, self.root)]
        if self.mesh.world > 1:
            dist.broadcast_object_list(made, src=0)
        if isinstance(made[0], MegaError):
            raise made[0]
        return Path(made[0])

    def _send(self, job: dict[str, Any], items: list[WriteItem], state: Mapping[str, Shard]) -> None:
        """Copy the tensors and have the job done; if there is no memory for that, the next `poll` says so."""
        assert self._flight is not None
        prefix, threads = prefix_of(self.mesh.rank, self.mesh.world), self.config.write_threads
        files = {
            f"{prefix}_{number:02d}.safetensors": [_staged_box(item, state) for item in batch]
            for number, batch in enumerate(split(items, threads))
        }
        try:
            self.staging.send({**job, "files": self.staging.stage(files), "threads": threads})
        except OSError as error:
            self._flight.failure = resource_error(error, Path("memory for checkpoint.asynchronous"))

    def _commit(self, flight: _Flight) -> None:
        assert self._plan is not None
        self.staging.send({
            "do": "commit", "folder": str(flight.folder), "step": flight.step, "meta": flight.meta,
            "parts": [_part(rank, self.mesh.world) for rank in range(self.mesh.world)],
            "kinds": self._plan.kinds, "retention": asdict(self.config),
        })  # fmt: skip

    def _saved(self, flight: _Flight, answer: dict[str, Any] | None) -> Saved:
        delay = time.monotonic() - flight.began
        path = (flight.folder if flight.local else self.root) / step_name(flight.step)
        saved = Saved(path, flight.step, flight.bytes, flight.seconds, delay, flight.local)
        if flight.local:
            log_local(flight.step, flight.folder, flight.bytes, flight.seconds)
            return saved
        log_saved(flight.step, path, flight.bytes, flight.seconds, delay)
        for gone in (answer or {}).get("pruned", ()):
            event(_log, "checkpoint pruned", path=gone)
        return saved

    def _failed(self, flight: _Flight, failure: MegaError | None) -> MegaError:
        """End the save on all ranks; returns the error of the first rank that has one."""
        self.staging.stop()  # nobody writes into the folder any more when all ranks have come past the exchange
        said = None if failure is None else (str(failure), failure.exit_code)
        told: list[tuple[str, int] | None] = [said] * self.mesh.world
        if self.mesh.world > 1:
            dist.all_gather_object(told, said)
        self._flight = None
        if self.mesh.rank == 0 and not flight.local:
            discard(flight.folder)
        rank, (message, code) = next((rank, found) for rank, found in enumerate(told) if found is not None)
        if flight.local:
            return LocalSaveError(f"step {flight.step}: no local checkpoint: rank {rank}: {message}")
        return error_of(f"step {flight.step} was not saved: rank {rank}: {message}", code)


def _part(rank: int, world: int) -> str:
    return f"{prefix_of(rank, world)}.json"


def _staged_box(item: WriteItem, state: Mapping[str, Shard]) -> StagedBox:
    piece = state[item.index.fqn].piece(item)
    assert item.tensor_data is not None
    return StagedBox(
        item.index.fqn, piece_key(item), DTYPE_NAMES[piece.dtype], tuple(item.tensor_data.chunk.offsets), piece
    )
