"""When each action of a schedule starts and ends, given what a pass costs. No torch, no process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from megafp8.parallel.actions import Action, Schedule, needs


class ScheduleError(AssertionError):
    """A schedule that is incomplete, out of order or cannot be run to its end: a bug, not a user's mistake."""


@dataclass(frozen=True)
class Costs:
    """Time of each pass of a stage, in any unit; a B costs an I and a W.

    `stage_scale` multiplies all three for each stage (empty: 1 each), `latency` is what a message between ranks takes.
    """

    forward: float = 1.0
    input_grad: float = 1.0
    weight_grad: float = 1.0
    latency: float = 0.0
    stage_scale: tuple[float, ...] = ()

    def of(self, action: Action) -> float:
        """Time that `action` takes."""
        backward = self.input_grad + self.weight_grad
        time = {"F": self.forward, "B": backward, "I": self.input_grad, "W": self.weight_grad}[action.kind]
        return time * (self.stage_scale[action.stage] if self.stage_scale else 1.0)


class Timed(NamedTuple):
    """An action with its start and end."""

    action: Action
    start: float
    end: float


def simulate(schedule: Schedule, costs: Costs | None = None) -> tuple[tuple[Timed, ...], ...]:
    """Start and end of every action of each rank: it starts when the rank is free and what it needs has arrived.

    Raises:
        ScheduleError: some actions wait for each other, or for one that is in no list.
    """
    costs = costs or Costs()
    lists: list[list[Timed]] = [[] for _ in schedule.actions]
    done: dict[Action, float] = {}
    waiting: dict[Action, int] = {}  # what is awaited -> the rank that stands still for it
    ready = list(range(schedule.num_ranks))
    while ready:
        rank = ready.pop()
        timed = lists[rank]
        for action in schedule.actions[rank][len(timed) :]:
            need = needs(action, schedule.num_stages)
            if need is not None and need not in done:
                waiting[need] = rank
                break
            arrival = 0.0
            if need is not None:
                arrival = done[need] + (costs.latency if schedule.placement[need.stage] != rank else 0.0)
            start = max(timed[-1].end if timed else 0.0, arrival)
            timed.append(Timed(action, start, start + costs.of(action)))
            if action.kind != "W":
                made = action._replace(kind="F" if action.kind == "F" else "B")
                done[made] = timed[-1].end
                if made in waiting:
                    ready.append(waiting.pop(made))
    stuck = [
        f"rank {rank} waits at {actions[len(timed)]} for {needs(actions[len(timed)], schedule.num_stages)}"
        for rank, (actions, timed) in enumerate(zip(schedule.actions, lists))
        if len(timed) < len(actions)
    ]
    if stuck:
        raise ScheduleError(f"{schedule.name} stands still: " + "; ".join(stuck))
    return tuple(map(tuple, lists))
