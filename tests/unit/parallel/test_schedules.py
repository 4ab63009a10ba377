"""Pipeline schedules: complete, free of deadlock, with the bubbles and the memory that the papers give."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megafp8.parallel.actions import Action, Schedule, needs
from megafp8.parallel.message_check import check_messages
from megafp8.parallel.schedule_check import Report, check_complete, closed_form, verify
from megafp8.parallel.schedule_times import Costs, ScheduleError, simulate
from megafp8.parallel.schedules import SCHEDULES, make_schedule

# what fills a pipeline of p ranks, so that the closed form holds
FILLS = {"zb_v": lambda p: 2 * p - 1, "dualpipe_v": lambda p: 2 * p}


def report(name: str, ranks: int, virtual: int, micro_batches: int, **words: object) -> Report:
    return verify(make_schedule(name, ranks, virtual, micro_batches), **words)  # type: ignore[arg-type]


def virtuals(name: str) -> tuple[int, ...]:
    return (2, 3) if name == "interleaved" else (1,)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("ranks", range(2, 9))
def test_every_schedule_is_proven_and_has_the_closed_bubble(name: str, ranks: int) -> None:
    fill = FILLS.get(name, lambda p: p)(ranks)
    for virtual in virtuals(name):
        for micro_batches in (1, 2, 3, 5, 7, 8, 11, 15, 16, 23):
            found = report(name, ranks, virtual, micro_batches)  # raises if it is not proven
            closed = closed_form(name, ranks, virtual, micro_batches)
            if micro_batches >= fill or name in ("gpipe", "1f1b"):
                # times are whole numbers below 2^53: nothing but the last division rounds
                assert found.bubble == pytest.approx(closed, rel=1e-12), (virtual, micro_batches)
            else:
                assert found.bubble >= closed - 1e-12, (virtual, micro_batches)


@pytest.mark.parametrize("costs", [Costs(1, 1, 1), Costs(2, 1, 1), Costs(1, 1, 0.5), Costs(3, 4, 3.5)])
def test_bubble_of_uneven_passes(costs: Costs) -> None:
    # The split ones where W is not longer than I or F, for which the papers' forms hold.
    for name in ("gpipe", "1f1b", "interleaved", "zb_h1", "dualpipe_v"):
        found = report(name, 4, 2, 16, costs=costs)
        closed = closed_form(name, 4, 2, 16, costs)
        if name in ("zb_h1", "dualpipe_v") and costs.input_grad > costs.forward:
            assert closed - 1e-12 < found.bubble < 1.25 * closed  # their orders are made for I <= F
        else:
            assert found.bubble == pytest.approx(closed, rel=1e-12), name


def test_zero_bubble_schedules_against_1f1b() -> None:
    for ranks, micro_batches in ((2, 8), (4, 16), (8, 32)):
        plain = report("1f1b", ranks, 1, micro_batches).bubble
        assert report("zb_h1", ranks, 1, micro_batches).bubble == pytest.approx(plain / 3)
        zb_v = report("zb_v", ranks, 1, micro_batches)
        assert zb_v.rank_bubble == 0.0
        assert zb_v.bubble == pytest.approx(plain / 6)


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("micro_batches", [1, 3, 8, 24])
def test_peak_of_live_activations(ranks: int, micro_batches: int) -> None:
    p, m = ranks, micro_batches
    peaks = {name: report(name, p, 2, m).peak_live for name in SCHEDULES}
    assert peaks["gpipe"] == (m,) * p
    assert peaks["1f1b"] == tuple(min(p - rank, m) for rank in range(p))
    # the first rank of ZB-H1 is as full as in 1F1B, the others not fuller; a V counts stages of half the size
    assert max(peaks["zb_h1"]) == min(p, m)
    assert max(peaks["zb_v"]) == min(2 * p, 2 * m)
    assert max(peaks["dualpipe_v"]) <= min(2 * p + 1, 2 * m)
    group = -(-m // max(1, m // p))
    # Megatron's p (1 + (p-1)/(p v)) stages of L/(p v) layers, v = 2; more where groups are larger than p
    assert max(peaks["interleaved"]) <= min(2 * (p - 1) + group + 1, 2 * m)
    if m % p == 0:
        assert max(peaks["interleaved"]) == min(2 * p + p - 1, 2 * m)


def test_weights_hold_their_part_of_the_activations() -> None:
    # a rank that holds W for p micro-batches keeps only their inputs if the share is less than 1
    whole, part = (max(report("zb_h1", 4, 1, 16, weight_share=share).peak_live) for share in (1.0, 0.25))
    assert whole == 4.0
    assert part <= 4.0
    assert max(report("1f1b", 4, 1, 16, weight_share=0.25).peak_live) == 4.0


def test_one_rank_does_forward_and_backward_in_turn() -> None:
    for name in SCHEDULES:
        schedule = make_schedule(name, 1, 1, 3)
        assert "".join(a.kind for a in schedule.actions[0]) == "FBFBFB"
        assert schedule.placement == (0,)


def test_placement_and_forward_only() -> None:
    assert make_schedule("interleaved", 2, 3, 4).placement == (0, 1, 0, 1, 0, 1)
    schedule = make_schedule("zb_v", 3, 1, 4)
    assert schedule.placement == (0, 1, 2, 2, 1, 0)
    assert schedule.stages_of(0) == (0, 5)
    assert schedule.splits_backward
    for name in SCHEDULES:
        forward = make_schedule(name, 4, 2, 6).forward_only()
        assert {a.kind for actions in forward.actions for a in actions} == {"F"}
        check_messages(forward)


def test_dualpipe_pairs_have_the_published_bubble() -> None:
    # (p-1)(F&B + B - 3W) idle on each rank if a pair is one piece that takes as long as both: (p-1)(3 + 2 - 3).
    for ranks in (2, 4, 8):
        schedule = make_schedule("dualpipe_v", ranks, 2, 4 * ranks)
        assert pair_idle(schedule) == [2 * (ranks - 1)] * ranks


def pair_idle(schedule: Schedule) -> list[float]:
    """Idle time of each rank if an F followed by a B of its other stage is one piece."""
    lists: list[list[tuple[Action, ...]]] = []
    for rank, actions in enumerate(schedule.actions):
        pieces: list[tuple[Action, ...]] = []
        for action in actions:
            before = pieces[-1] if pieces else ()
            paired = len(before) == 1 and before[0].kind == "F" and action.kind == "B"
            # the last rank's first pair cannot be one: its B needs an F that is one step old
            first_b = rank == schedule.num_ranks - 1 and not any(a.kind == "B" for p in pieces for a in p)
            if paired and before[0].stage != action.stage and not first_b:
                pieces[-1] = (before[0], action)
            else:
                pieces.append((action,))
        lists.append(pieces)
    done: dict[Action, float] = {}
    free, busy = [0.0] * len(lists), [0.0] * len(lists)
    while any(lists):
        for rank, pieces in enumerate(lists):
            wanted = [needs(action, schedule.num_stages) for action in (pieces[0] if pieces else ())]
            if not pieces or any(need is not None and need not in done for need in wanted):
                continue
            piece = pieces.pop(0)
            start = max([free[rank], *(done[need] for need in wanted if need is not None)])
            length = sum(Costs().of(action) for action in piece)
            free[rank], busy[rank] = start + length, busy[rank] + length
            for action in piece:
                if action.kind != "W":
                    done[action._replace(kind="F" if action.kind == "F" else "B")] = free[rank]
    return [max(free) - work for work in busy]


def test_latency_and_slow_stages_count() -> None:
    # p = 2, m = 1 by hand: F 1, message 0.5, F 1, B 2, message 0.5, B 2
    assert report("1f1b", 2, 1, 1, costs=Costs(latency=0.5)).makespan == 7.0
    times = simulate(make_schedule("1f1b", 2, 1, 1), Costs(stage_scale=(1.0, 3.0)))
    assert [(t.start, t.end) for t in times[1]] == [(1.0, 4.0), (4.0, 10.0)]
    # stages of one rank hand over without a message
    assert report("zb_v", 2, 1, 1, costs=Costs(latency=0.5)).makespan == report("zb_v", 2, 1, 1).makespan + 4 * 0.5


def with_list(schedule: Schedule, rank: int, actions: list[Action]) -> Schedule:
    lists = list(schedule.actions)
    lists[rank] = tuple(actions)
    return replace(schedule, actions=tuple(lists))


def test_incomplete_lists_are_refused() -> None:
    schedule = make_schedule("zb_h1", 2, 1, 2)
    mine = list(schedule.actions[1])
    for broken, words in (
        (mine[:-1], "stage 1 does FI of micro-batch 1"),
        ([*mine, mine[-1]], "FIWW"),
        ([mine[1], mine[0], *mine[2:]], "I1.0 on rank 1 comes in the order I"),
        ([*mine, Action("B", 1, 0)], "FIWB"),
        ([*mine, Action("F", 0, 0)], "whose stage is on rank 0"),
        ([*mine, Action("F", 2, 0)], "no part of the schedule"),
        ([*mine, Action("F", 1, 2)], "no part of the schedule"),
    ):
        with pytest.raises(ScheduleError, match=words):
            check_complete(with_list(schedule, 1, broken))


def test_ranks_that_wait_for_each_other_are_found() -> None:
    schedule = make_schedule("1f1b", 2, 1, 2)
    early = with_list(schedule, 0, [Action(k, 0, i) for k, i in (("F", 0), ("B", 0), ("F", 1), ("B", 1))])  # type: ignore[arg-type]
    late = with_list(early, 1, [Action(k, 1, i) for k, i in (("F", 0), ("F", 1), ("B", 0), ("B", 1))])  # type: ignore[arg-type]
    check_complete(late)
    with pytest.raises(ScheduleError, match="rank 0 waits at B0.0 for B1.0; rank 1 waits at F1.1 for F0.1"):
        verify(late)
