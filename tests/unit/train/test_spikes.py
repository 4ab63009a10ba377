"""train/spikes, rewinds, the loader's skips: a jump is one, and those samples are left out and no others."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest

from megafp8.core.errors import CheckpointError, CorruptionError, NumericsError
from megafp8.data.loader import Loader
from megafp8.parallel.mesh import Mesh
from megafp8.train import step as step_module
from megafp8.train.guard_config import GuardSection
from megafp8.train.rewinds import extended, read_skips, write_skips
from megafp8.train.spikes import SpikeDetector, StepJudge
from megafp8.train.step import StepResult, train_step
from tests.distributed.small_run import make_parts, run_config


def test_a_jump_is_one_and_a_noisy_or_falling_curve_is_none():
    rng = random.Random(0)
    falling = SpikeDetector(10.0, 50)
    flagged = 0
    for step in range(2000):
        loss = 2.0 + 9.0 * 0.98**step + rng.gauss(0, 0.05)
        flagged += loss > falling.limit
        falling.add(step, loss)
    assert flagged == 0 and 2.2 < falling.limit < 3.5
    flat = SpikeDetector(10.0, 50)
    assert flat.limit == float("inf")  # too little is known
    for step in range(25):
        flat.add(step, 2.0)
    assert flat.limit == pytest.approx(2.4)  # a spread of 2 % is believed at least
    assert SpikeDetector(0.0, 50).limit == float("inf")


def _judge(**guard: object) -> tuple[object, StepJudge]:
    parts = make_parts(run_config(guard={"spike_window": 4, **guard}), 1)
    judge = StepJudge(parts)
    judge.losses.restart((step, 4.0) for step in range(4))
    return parts, judge


def test_a_step_of_a_spike_is_not_taken_and_leaves_no_trace():
    parts, judge = _judge(spike_factor=5.0)
    judge.losses.restart((step, 0.1) for step in range(4))  # so that an ordinary loss is a jump
    masters = {name: tensor.clone() for name, tensor in parts.optimizer.masters.items()}
    result = train_step(parts, 1, 1e-2, judge)
    assert judge.spiked and not result.taken and result.finite and parts.optimizer.step_count == 0
    assert all(bool((parts.optimizer.masters[name] == tensor).all()) for name, tensor in masters.items())
    judge.losses.restart((step, 50.0) for step in range(4))
    assert train_step(parts, 2, 1e-2, judge).taken and not judge.spiked and judge.in_a_row == 0


def test_a_step_that_is_computed_twice_is_the_same_step():
    one, two = (make_parts(run_config(guard={"rerun_interval": n}), 1) for n in (0, 1))
    for step in (1, 2):
        a, b = (train_step(parts, step, 1e-2, StepJudge(parts)) for parts in (one, two))
        assert a == b
    assert all(bool((two.optimizer.masters[n] == t).all()) for n, t in one.optimizer.masters.items())


@pytest.mark.parametrize("broken", [1, 2], ids=["first", "second"])
def test_a_result_that_comes_and_goes_is_computed_again(monkeypatch, broken):
    """The first or the second of the runs of a step has one gradient wrong: the right one is taken, and counted."""
    right = make_parts(run_config(), 1)
    train_step(right, 1, 1e-2)
    parts, judge = _judge(rerun_interval=1)
    calls, compute = [], step_module.gradients

    def faulty(parts, *args, **kwargs):
        found = compute(parts, *args, **kwargs)
        calls.append(1)
        if len(calls) == broken:
            parts.named_parameters[0][1].main_grad[0, 0] += 1e-6
        return found

    monkeypatch.setattr(step_module, "gradients", faulty)
    assert train_step(parts, 1, 1e-2, judge).taken and judge.transient == 1
    assert len(calls) == 3
    assert all(bool((parts.optimizer.masters[n] == t).all()) for n, t in right.optimizer.masters.items())


def test_three_results_of_one_step_end_the_run(monkeypatch):
    parts, judge = _judge(rerun_interval=1)
    compute, calls = step_module.gradients, []

    def faulty(parts, *args, **kwargs):
        found = compute(parts, *args, **kwargs)
        calls.append(1)
        parts.named_parameters[0][1].main_grad[0, 0] += 1e-6 * len(calls)
        return found

    monkeypatch.setattr(step_module, "gradients", faulty)
    with pytest.raises(CorruptionError, match=r"step 1: computed three times, with three results \(on rank 0\)"):
        train_step(parts, 1, 1e-2, judge)


def test_too_many_spikes_in_a_row_and_the_action_stop_end_a_run():
    _, judge = _judge(spike_factor=5.0)
    result = StepResult(9.0, 1.0, 8, 2, finite=True)
    guard = GuardSection(max_spikes=2)
    for _ in range(2):
        assert judge(1, result, lambda: result) is None
        judge.refuse(1, 9.0, guard)
    judge(3, result, lambda: result)
    with pytest.raises(NumericsError, match=r"step 3: loss 9 is above 4\.4.*spike 3 in a row"):
        judge.refuse(3, 9.0, guard)
    with pytest.raises(NumericsError, match="nothing was saved after it"):
        judge.refuse(3, 9.0, GuardSection(spike_action="stop"))


def test_samples_left_out_are_those_and_the_order_of_the_rest_stays():
    """A run that goes back several times sees, in order, exactly the samples that no rewind has left out."""
    rng = random.Random(1)
    for _ in range(200):
        skips, position, seen, left_out = (), 0, {}, set()
        for _ in range(6):
            loader = SimpleNamespace(skips=skips)
            step = rng.randint(1, 9)
            numbers = _numbers(loader, position, position + step)
            seen |= dict(zip(range(position, position + step), numbers, strict=True))
            position += step
            if rng.random() < 0.5:  # a spike at the end of it: back to a checkpoint
                checkpoint = rng.randint(0, position - 1)
                begin = max(checkpoint, position - rng.randint(1, 12))
                left_out |= set(_numbers(loader, begin, position))
                skips = extended(skips, begin, position)
                seen = {number: source for number, source in seen.items() if number < checkpoint}
                position = checkpoint
        trained = [seen[number] for number in range(position)]
        expected = [n for n in range(10_000) if n not in left_out][:position]
        assert trained == expected


def _numbers(loader: object, begin: int, end: int) -> list[int]:
    return Loader.numbers(loader, begin, end).tolist()  # type: ignore[arg-type]


def test_the_folder_knows_skips_first_and_a_broken_file_is_told(tmp_path):
    mesh = Mesh.single()
    assert read_skips(tmp_path, None, mesh) == ()
    assert read_skips(tmp_path, {"skipped_samples": [[8, 4]]}, mesh) == ((8, 4),)
    write_skips(tmp_path, ((8, 4), (16, 8)))
    assert read_skips(tmp_path, {"skipped_samples": [[8, 4]]}, mesh) == ((8, 4), (16, 8))
    (tmp_path / "skipped.json").write_text("[[1")
    with pytest.raises(CheckpointError, match=r"skipped\.json: cannot be read"):
        read_skips(tmp_path, None, mesh)
