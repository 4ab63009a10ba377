"""The messages between pipeline ranks, put into each rank's list of actions so that none waits for ever. No torch.

All messages and actions stand in one order in time, and a rank's list is what concerns it of that order. So the two
ends of a message stand in their lists such that, even where every send waits for its receive and nothing overlaps, the
first one of the whole order that is not done yet can always be done. A receive stands where its message is sent, not
where it is needed: posted there without waiting, the message travels while the rank computes.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Literal, NamedTuple

from megafp8.parallel.actions import Action, Schedule
from megafp8.parallel.schedule_times import simulate


class Transfer(NamedTuple):
    """One end of a message: what `made_by` made goes from its rank to that of the stage that needs it.

    An F sends its hidden state to the next stage, a B or I the gradient of its input to the stage before.
    """

    way: Literal["send", "recv"]
    made_by: Action
    peer: int

    def __str__(self) -> str:
        return f"{self.way}({self.made_by}, {'to' if self.way == 'send' else 'from'} {self.peer})"


Step = Action | Transfer
Steps = tuple[tuple[Step, ...], ...]


@lru_cache(maxsize=2)  # each rank asks for its part
def with_transfers(schedule: Schedule) -> Steps:
    """Each rank's actions with its sends and receives between them; stages of one rank exchange no message.

    Transfers that stand together travel in one batch. Both ends of a pair of ranks see their messages in the same
    order, so no tags are needed. `message_check` proves it.
    """
    last = schedule.num_stages - 1
    events: list[tuple[float, int, int, Action]] = []  # in time; messages that arrive before actions that start
    for rank, timed in enumerate(simulate(schedule)):
        for action, start, end in timed:
            events.append((start, 1, rank, action))
            goes_on = action.stage < last if action.kind == "F" else action.kind != "W" and action.stage > 0
            if goes_on and schedule.placement[_receiver(action)] != rank:
                events.append((end, 0, rank, action))
    steps: list[list[Step]] = [[] for _ in schedule.actions]
    for _, is_action, rank, action in sorted(events):
        if is_action:
            steps[rank].append(action)
            continue
        peer = schedule.placement[_receiver(action)]
        steps[rank].append(Transfer("send", action, peer))
        steps[peer].append(Transfer("recv", action, rank))
    return tuple(map(tuple, steps))


def _receiver(action: Action) -> int:
    return action.stage + 1 if action.kind == "F" else action.stage - 1
