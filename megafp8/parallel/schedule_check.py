"""The proof that a schedule is complete and ends, and what it costs: bubble, peak of activations, time. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megafp8.parallel.actions import Action, Schedule
from megafp8.parallel.message_check import check_messages
from megafp8.parallel.schedule_times import Costs, ScheduleError, Timed, simulate


@dataclass(frozen=True)
class Report:
    """What a schedule costs, in the unit of its `Costs`.

    `bubble` is the idle time of all ranks until the last one ends, over their busy time. `rank_bubble` counts only
    idle time between a rank's own first and last action (the worst rank's): what is left if a rank may start its next
    step before the others end theirs. `peak_live` holds, for each rank, the most micro-batches alive at once, summed
    over its stages.
    """

    bubble: float
    rank_bubble: float
    makespan: float
    peak_live: tuple[float, ...]
    times: tuple[tuple[Timed, ...], ...]


def verify(schedule: Schedule, costs: Costs | None = None, *, weight_share: float = 1.0) -> Report:
    """Prove that `schedule` is complete, in order and free of deadlock, and measure it.

    Args:
        schedule: what to prove.
        costs: of a pass; by default F, I and W take the same time.
        weight_share: the part of a micro-batch's activations that is kept from its I until its W.

    Raises:
        ScheduleError: an action is missing, done twice, on the wrong rank or too early, or ranks wait for each other.
    """
    check_complete(schedule)
    times = simulate(schedule, costs)
    check_messages(schedule)
    makespan = max(timed[-1].end for timed in times)
    busy = [sum(t.end - t.start for t in timed) for timed in times]
    spans = [timed[-1].end - timed[0].start for timed in times]
    return Report(
        bubble=(makespan * len(busy) - sum(busy)) / sum(busy),
        rank_bubble=max((span - work) / work for span, work in zip(spans, busy) if work),
        makespan=makespan,
        peak_live=tuple(peak_live(actions, weight_share=weight_share) for actions in schedule.actions),
        times=times,
    )


def check_complete(schedule: Schedule) -> None:
    """Each stage does each micro-batch's F once and then its B, or I and then W, once, on its own rank.

    Raises:
        ScheduleError: what is missing, too much, misplaced or out of order.
    """
    done: dict[tuple[int, int], str] = {}
    for rank, actions in enumerate(schedule.actions):
        for action in actions:
            place = (action.stage, action.micro_batch)
            if not 0 <= action.stage < schedule.num_stages or not 0 <= action.micro_batch < schedule.micro_batches:
                raise ScheduleError(f"{schedule.name}: rank {rank} does {action}, which is no part of the schedule")
            if schedule.placement[action.stage] != rank:
                owner = schedule.placement[action.stage]
                raise ScheduleError(f"{schedule.name}: rank {rank} does {action}, whose stage is on rank {owner}")
            done[place] = done.get(place, "") + action.kind
            if not any(whole.startswith(done[place]) for whole in ("FB", "FIW")):
                raise ScheduleError(f"{schedule.name}: {action} on rank {rank} comes in the order {done[place]}")
    for stage in range(schedule.num_stages):
        for micro_batch in range(schedule.micro_batches):
            kinds = done.get((stage, micro_batch), "nothing")
            if kinds not in ("FB", "FIW"):
                raise ScheduleError(f"{schedule.name}: stage {stage} does {kinds} of micro-batch {micro_batch}")


def peak_live(actions: Sequence[Action], *, weight_share: float = 1.0, sizes: Sequence[float] = ()) -> float:
    """The most that is alive at once in a rank's list: 1 for each micro-batch of a stage, or `sizes[stage]`."""
    change = {"F": 1.0, "B": -1.0, "I": weight_share - 1.0, "W": -weight_share}
    live = peak = 0.0
    for action in actions:
        live += change[action.kind] * (sizes[action.stage] if sizes else 1.0)
        peak = max(peak, live)
    return peak


def closed_form(name: str, ranks: int, virtual: int, micro_batches: int, costs: Costs | None = None) -> float:
    """The bubble of a schedule of even stages without latency, idle over busy time, from `ranks` micro-batches on.

    A V fills its pipeline with 2 ranks - 1 of them (ZB-V) or 2 ranks (DualPipe-V).

    Sources: (p-1)/m for GPipe and 1F1B and (p-1)/(m v) if interleaved, arXiv 2104.04473, section 2.2; ZB-H1
    (p-1)(F+I-W), arXiv 2401.10241, table 1; ZB-V (arXiv 2405.15362) has no bubble within a rank if F = I = W, but the
    last rank starts p-1 forward passes late, which this counts. DualPipe-V: (p-1)(F+B-2W) of passes one after another,
    B = I+W; run as inseparable pairs F&B it is (p-1)(F&B + B - 3W), as in the table of DeepSeek's DualPipe repository.
    """
    costs = costs or Costs()
    f, i, w = costs.forward, costs.input_grad, costs.weight_grad
    fill, work = ranks - 1, micro_batches * (f + i + w)
    return {
        "gpipe": fill / micro_batches,
        "1f1b": fill / micro_batches,
        "interleaved": fill / (micro_batches * virtual),
        "zb_h1": fill * (f + i - w) / work,
        "zb_v": fill * f / (2 * work),
        "dualpipe_v": fill * (f + i - w) / (2 * work),
    }[name]
