"""A schedule of a model, timed: what a stage costs, when a closed form holds; and its picture."""

from __future__ import annotations

import re
from typing import Any

import pytest

from megafp8.parallel.mesh_config import ParallelConfig
from megafp8.parallel.schedule_times import Costs
from megafp8.parallel.schedules import SCHEDULES
from megafp8.plan.step_plan import FORMULAS, NAMES, StepPlan, alternatives, bubble_of, plan_step
from megafp8.plan.timeline import draw, title


def plan(layers: int = 16, micro_batches: int = 8, costs: Costs | None = None, **values: Any) -> StepPlan:
    loss_layers = values.pop("loss_layers", None)
    config = ParallelConfig(**{"pp": 4, **values})
    return plan_step(config, layers, micro_batches, costs or Costs(), loss_layers=loss_layers)


def test_every_schedule_has_a_name_and_a_formula() -> None:
    assert set(NAMES) == set(FORMULAS) == set(SCHEDULES)


def test_the_unit_of_time_is_the_same_for_all_schedules() -> None:
    # The work of a rank is 3 m in every one of them: m micro-batches through its share of the layers, F = I = W = 1.
    configs, refused = alternatives(ParallelConfig(pp=4), 16)
    assert not refused and len(configs) == len(SCHEDULES)
    for config in configs:
        found = plan_step(config, 16, 8, Costs())
        for rank in range(4):
            busy = (1 - found.idle(rank)) * found.report.makespan
            assert busy == pytest.approx(3 * 8)
        assert found.closed == pytest.approx(found.bubble)
        assert found.bubble == pytest.approx((found.report.makespan - 24) / 24)


def test_peaks_are_in_shares_of_a_rank() -> None:
    assert plan().peaks == (4, 3, 2, 1)
    assert plan(schedule="zb_v").peaks == (4, 4, 4, 4)  # 8 stages of half the size
    uneven = plan(layers_per_stage=(2, 6, 4, 4))
    assert uneven.peaks == (4 * 0.5, 3 * 1.5, 2 * 1.0, 1.0)


def test_closed_form_only_where_it_holds() -> None:
    assert plan().closed is not None
    assert plan(layers_per_stage=(2, 6, 4, 4)).closed is None
    assert plan(costs=Costs(latency=0.1)).closed is None
    assert plan(micro_batches=2, schedule="zb_h1").closed is None
    assert plan(micro_batches=2).closed == pytest.approx(1.5)
    assert plan(loss_layers=1.0).closed is None
    assert plan(pp=1).closed == plan(pp=1).bubble == 0.0


def test_costly_loss_slows_the_last_stage() -> None:
    found = plan(loss_layers=2.0)
    assert found.costs.stage_scale == (1.0, 1.0, 1.0, 1.5)
    assert found.bubble > plan().bubble
    counted = plan(layers=14, count_embedding_as_layer=True, count_loss_as_layer=True)
    assert counted.costs.stage_scale == (1.0, 1.0, 1.0, 1.0)


def test_schedules_that_cannot_split_the_layers_are_named() -> None:
    configs, refused = alternatives(ParallelConfig(pp=4), 12)
    assert [config.schedule for config in configs] == ["gpipe", "1f1b", "zb_h1"]
    assert len(refused) == 3
    assert all("12 is not divisible" in line for line in refused)


def test_picture_shows_every_action_once() -> None:
    found = plan(micro_batches=5, schedule="zb_h1")
    svg = draw([found], "svg").decode()
    words = re.findall(r"<text[^>]*>([^<]+)</text>", svg)
    numbers = [word.strip() for word in words if re.fullmatch(r"\s*[0-4]\s*", word)]
    # 4 ranks, F, I and W of each micro-batch; the ticks of the time axis may add a few
    for number in range(5):
        assert numbers.count(str(number)) >= 3 * 4
    assert any(word.startswith("ZB-H1: bubble 20.0%") for word in words)
    for label in ("F forward", "I input gradient", "W weight gradients", "idle", "rank 3"):
        assert label in words
    assert "B backward" not in words
    assert draw([found], "svg").decode() == svg  # the same plan, the same bytes


def test_pictures_of_all_schedules() -> None:
    configs, _ = alternatives(ParallelConfig(pp=2), 8)
    plans = [plan_step(config, 8, 4, Costs()) for config in configs]
    assert draw(plans, "png")[:8] == b"\x89PNG\r\n\x1a\n"
    assert len({title(p) for p in plans}) == len(plans)
    assert title(plans[0]) == "GPipe: bubble 25.0%, closed form (p−1)/m = 25.0%; 2 ranks, 4 micro-batches"


def test_bubble_without_a_plan_is_that_of_the_plan() -> None:
    for schedule in SCHEDULES:
        for micro_batches in (1, 3, 16):
            virtual = 2 if schedule == "interleaved" else 1
            config = ParallelConfig(pp=4, schedule=schedule, virtual_stages=virtual)  # type: ignore[arg-type]
            found = plan_step(config, 16, micro_batches, Costs())
            assert bubble_of(config, 16, micro_batches) == pytest.approx(found.bubble)
    uneven = ParallelConfig(pp=4, layers_per_stage=(2, 6, 4, 4))
    assert bubble_of(uneven, 16, 8) == pytest.approx(plan_step(uneven, 16, 8, Costs()).bubble)
