"""Runs a schedule over the stages of this rank: forward and backward passes, and what travels between ranks.

It knows no model: a stage is whatever turns hidden states into hidden states, the last one into a loss. One process
runs the list F, B, F, B through the same code.

With `overlap` receives are posted one action ahead, in the sender's order, and nothing waits for a send but the end of
a run or the backward pass that proves its arrival: ranks cannot wait for each other in a circle, whatever the schedule.
Each direction between two ranks then has a group of its own, since NCCL would queue an early receive ahead of the send
that its sender waits for. Without it, sends and receives between two actions form one batch, in the order that
`transfers` proves to end.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megafp8.core.waiting import WAITING
from megafp8.parallel.actions import Action, Schedule
from megafp8.parallel.collectives import all_reduce_
from megafp8.parallel.mesh import Mesh
from megafp8.parallel.mesh_config import peers
from megafp8.parallel.messages import Message, Step, edges, plan

Tensor = torch.Tensor


class Wire(NamedTuple):
    """What every message of a run is: hidden states or their gradient."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class Stages(Protocol):
    """What the runner is given to run."""

    def forward(self, stage: int, micro_batch: int, hidden: Tensor | None) -> Tensor:
        """Run `stage` on what the stage before gave (None: the first); the last returns what backward begins with."""
        ...

    def split(self, backward: Callable[[], None]) -> Callable[[], None]:
        """Run `backward` without the weights' gradients and return what computes those (an action W)."""
        ...

    def after_backward(self, stage: int, micro_batch: int) -> None:
        """Told after an action B or I, when no other rank waits for this one."""
        ...


class Pipeline:
    """This rank's end of a pipeline; collective over its ranks, all of which make it and run it alike.

    Args:
        schedule: gives the schedule of so many micro-batches; its placement does not depend on them.
        mesh: ranks of axis "pp" are the pipeline's.
        overlap: receives are posted ahead and sends go off at once; False: both travel in one batch between actions.

    Attributes:
        events: of the last run, in order: ("post" | "send" | "wait", message) and ("begin" | "end", action).
    """

    def __init__(self, schedule: Callable[[int], Schedule], mesh: Mesh, *, overlap: bool = True) -> None:
        self.mesh, self.rank, self.overlap = mesh, mesh.coord("pp"), overlap
        self.events: list[tuple[str, Message | Action]] = []
        self.placement = schedule(1).placement
        self.links = _Links(mesh, self.placement, directed=overlap)
        self._schedule, self._plan = schedule, lru_cache(self._make_plan)
        self._agreed: set[tuple[object, ...]] = set()

    @property
    def stages(self) -> list[int]:
        """The stages of this rank, in model order."""
        return [stage for stage, rank in enumerate(self.placement) if rank == self.rank]

    @property
    def num_stages(self) -> int:
        """Stages of the whole pipeline."""
        return len(self.placement)

    def run(self, stages: Stages, micro_batches: int, wire: Wire, *, forward_only: bool = False) -> None:
        """Take `micro_batches` through all stages, and back unless `forward_only`. Collective over the pipeline.

        Raises:
            RuntimeError: the ranks have other shapes, dtypes or numbers of micro-batches; a rank is gone.
        """
        self._agree(wire, micro_batches, forward_only)
        self.events.clear()
        run = _Run(self, stages, wire, forward_only=forward_only)
        with torch.set_grad_enabled(not forward_only):
            for step in self._plan(micro_batches, forward_only):
                run.take(step)
            run.finish()

    def _make_plan(self, micro_batches: int, forward_only: bool) -> list[Step]:
        schedule = self._schedule(micro_batches)
        return plan(schedule.forward_only() if forward_only else schedule, self.rank, ahead=self.overlap)

    def _agree(self, wire: Wire, micro_batches: int, forward_only: bool) -> None:
        """All ranks of the pipeline expect the same messages: asked once for each kind of run, not in each message."""
        group, key = self.mesh.group("pp"), (wire.shape, wire.dtype, micro_batches, forward_only)
        if group is None or key in self._agreed:
            return
        if not self._agreed:
            self.links.open(wire.device)
        dtypes = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
        numbers = [len(wire.shape), *wire.shape, dtypes.index(wire.dtype), micro_batches, int(forward_only)]
        mine = torch.tensor(numbers + [-1] * (12 - len(numbers)))
        both = all_reduce_(torch.cat((mine, -mine)), group, "max")
        if not torch.equal(both, torch.cat((mine, -mine))):
            raise RuntimeError(
                f"pipeline rank {self.rank} expects {micro_batches} micro-batches of {tuple(wire.shape)} {wire.dtype}, "
                "other ranks expect others"
            )
        self._agreed.add(key)


class _Links:
    """Point-to-point messages between this rank of the pipeline and the others."""

    def __init__(self, mesh: Mesh, placement: tuple[int, ...], *, directed: bool) -> None:
        self._group, self._rank = mesh.group("pp"), mesh.coord("pp")
        self._directed: dict[tuple[int, int], dist.ProcessGroup] = {}
        if self._group is None or not directed:
            return
        for line in peers(mesh.sizes, ("pp",), mesh.order):
            for pair in edges(placement):
                members, name = [line[i] for i in pair], f"pp {pair[0]} to {pair[1]}"
                group = dist.new_group(members, timeout=mesh.timeout, group_desc=name)
                if mesh.rank in line and self._rank in pair:
                    self._directed[pair] = group

    def open(self, device: torch.device) -> None:
        """Make the connections, which NCCL does at a group's first message, where it waits for the other end.

        All ranks meet link by link in one order, so none waits in a circle, as they could within a schedule.
        """
        token = torch.zeros(1, device=device)
        if not self._directed:
            all_reduce_(token, self._group)
        for source, target in sorted(self._directed):
            work = self.send(token, target) if source == self._rank else self.receive(token, source)
            if work is not None:
                work.wait()

    def send(self, tensor: Tensor, target: int) -> dist.Work | None:
        group = self._directed[self._rank, target]
        return dist.isend(tensor, group=group, group_dst=int(target > self._rank))

    def receive(self, tensor: Tensor, source: int) -> dist.Work | None:
        group = self._directed[source, self._rank]
        return dist.irecv(tensor, group=group, group_src=int(source > self._rank))

    def exchange(self, sends: list[tuple[Tensor, int]], receives: list[tuple[Tensor, int]]) -> list[dist.Work]:
        """Both directions in one batch."""
        ops = [dist.P2POp(dist.isend, tensor, group=self._group, group_peer=peer) for tensor, peer in sends]
        ops += [dist.P2POp(dist.irecv, tensor, group=self._group, group_peer=peer) for tensor, peer in receives]
        works = dist.batch_isend_irecv(ops)
        return works if len(works) == len(ops) else works * len(ops)  # NCCL gives one for all


@dataclass(eq=False)
class _Parcel:
    """A tensor under way, kept alive until its transport ends; one that never left this rank has no work."""

    tensor: Tensor
    work: dist.Work | None = None

    def wait(self) -> Tensor:
        if self.work is not None:
            with WAITING:
                self.work.wait()
            self.work = None
        return self.tensor


@dataclass(frozen=True, eq=False)
class _Live:
    """A forward pass that waits for its backward: its input, and the node that backward begins at.

    The output itself is not kept: no backward pass reads it, and the message that carries it may free it.
    """

    hidden: Tensor | None
    output: GradientEdge


@dataclass(eq=False)
class _Run:
    """One run of the list."""

    pipeline: Pipeline
    stages: Stages
    wire: Wire
    forward_only: bool
    live: dict[tuple[int, int], _Live] = field(default_factory=dict)
    weights: dict[tuple[int, int], Callable[[], None]] = field(default_factory=dict)
    received: dict[Message, _Parcel] = field(default_factory=dict)
    sent: dict[Message, _Parcel] = field(default_factory=dict)
    unsent: list[tuple[Message, Tensor, int]] = field(default_factory=list)  # for the next batch

    def take(self, step: Step) -> None:
        """Run one action: post receives, wait for what it needs, send what it makes."""
        self._post(step)
        arrived = None
        if step.needs is not None:
            self._note("wait", step.needs)
            arrived = self.received.pop(step.needs).wait()
        kind, stage, micro_batch = step.action
        self._note("begin", step.action)
        made: Tensor | None = None
        if kind == "F":
            made = self._forward(stage, micro_batch, arrived)
        elif kind == "W":
            self.weights.pop((stage, micro_batch))()
        else:
            made = self._backward(stage, micro_batch, arrived, split=kind == "I")
        self._note("end", step.action)
        if step.gives is not None:
            assert made is not None, f"stage {stage} gave nothing to send"
            self._send(*step.gives, made.contiguous())
        if kind in "BI":
            self.stages.after_backward(stage, micro_batch)

    def finish(self) -> None:
        """Wait until all that was sent has gone."""
        if self.unsent:
            self._exchange([])
        for parcel in self.sent.values():
            parcel.wait()
        self.sent.clear()
        assert not (self.live or self.weights or self.received), "the schedule left actions out"

    def _forward(self, stage: int, micro_batch: int, hidden: Tensor | None) -> Tensor:
        if hidden is not None and not self.forward_only:
            hidden.requires_grad_()
        output = self.stages.forward(stage, micro_batch, hidden)
        if not self.forward_only:
            self.live[stage, micro_batch] = _Live(hidden, get_gradient_edge(output))
        return output.detach()

    def _backward(self, stage: int, micro_batch: int, gradient: Tensor | None, *, split: bool) -> Tensor | None:
        # its gradient has come back, so what this stage sent forward has long arrived: this frees it
        if (parcel := self.sent.pop(Message("F", stage + 1, micro_batch), None)) is not None:
            parcel.wait()
        live = self.live.pop((stage, micro_batch))

        def backward() -> None:
            torch.autograd.backward(live.output, gradient)

        if split:
            self.weights[stage, micro_batch] = self.stages.split(backward)
        else:
            backward()
        return None if live.hidden is None else live.hidden.grad

    def _post(self, step: Step) -> None:
        buffers = [
            (message, torch.empty(self.wire.shape, dtype=self.wire.dtype, device=self.wire.device), source)
            for message, source in step.post
        ]
        for message, _, _ in buffers:
            self._note("post", message)
        if not self.pipeline.overlap:
            self._exchange(buffers)
            return
        for message, buffer, source in buffers:
            self.received[message] = _Parcel(buffer, self.pipeline.links.receive(buffer, source))

    def _send(self, message: Message, target: int, tensor: Tensor) -> None:
        if target == self.pipeline.rank:
            self.received[message] = _Parcel(tensor)
            return
        assert tensor.shape == self.wire.shape and tensor.dtype == self.wire.dtype, (
            f"{message}: {tuple(tensor.shape)} {tensor.dtype} is not what was agreed, {self.wire}"
        )
        self._note("send", message)
        if not self.pipeline.overlap:
            self.unsent.append((message, tensor, target))
            return
        self.sent = {m: p for m, p in self.sent.items() if p.work is not None and not p.work.is_completed()}
        self.sent[message] = _Parcel(tensor, self.pipeline.links.send(tensor, target))

    def _exchange(self, buffers: list[tuple[Message, Tensor, int]]) -> None:
        sends, self.unsent = self.unsent, []
        if not sends and not buffers:
            return
        outgoing, incoming = ([(tensor, rank) for _, tensor, rank in part] for part in (sends, buffers))
        works = self.pipeline.links.exchange(outgoing, incoming)
        for (message, tensor, _), work in zip(sends, works, strict=False):
            self.sent[message] = _Parcel(tensor, work)
        for (message, tensor, _), work in zip(buffers, works[len(sends) :], strict=True):
            self.received[message] = _Parcel(tensor, work)

    def _note(self, what: str, about: Message | Action) -> None:
        self.pipeline.events.append((what, about))
