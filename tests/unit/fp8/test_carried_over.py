"""Delayed scaling's state for other options: the newest amaxes stay, in order, and the scale follows from them."""

from __future__ import annotations

import pytest
import torch

from megafp8.fp8.formats import E4M3, E5M2
from megafp8.fp8.recipe import recipe
from megafp8.fp8.recipes.delayed import carried_over

PAST = [0.5, 8.0, 2.0]  # oldest first; entry 0 is the running micro-batch's


def carried(old: dict, new: dict, *, role: str = "input", past: list[float] = PAST, scale: float = 56.0):
    history = torch.tensor([0.0, *past])
    old = {"amax_history_len": len(history), **old}
    made = carried_over(history, torch.tensor([scale]), role, recipe("delayed", **old), recipe("delayed", **new))
    return made[0].tolist(), float(made[1])


@pytest.mark.parametrize(
    ("length", "history", "amax"),
    [(6, [0, 0, 0, *PAST], 8.0), (3, [0, 8.0, 2.0], 8.0), (2, [0, 2.0], 2.0), (1, [0], 2.0)],
)
def test_other_lengths_keep_the_newest(length: int, history: list[float], amax: float) -> None:
    assert carried({}, {"amax_history_len": length}) == (history, E4M3.max / amax)


def test_other_rules_give_other_scales() -> None:
    assert carried({}, {"amax_history_len": 4, "amax_compute_algo": "most_recent"})[1] == E4M3.max / 2.0
    assert carried({}, {"amax_history_len": 4, "margin": 2})[1] == E4M3.max / 4 / 8.0
    as_e4m3 = {"amax_history_len": 4, "fp8_format": "E4M3"}
    assert carried({}, as_e4m3, role="grad_output")[1] == E4M3.max / 8.0
    assert carried({"fp8_format": "E4M3"}, {"amax_history_len": 4}, role="grad_output")[1] == E5M2.max / 8.0


def test_a_history_of_one_is_read_from_its_scale() -> None:
    assert carried({"margin": 1}, {"amax_history_len": 3}, past=[], scale=28.0) == ([0, 0, 8.0], E4M3.max / 8.0)


def test_what_was_never_seen_or_is_not_finite_begins_at_1() -> None:
    assert carried({}, {"amax_history_len": 2}, past=[0.0, 0.0], scale=1.0) == ([0, 0], 1.0)
    assert carried({}, {"amax_history_len": 3}, past=[], scale=1.0) == ([0, 0, 0], 1.0)
    assert carried({}, {"amax_history_len": 2}, past=[1.0, float("inf")]) == ([0, float("inf")], 1.0)


def test_a_window_that_only_its_length_changes_goes_on_as_if_it_had_always_been_so() -> None:
    """Length 8 for 5 micro-batches, then 4: the same scale as 4 from the start, since the window holds the same."""
    long, short = recipe("delayed", amax_history_len=8), recipe("delayed", amax_history_len=4)
    states = [long.new_state("cpu"), short.new_state("cpu")]
    for value in (9.0, 1.0, 3.0, 2.0, 5.0):
        for made, state in ((long, states[0]), (short, states[1])):
            state["amax_history"][0] = value
            made.update([state], [made.spec("input")], state["amax_history"][:1].clone())
    history, scale = carried_over(*states[0].values(), "input", long, short)
    assert torch.equal(history, states[1]["amax_history"]) and torch.equal(scale, states[1]["scale"])


def test_state_is_taken_as_it_is_only_under_the_same_rules() -> None:
    base = recipe("delayed")
    assert base.keeps_state_of(recipe("delayed", reduce_amax=False))
    for name, value in (("margin", 1), ("amax_history_len", 2), ("amax_compute_algo", "most_recent")):
        assert not base.keeps_state_of(recipe("delayed", **{name: value}))
    assert not base.keeps_state_of(recipe("delayed", fp8_format="E4M3"))
