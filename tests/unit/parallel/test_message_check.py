"""Messages between pipeline ranks never wait for each other; ways to derive them that look right and hang are found."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from megafp8.parallel.actions import Schedule
from megafp8.parallel.message_check import (
    End,
    Post,
    Program,
    batched,
    check_messages,
    check_programs,
    overlapped,
)
from megafp8.parallel.messages import Message, Step, gives, needs, plan
from megafp8.parallel.schedule_times import ScheduleError
from megafp8.parallel.schedules import SCHEDULES, make_schedule


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_runs_to_its_end(name: str) -> None:
    for ranks in (2, 3, 4, 7):
        for micro_batches in (1, 2, 3, 6, 9, 16):
            schedule = make_schedule(name, ranks, 2, micro_batches)
            check_messages(schedule)
            check_messages(schedule.forward_only())


def test_each_message_is_received_once_and_before_it_is_needed() -> None:
    for name in SCHEDULES:
        schedule = make_schedule(name, 3, 2, 7)
        for rank in range(3):
            for steps in (plan(schedule, rank, ahead=True), plan(schedule, rank, ahead=False)):
                posted: list[Message] = []
                for step in steps:
                    posted += [message for message, _ in step.post]
                    own = step.needs is not None and schedule.placement[_source(step.needs)] == rank
                    assert step.needs is None or own or step.needs in posted
                assert len(posted) == len(set(posted))
                wanted = [needs(step.action, schedule.num_stages) for step in steps]
                foreign = {m for m in wanted if m is not None and schedule.placement[_source(m)] != rank}
                assert set(posted) == foreign


def _source(message: Message) -> int:
    return message.stage + (-1 if message.kind == "F" else 1)


def late_receives(schedule: Schedule) -> list[Program]:
    """Batches in which a receive stands as late as it can: in the last one before its message is wanted."""
    programs = []
    for rank in range(schedule.num_ranks):
        steps: list[Step] = []
        waiting: list[tuple[Message, int]] = []
        for step in plan(schedule, rank, ahead=True):
            waiting += step.post
            wanted = next((i for i, (message, _) in enumerate(waiting) if message == step.needs), None)
            post: list[tuple[Message, int]] = []
            if wanted is not None:
                post = [item for item in waiting[: wanted + 1] if item[1] == waiting[wanted][1]]
                waiting = [item for item in waiting if item not in post]
            steps.append(Step(step.action, tuple(post), step.needs, step.gives))
        programs.append(batched(steps, rank, schedule.placement))
    return programs


def test_batches_with_late_receives_hang_in_a_v_and_when_interleaved() -> None:
    # Found by this check: NCCL runs the batches of a communicator one after another, so with these two ranks each
    # waited in its batch for what the other one had put into the next.
    for name, micro_batches in (("zb_v", 3), ("dualpipe_v", 3), ("interleaved", 5)):
        schedule = make_schedule(name, 2, 2, micro_batches)
        with pytest.raises(ScheduleError, match="wait for each other: rank 0 waits for .*; rank 1 waits for"):
            check_programs(late_receives(schedule))
        check_messages(schedule)


def one_by_one(schedule: Schedule) -> list[Program]:
    """The naive runner: receive, compute, send, each waited for."""
    programs: list[Program] = []
    place = schedule.placement
    for rank, actions in enumerate(schedule.actions):
        program: list[Post | Message] = []
        for action in actions:
            need, given = needs(action, schedule.num_stages), gives(action, schedule.num_stages)
            if need is not None and place[_source(need)] != rank:
                program += [Post(None, (End(True, need, place[_source(need)]),)), need]
            if given is not None and place[given.stage] != rank:
                program.append(Post(None, (End(False, given, place[given.stage]),)))
        programs.append(program)
    return programs


def test_naive_messages_of_1f1b_hang() -> None:
    # The classic one, the reason of Megatron's send_forward_recv_backward: both neighbours send first.
    check_programs(one_by_one(make_schedule("gpipe", 4, 1, 4)))
    with pytest.raises(ScheduleError, match="wait for each other"):
        check_programs(one_by_one(make_schedule("1f1b", 2, 1, 4)))


def overlapped_programs(schedule: Schedule) -> list[list[Post | Message]]:
    ranks, placement = range(schedule.num_ranks), schedule.placement
    return [overlapped(plan(schedule, rank, ahead=True), rank, placement) for rank in ranks]


def receives(program: Sequence[Post | Message]) -> list[int]:
    return [i for i, item in enumerate(program) if isinstance(item, Post) and item.ends[0].receives]


def test_messages_in_another_order_or_missing_are_found() -> None:
    programs = overlapped_programs(make_schedule("1f1b", 2, 1, 4))
    check_programs(programs)
    first, second, *_, last = receives(programs[1])
    swapped = list(programs[1])
    swapped[first], swapped[second] = swapped[second], swapped[first]
    with pytest.raises(ScheduleError, match="message 0 from rank 0 to rank 1: F1.0 is sent, F1.1 is received"):
        check_programs([programs[0], swapped])
    with pytest.raises(ScheduleError, match="message 3 from rank 0 to rank 1: F1.3 is sent, nothing is received"):
        check_programs([programs[0], programs[1][:last] + programs[1][last + 1 :]])


def test_a_rank_that_waits_for_what_is_never_posted_is_found() -> None:
    programs = overlapped_programs(make_schedule("1f1b", 2, 1, 2))
    with pytest.raises(ScheduleError, match="rank 0 waits for F1.9"):
        check_programs([[*programs[0], Message("F", 1, 9)], programs[1]])
