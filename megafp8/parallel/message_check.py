"""The proof that ranks which run a schedule do not wait for each other's messages for ever. No torch, no process.

It plays the runner's steps of all ranks against the strictest rules that a backend may have: a transfer ends when both
ends are posted and not before (nothing is buffered), transfers of one stream of a rank go one batch after another, and
who waits for a message waits for its whole batch. So NCCL works; gloo is more lenient.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from megafp8.parallel.actions import Schedule
from megafp8.parallel.messages import Message, Step, plan
from megafp8.parallel.schedule_times import ScheduleError


class End(NamedTuple):
    """One end of a message, as a rank posts it: whether it receives, the message, and the other rank."""

    receives: bool
    message: Message
    peer: int


Stream = tuple[int, int] | None  # (sender, receiver) of a direction that has its own, None: that of the whole pipeline


class Post(NamedTuple):
    """A batch of ends, posted together into one of the rank's streams."""

    stream: Stream
    ends: tuple[End, ...]


# what a rank does in order: post a batch, or wait for a message (computing takes no part in who waits for whom)
Program = Sequence[Post | Message]


def check_messages(schedule: Schedule) -> None:
    """Prove that `schedule` runs to its end with overlapped and with batched messages.

    Raises:
        ScheduleError: ends in different orders, or ranks that wait for each other.
    """
    for ahead, program in ((True, overlapped), (False, batched)):
        steps = [plan(schedule, rank, ahead=ahead) for rank in range(schedule.num_ranks)]
        check_programs([program(mine, rank, schedule.placement) for rank, mine in enumerate(steps)])


def overlapped(steps: Sequence[Step], rank: int, placement: Sequence[int]) -> list[Post | Message]:
    """What the runner does if messages overlap: each end by itself, each direction of a pair in its own stream."""
    program: list[Post | Message] = []
    for step in steps:
        program += [Post((source, rank), (End(True, message, source),)) for message, source in step.post]
        program += _awaited(step, rank, placement)
        if step.gives is not None and step.gives[1] != rank:
            message, target = step.gives
            program.append(Post((rank, target), (End(False, message, target),)))
    return program


def batched(steps: Sequence[Step], rank: int, placement: Sequence[int]) -> list[Post | Message]:
    """What the runner does if messages do not overlap: a batch between two actions, all in one stream."""
    program: list[Post | Message] = []
    ends: list[End] = []
    for step in steps:
        ends += [End(True, message, source) for message, source in step.post]
        if ends:
            program.append(Post(None, tuple(ends)))
        program += _awaited(step, rank, placement)
        sends = step.gives is not None and step.gives[1] != rank
        ends = [End(False, *step.gives)] if sends and step.gives is not None else []
    return [*program, Post(None, tuple(ends))] if ends else program


def _awaited(step: Step, rank: int, placement: Sequence[int]) -> list[Message]:
    """The message of another rank that a step waits for, if any."""
    if step.needs is None:
        return []
    source = step.needs.stage + (-1 if step.needs.kind == "F" else 1)
    return [step.needs] if placement[source] != rank else []


def check_programs(programs: Sequence[Program]) -> None:
    """Play all programs to their end.

    Raises:
        ScheduleError: ends in different orders, or ranks that wait for each other.
    """
    _check_order(programs)
    play = _Play(programs)
    for rank in range(len(programs)):
        play.advance(rank)
    while play.awake:
        play.advance(play.awake.popleft())
    stuck = play.stuck()
    if stuck:
        raise ScheduleError("ranks wait for each other: " + "; ".join(stuck))


def _check_order(programs: Sequence[Program]) -> None:
    """Ends are matched by their order alone: for each direction of a pair of ranks it must be the same at both."""
    orders: dict[tuple[int, int], tuple[list[Message], list[Message]]] = {}
    for rank, program in enumerate(programs):
        for post in program:
            for end in post.ends if isinstance(post, Post) else ():
                pair = (end.peer, rank) if end.receives else (rank, end.peer)
                orders.setdefault(pair, ([], []))[end.receives].append(end.message)
    for (sender, receiver), (sent, received) in sorted(orders.items()):
        if sent == received:
            continue
        same = min(len(sent), len(received))
        place = next((i for i in range(same) if sent[i] != received[i]), same)
        what = [shown(ends[place]) if place < len(ends) else "nothing" for ends in (sent, received)]
        raise ScheduleError(
            f"message {place} from rank {sender} to rank {receiver}: {what[0]} is sent, {what[1]} is received"
        )


def shown(message: Message) -> str:
    """`F3.0`: what stage 3 gets for micro-batch 0."""
    return f"{message.kind}{message.stage}.{message.micro_batch}"


@dataclass
class _Batch:
    rank: int
    stream: Stream
    ends: tuple[End, ...]
    left: int


@dataclass
class _Play:
    """Who has come how far."""

    programs: Sequence[Program]
    awake: deque[int] = field(default_factory=deque)
    places: dict[int, int] = field(default_factory=dict)
    streams: dict[tuple[int, Stream], deque[_Batch]] = field(default_factory=dict)
    open: dict[tuple[Stream, int, int, Message], _Batch] = field(default_factory=dict)  # ends that wait for the other
    arrived: set[tuple[int, Message]] = field(default_factory=set)

    def advance(self, rank: int) -> None:
        """Let `rank` go on until it waits for a message that has not arrived."""
        program, place = self.programs[rank], self.places.get(rank, 0)
        while place < len(program):
            item = program[place]
            if isinstance(item, Message):
                if (rank, item) not in self.arrived:
                    break
            else:
                stream = self.streams.setdefault((rank, item.stream), deque())
                stream.append(_Batch(rank, item.stream, item.ends, len(item.ends)))
                if len(stream) == 1:
                    self._start(stream)
            place += 1
        self.places[rank] = place

    def _start(self, stream: deque[_Batch]) -> None:
        """The first batch of a stream meets ends that others have started; those that end let the next start."""
        starting = [stream]
        while starting:
            batch = starting.pop()[0]
            for end in batch.ends:
                sender, receiver = (end.peer, batch.rank) if end.receives else (batch.rank, end.peer)
                key = (batch.stream, sender, receiver, end.message)
                other = self.open.pop(key, None)
                if other is None:
                    self.open[key] = batch
                    continue
                for one in (other, batch):
                    one.left -= 1
                    if one.left == 0:
                        self._finish(one, starting)

    def _finish(self, batch: _Batch, starting: list[deque[_Batch]]) -> None:
        self.arrived |= {(batch.rank, end.message) for end in batch.ends if end.receives}
        self.awake.append(batch.rank)
        stream = self.streams[batch.rank, batch.stream]
        stream.popleft()
        if stream:
            starting.append(stream)

    def stuck(self) -> list[str]:
        """What each rank waits for that has not come to its end."""
        words = []
        for rank, program in enumerate(self.programs):
            place = self.places[rank]
            if place < len(program):
                item = program[place]
                assert isinstance(item, Message)
                words.append(f"rank {rank} waits for {shown(item)}")
            elif any(stream for (owner, _), stream in self.streams.items() if owner == rank):
                words.append(f"rank {rank} waits for its last messages")
        return words
