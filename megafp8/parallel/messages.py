"""What travels between pipeline ranks, derived from a schedule alone: every rank knows all lists, so none has to ask.

Between two ranks messages arrive in the order in which they were sent, so a receiver posts its buffers in the sender's
order, however different its own. No torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from megafp8.parallel.actions import Action, Schedule
from megafp8.parallel.transfers import with_transfers


class Message(NamedTuple):
    """What a stage waits for: "F", the hidden states of the stage before, or "B", the gradient of the one behind."""

    kind: str
    stage: int
    micro_batch: int


@dataclass(frozen=True)
class Step:
    """One action of a rank and what belongs to it.

    Attributes:
        action: what to run.
        post: receives to post before it, each with the rank that sends: its own, if they were not posted already, and
            those that the next steps want.
        needs: what it waits for, also where the sender is this rank; None: nothing.
        gives: the message that it makes, and the rank it goes to; None: nothing.
    """

    action: Action
    post: tuple[tuple[Message, int], ...]
    needs: Message | None
    gives: tuple[Message, int] | None


def needs(action: Action, num_stages: int) -> Message | None:
    """What an action waits for."""
    kind, stage, micro_batch = action
    if kind == "F":
        return Message("F", stage, micro_batch) if stage > 0 else None
    return Message("B", stage, micro_batch) if kind != "W" and stage < num_stages - 1 else None


def gives(action: Action, num_stages: int) -> Message | None:
    """What comes of an action for another stage."""
    kind, stage, micro_batch = action
    if kind == "F":
        return Message("F", stage + 1, micro_batch) if stage < num_stages - 1 else None
    return Message("B", stage - 1, micro_batch) if kind != "W" and stage > 0 else None


def plan(schedule: Schedule, rank: int, *, ahead: bool) -> list[Step]:
    """The steps of `rank`.

    Args:
        ahead: a receive is posted while the action before the one that wants it runs; this needs sends that wait for
            no receive of their own rank. False: all transfers in the one order of `with_transfers`, which ends even if
            each is waited for before the next.
    """
    stages = schedule.num_stages
    posts = _posts_ahead(schedule, rank) if ahead else _posts_in_turn(schedule, rank)
    steps = []
    for action, post in zip(schedule.actions[rank], posts, strict=True):
        given = gives(action, stages)
        target = None if given is None else (given, schedule.placement[given.stage])
        steps.append(Step(action, tuple(post), needs(action, stages), target))
    return steps


def _posts_ahead(schedule: Schedule, rank: int) -> list[list[tuple[Message, int]]]:
    mine, inbox = schedule.actions[rank], _Inbox(schedule.actions, schedule.placement, rank)
    wanted = [*(needs(action, schedule.num_stages) for action in mine), None]
    return [inbox.up_to(now) + inbox.up_to(then) for now, then in pairwise(wanted)]


def _posts_in_turn(schedule: Schedule, rank: int) -> list[list[tuple[Message, int]]]:
    posts: list[list[tuple[Message, int]]] = [[]]
    for step in with_transfers(schedule)[rank]:
        if isinstance(step, Action):
            posts.append([])
        elif step.way == "recv":
            message = gives(step.made_by, schedule.num_stages)
            assert message is not None
            posts[-1].append((message, step.peer))
    assert not posts[-1], "a receive after the last action"
    return posts[:-1]


class _Inbox:
    """Per sender the messages to `rank` in the order in which they are sent, and which of them are posted."""

    def __init__(self, lists: Sequence[Sequence[Action]], placement: Sequence[int], rank: int) -> None:
        self._waiting: dict[int, list[Message]] = {}
        self._source: dict[Message, int] = {}
        for sender, actions in enumerate(lists):
            if sender == rank:
                continue
            sent = [given for action in actions if (given := gives(action, len(placement))) is not None]
            self._waiting[sender] = [message for message in sent if placement[message.stage] == rank]
            self._source |= dict.fromkeys(self._waiting[sender], sender)

    def up_to(self, message: Message | None) -> list[tuple[Message, int]]:
        """Receives still to post so that `message` is among them, with their sender."""
        source = None if message is None else self._source.pop(message, None)
        if source is None:  # nothing to receive, from this rank itself, or posted
            return []
        waiting = self._waiting[source]
        count = waiting.index(message) + 1  # type: ignore[arg-type]
        taken, self._waiting[source] = waiting[:count], waiting[count:]
        for earlier in taken:
            self._source.pop(earlier, None)
        return [(earlier, source) for earlier in taken]


def edges(placement: Sequence[int]) -> list[tuple[int, int]]:
    """Every ordered pair (sender, receiver) of ranks that messages travel between, sorted."""
    pairs = {(a, b) for a, b in pairwise(placement) if a != b}
    return sorted(pairs | {(b, a) for a, b in pairs})
