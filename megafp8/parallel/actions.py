"""The words of a pipeline schedule: actions, and a schedule as each rank's list of them. No torch.

Stages are counted in model order over the whole pipeline; a rank holds one or more of them. Orders come from
`schedules` and `zero_bubble`; `schedule_check` proves them and adds the messages between ranks; `pipeline` runs them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

Kind = Literal["F", "B", "I", "W"]


class Action(NamedTuple):
    """One piece of work of a rank, on one stage and one micro-batch.

    F is the forward pass. B is the whole backward pass; I and W are its halves: the gradient of the stage's input,
    which the stage before waits for, and the gradients of its weights, which nobody waits for.
    """

    kind: Kind
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.stage}.{self.micro_batch}"


@dataclass(frozen=True)
class Schedule:
    """What each pipeline rank does, in order.

    `actions[rank]` is that rank's list, `placement[stage]` the rank that holds a stage.
    """

    name: str
    actions: tuple[tuple[Action, ...], ...]
    placement: tuple[int, ...]
    micro_batches: int

    @property
    def num_ranks(self) -> int:
        """Pipeline ranks."""
        return len(self.actions)

    @property
    def num_stages(self) -> int:
        """Stages over all ranks."""
        return len(self.placement)

    @property
    def splits_backward(self) -> bool:
        """Whether some backward passes are done as I and W."""
        return any(action.kind == "I" for actions in self.actions for action in actions)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that `rank` holds, in model order."""
        return tuple(stage for stage, owner in enumerate(self.placement) if owner == rank)

    def forward_only(self) -> Schedule:
        """The same schedule without backward passes, for evaluation."""
        kept = tuple(tuple(a for a in actions if a.kind == "F") for actions in self.actions)
        return replace(self, actions=kept)


def needs(action: Action, num_stages: int) -> Action | None:
    """What another stage must have done before `action`: F for an F, "B" (or I) for a B or I; None if nothing.

    W needs its own I, which stands before it in the same rank's list.
    """
    if action.kind == "F" and action.stage > 0:
        return Action("F", action.stage - 1, action.micro_batch)
    if action.kind in ("B", "I") and action.stage < num_stages - 1:
        return Action("B", action.stage + 1, action.micro_batch)
    return None


def first(actions: list[Action], micro_batches: int) -> list[Action]:
    """The actions of the micro-batches below `micro_batches`, in the same order.

    An action depends on its own micro-batch only, so what is left of a valid schedule is a valid schedule.
    """
    return [action for action in actions if action.micro_batch < micro_batches]
