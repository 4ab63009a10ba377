"""Every mesh of up to 8 processes trains as one process does: losses, norms, every gradient, and 5 steps.

`make test` covers every mesh, and every pair of options (mesh x schedule, schedule x model, model x recompute, ...)
at least once; `make test-all` every mesh x model x accumulation x recompute with the other options in turn.
"""

from __future__ import annotations

import itertools
import math
import random
from functools import cache
from typing import Any

import numpy as np
import pytest

from megafp8.train.config import check_run
from tests.distributed.matrix import MODELS, Case, Outcome, Values, run_case, run_cases, run_config, single, together
from tests.distributed.ranks import run_ranks

# fp64 sums of up to 10^4 terms in another order: 10^4 * 2^-53 = 1e-12 of the largest terms; the norm of a gradient can
# lie 10^2 below them by cancellation. A missing or doubled reduction shows at 1e-1.
GRADIENTS = 1e-10
# Five AdamW steps at 1e-2: where a second moment is small, m / sqrt(v) has the relative error of the gradient's
# elements, which is up to 10 times that of its norm.
PARAMETERS = 1e-9

AXES = ("pp", "dp", "cp", "tp")
SIZES = (1, 2, 4)
MESHES = [sizes for sizes in itertools.product(SIZES, repeat=4) if math.prod(sizes) <= 8]
OPTIONS: dict[str, tuple[Any, ...]] = {
    "model": tuple(MODELS),
    "schedule": ("1f1b", "gpipe", "interleaved", "zb_h1", "zb_v", "dualpipe_v"),
    "micro_batches": (1, 4),
    "recompute": ("none", "selective", "full"),
    "ep": (1, 2, 4),
    "etp": (0, 1),
    "dp_shard": ("none", "optimizer", "full"),
    "cp_exchange": ("ring", "all_gather", "all_to_all"),
    "sequence_parallel": (True, False),
    "uneven": (False, True),
    "order": ("tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp"),
    "document_mask": (False, True),
}
_LAYERS = {1: 4, 2: 4, 4: 8}  # by pp: as few as fill two stages a rank
# by pp and stages a rank
_UNEVEN = {(2, 1): (3, 1), (2, 2): (0, 1, 1, 2), (4, 1): (3, 2, 2, 1), (4, 2): (0, 1, 1, 1, 1, 1, 1, 2)}
_TWO_STAGES = ("interleaved", "zb_v", "dualpipe_v")
# options that mean nothing on an axis of size 1
_NEEDS = {"schedule": "pp", "uneven": "pp", "cp_exchange": "cp", "sequence_parallel": "tp"}


def draw_options(draw: random.Random, axes: dict[str, int], given: Values) -> Values:
    """Options for a mesh: `given`, the others by lot, those that mean nothing there at their first value."""
    while True:
        options = {name: draw.choice(choices) for name, choices in OPTIONS.items()} | given
        for option, axis in _NEEDS.items():
            if axes[axis] == 1:
                options[option] = OPTIONS[option][0]
        if "moe" not in MODELS[options["model"]]:
            options |= {"ep": 1, "etp": 0}
        if allowed(axes, options):
            return options


def allowed(axes: dict[str, int], options: Values) -> bool:
    """Whether the trainer serves the combination; `test_the_trainer_accepts_what_is_tested` holds it to this."""
    etp = options["etp"] or axes["tp"]
    if axes["dp"] * axes["cp"] * axes["tp"] % (options["ep"] * etp):
        return False
    like_dense = (options["ep"], etp) == (1, axes["tp"])
    if axes["pp"] > 1 and not like_dense and options["order"] != "tp-cp-ep-dp-pp":
        return False  # experts' ranks across pipeline stages
    heads = MODELS[options["model"]]["num_attention_heads"]
    if options["cp_exchange"] == "all_to_all" and heads // axes["tp"] % axes["cp"]:
        return False
    # torch's fully_shard takes gradients from the backward pass only
    apart = axes["pp"] > 1 and options["schedule"] in ("zb_h1", "zb_v", "dualpipe_v")
    return options["dp_shard"] != "full" or not apart


def make_case(axes: dict[str, int], options: Values) -> Case:
    """The case of these options."""
    parallel: Values = {axis: size for axis, size in axes.items() if size > 1}
    names = ("schedule", "ep", "etp", "dp_shard", "cp_exchange", "sequence_parallel", "order")
    parallel |= {name: options[name] for name in names if options[name] != OPTIONS[name][0]}
    if options["schedule"] == "interleaved":
        parallel["virtual_stages"] = 2
    if options["uneven"]:
        parallel["layers_per_stage"] = _UNEVEN[axes["pp"], 2 if options["schedule"] in _TWO_STAGES else 1]
    plain = {name: options[name] for name in ("model", "micro_batches", "recompute", "document_mask")}
    return Case(parallel, num_layers=_LAYERS[axes["pp"]], **plain)


@cache
def quick_cases() -> list[Case]:
    """Cases that cover every pair of options that was drawn for any mesh, and every mesh twice."""
    draw = random.Random(1)
    pools = []
    for sizes in MESHES:
        axes = dict(zip(AXES, sizes))
        pools.append((axes, [draw_options(draw, axes, {}) for _ in range(60)]))
    pairs = {id(options): set(itertools.combinations(options.items(), 2)) for _, pool in pools for options in pool}
    missing = set().union(*pairs.values())
    chosen = []
    for turn in itertools.count():
        for axes, pool in pools:
            best = max(pool, key=lambda options: len(missing & pairs[id(options)]))
            if turn < 2 or missing & pairs[id(best)]:
                missing -= pairs[id(best)]
                chosen.append(make_case(axes, best))
        if turn and not missing:
            return chosen


@cache
def all_cases() -> list[Case]:
    """Every mesh x model x accumulation x recompute, the other options by lot."""
    draw = random.Random(2)
    cases = []
    for sizes, model, m, recompute in itertools.product(MESHES, MODELS, OPTIONS["micro_batches"], ("none", "full")):
        axes = dict(zip(AXES, sizes))
        given = {"model": model, "micro_batches": m, "recompute": recompute}
        cases.append(make_case(axes, draw_options(draw, axes, given)))
    return cases


def chunks(cases: list[Case], length: int) -> list[Any]:
    """Cases of one world together, a few at a time: starting processes costs more than a case."""
    parts = []
    for world in (1, 2, 4, 8):
        mine = [case for case in cases if case.world == world]
        for start in range(0, len(mine), length):
            parts.append(pytest.param(mine[start : start + length], id=f"{world}-{start}"))
    return parts


@cache
def alone(case: Case) -> tuple[Outcome, dict[str, np.ndarray], dict[str, np.ndarray]]:
    """One process's outcome, and its whole gradients and parameters."""
    outcome = run_ranks(run_case, 1, case)[0]
    return outcome, together([outcome.gradients]), together([outcome.parameters])


def hold_against_one_process(case: Case, outcomes: list[Outcome]) -> None:
    """Assert that what the ranks have is what one process has."""
    expected, gradients, parameters = alone(single(case))
    for outcome in outcomes:
        assert outcome.losses == pytest.approx(expected.losses, rel=PARAMETERS), case
        assert outcome.norms == pytest.approx(expected.norms, rel=PARAMETERS), case
        assert outcome.losses[0] == pytest.approx(expected.losses[0], rel=GRADIENTS), case
    _compare(together([o.gradients for o in outcomes]), gradients, GRADIENTS, case)
    _compare(together([o.parameters for o in outcomes]), parameters, PARAMETERS, case)


def _compare(got: dict[str, np.ndarray], expected: dict[str, np.ndarray], tolerance: float, case: Case) -> None:
    assert got.keys() == expected.keys(), case
    for name, whole in expected.items():
        error = np.linalg.norm(got[name] - whole) / np.linalg.norm(whole)
        assert error < tolerance, f"{case}: {name} is off by {error:.1e}"


def test_the_trainer_accepts_what_is_tested() -> None:
    assert {case.world for case in quick_cases()} == {1, 2, 4, 8}
    for case in quick_cases():
        assert check_run(run_config(case), case.world) == [], case


@pytest.mark.parametrize("cases", chunks(quick_cases(), 4))
def test_every_mesh_and_pair_of_options(cases: list[Case]) -> None:
    for case, outcomes in zip(cases, zip(*run_ranks(run_cases, cases[0].world, cases))):
        hold_against_one_process(case, list(outcomes))


@pytest.mark.slow
@pytest.mark.parametrize("cases", chunks(all_cases(), 10))
def test_every_mesh_model_accumulation_and_recompute(cases: list[Case]) -> None:
    for case, outcomes in zip(cases, zip(*run_ranks(run_cases, cases[0].world, cases, timeout=120))):
        hold_against_one_process(case, list(outcomes))
