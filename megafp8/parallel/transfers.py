"""The messages between pipeline ranks, put into each rank's list of actions; and the proof that none waits for ever.

All messages and actions stand in one order in time, and a rank's list is what concerns it of that order. So the two
ends of a message stand in their lists such that, even where every send waits for its receive and nothing overlaps, the
first one of the whole order that is not done yet can always be done. A receive stands where its message is sent, not
where it is needed: posted there without waiting, the message travels while the rank computes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal, NamedTuple

from megafp8.parallel.actions import Action, Schedule, needs
from megafp8.parallel.schedule_times import Costs, ScheduleError, simulate


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


def with_transfers(schedule: Schedule) -> Steps:
    """Each rank's actions with its sends and receives between them; stages of one rank exchange no message.

    Post a transfer when it is reached; wait for a receive before the action that needs it. Transfers that stand
    together may be posted as one batch. Both ends of a pair of ranks see their messages in the same order, so no tags
    are needed.
    """
    last = schedule.num_stages - 1
    events: list[tuple[float, int, int, Action]] = []  # in time; messages that arrive before actions that start
    for rank, timed in enumerate(simulate(schedule, Costs())):
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


def check_transfers(steps: Steps, schedule: Schedule) -> None:
    """Prove that `steps` end, whether messages are waited for at both ends or posted and waited for when needed.

    Raises:
        ScheduleError: ends of messages in different orders, a message that is missing, or ranks that wait in a ring.
    """
    _check_order(steps)
    places, done = [0] * len(steps), [set[Action]() for _ in steps]  # what a rank has at hand: made or received
    moved = True
    while moved:
        moved = False
        for rank, mine in enumerate(steps):
            while places[rank] < len(mine) and _take(rank, mine[places[rank]], steps, places, done, schedule):
                moved = True
    stuck = [f"rank {r} at {mine[place]}" for r, (mine, place) in enumerate(zip(steps, places)) if place < len(mine)]
    if stuck:
        raise ScheduleError(f"{schedule.name}: deadlock if sends wait for receives: " + ", ".join(stuck))


def _take(
    rank: int, step: Step, steps: Steps, places: list[int], done: list[set[Action]], schedule: Schedule
) -> bool:
    """Do `step` if it can be done now: an action whose input is at hand, a message at which both ends stand."""
    if isinstance(step, Action):
        need = needs(step, schedule.num_stages)
        if need is not None and need not in done[rank]:
            return False
        done[rank].add(_made(step))
        places[rank] += 1
        return True
    place = places[step.peer]
    way: Literal["send", "recv"] = "recv" if step.way == "send" else "send"
    if place >= len(steps[step.peer]) or steps[step.peer][place] != Transfer(way, step.made_by, rank):
        return False
    sender, receiver = (rank, step.peer) if step.way == "send" else (step.peer, rank)
    if _made(step.made_by) not in done[sender]:
        return False
    done[receiver].add(_made(step.made_by))
    places[rank] += 1
    places[step.peer] += 1
    return True


def _made(action: Action) -> Action:
    return action._replace(kind="B") if action.kind == "I" else action


def _check_order(steps: Steps) -> None:
    """Without waiting, ends of messages are matched by their order alone: for each pair it must be the same."""
    for rank, mine in enumerate(steps):
        twice = [step for step, count in Counter(mine).items() if count > 1]
        if twice:
            raise ScheduleError(f"rank {rank} does {twice[0]} more than once")
        for peer, theirs in enumerate(steps):
            sent, received = _messages(mine, "send", peer), _messages(theirs, "recv", rank)
            if sent != received:
                same = min(len(sent), len(received))
                place = next((i for i in range(same) if sent[i] != received[i]), same)
                ends = [str(ends[place]) if place < len(ends) else "nothing" for ends in (sent, received)]
                raise ScheduleError(
                    f"message {place} from rank {rank} to rank {peer}: {ends[0]} is sent, {ends[1]} is received"
                )


def _messages(steps: Sequence[Step], way: str, peer: int) -> list[Action]:
    return [s.made_by for s in steps if isinstance(s, Transfer) and s.way == way and s.peer == peer]
