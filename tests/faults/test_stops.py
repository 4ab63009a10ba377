"""F11, F12: a stop signal in every section of a run, to one rank or to all; a second one means now."""

from __future__ import annotations

import random
import signal
import subprocess
import time

import pytest

from megafp8.checkpoint import latest, verify
from megafp8.checkpoint.folders import candidates, step_of
from tests.faults import injuries
from tests.faults.attempts import attempt, forks
from tests.faults.conftest import STEPS, WORDS
from tests.faults.outcome import compare_samples, curve, last_step
from tests.journeys.runs import megafp8, overrides, start, write_config

SEED = 40
# in each the other rank hears nothing; all stop after the step that is under way, or before the first
STOPS = [
    ("setup:term:1:*", 0), ("index:int:0:*", 0), ("forward:term:1:3", 3), ("save-piece:usr1:0:5", 5),
    ("load:term:0:*", 5), ("evaluation:term:1:10", 10), ("save-committed:term:0:15", 15), ("optimizer:term:1:22", 22),
]  # fmt: skip


@forks
def test_a_signal_to_one_rank_stops_all_after_the_step_and_saves(config, calm, tmp_path, as_calm):
    for number, (order, step) in enumerate(STOPS):
        ended = attempt(config, 2, WORDS, orders=f"{order}#{number}", folder=tmp_path / "orders")
        assert ended.codes == [75, 75], f"{order}: {ended.codes}\n{ended.said}"
        newest = latest(tmp_path / "run/checkpoints")
        assert (step_of(newest) if newest else 0) == step, f"{order}: {newest}\n{ended.said}"
    assert attempt(config, 2, WORDS, folder=tmp_path / "orders").codes == [0, 0]
    assert as_calm() and not compare_samples(tmp_path / "orders", calm / "orders", 2, STEPS, 8)


@pytest.mark.slow
def test_forty_signals_at_random_moments(data, tmp_path):
    """The real command: to the launcher, one rank or all; from its first millisecond on; every fourth time twice."""
    rng, slowest, saved = random.Random(SEED), 0.0, 0
    straight, config = write_config(tmp_path / "straight", data), write_config(tmp_path, data)
    words = ["--nproc", "2", *overrides(checkpoint__interval=7, train__eval_interval=5, precision__dtype="fp32")]
    endless = overrides(train__steps=1_000_000, optimizer__schedule="constant")
    for number in range(40):
        process = start("pretrain", config, *words, *endless)
        time.sleep(rng.uniform(0, 12))
        ranks = list(injuries.keepers(process.pid).values())
        whom = rng.choice(["launcher", "one", "all"]) if len(ranks) == 2 else "launcher"
        chosen = {"launcher": [process], "one": [rng.choice(ranks or [process])], "all": ranks}[whom]
        kind, twice = rng.choice([signal.SIGTERM, signal.SIGUSR1, signal.SIGINT]), number % 4 == 3
        begin = time.monotonic()
        if twice:
            kind = rng.choice([signal.SIGTERM, signal.SIGINT])
        for again in range(1 + twice):
            time.sleep(0.3 * again)
            for one in chosen:
                if process.poll() is None:
                    one.send_signal(kind)
        try:
            _, said = process.communicate(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
            raise AssertionError(f"stop {number} (seed {SEED}): {kind.name} to {whom} took over 30 s") from None
        slowest = max(slowest, time.monotonic() - begin)
        codes = (75, 72) if not twice else (75, 72, 130, 137)
        early = not ranks and process.returncode in (-kind, 128 + kind, 130)  # before anyone listened: nothing to save
        assert process.returncode in codes or early, f"stop {number} (seed {SEED}): {kind.name} to {whom}: {said}"
        (tmp_path / "run/idle_stops.json").unlink(missing_ok=True)
        for path in candidates(tmp_path / "run/checkpoints"):
            verify(path)
        newest = latest(tmp_path / "run/checkpoints")
        if process.returncode == 75 and newest is not None:
            assert step_of(newest) == last_step(tmp_path / "run")
            saved += 1
    print(f"40 stops, {saved} of them with a checkpoint of the last step, slowest {slowest:.1f} s")
    steps = last_step(tmp_path / "run")
    fixed = overrides(train__steps=steps, optimizer__schedule="constant")
    if steps > step_of(latest(tmp_path / "run/checkpoints")):
        megafp8("pretrain", config, *words, *fixed)
    megafp8("pretrain", straight, *words, *fixed, timeout=600)
    assert curve(tmp_path / "run") == curve(tmp_path / "straight/run")
