"""F01, F02, F04, F06, F09, F10, F24: a rank dies, anywhere; the others leave soon and the run goes on as if it had not.

Every order is one attempt; the first that runs to its end must have the losses and samples of a run without faults.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from megafp8.checkpoint import latest, load_tensors, verify
from megafp8.checkpoint.folders import candidates
from tests.faults.attempts import attempt, forks
from tests.faults.conftest import STEPS, WORDS
from tests.faults.outcome import compare_samples, curve
from tests.journeys.runs import overrides

SEED = 20261130
# in the order in which attempts come by, from the newest checkpoint of every fifth step
KILLS = [
    "setup:kill:1:*#a", "index:kill:0:*#b", "save-begin:kill:0:*#c", "save-piece:kill:1:5#d", "forward:kill:0:7#e",
    "save-commit:kill:0:*#f", "backward:kill:1:12#g", "save-committed:kill:0:*#h", "load:kill:1:*#i",
    "reduce:kill:1:18#j", "evaluation:kill:0:20#k", "prune:kill:0:*#l", "optimizer:kill:0:23#m",
    "save-written:kill:1:25#n", "batch:kill:0:27#o",
]  # fmt: skip


def storm(config: Path, orders: list[str], world: int, words: list[str]) -> int:
    """Attempts until one runs to its end, a fault in each; returns how many died."""
    run, folder = config.parent / "run", config.parent / "orders"
    for died in range(len(orders) + 1):
        left = [order for order in orders if not (folder / order.replace("*", "any")).exists()]
        ended = attempt(config, world, words, orders=" ".join(left[:1]), folder=folder)
        if ended.codes == [0] * world:
            assert not left, f"never came by: {left}"
            return died
        assert died < len(orders), ended.said
        victim = int(left[0].split(":")[2])
        assert "fault on purpose" in ended.said, f"{left[0]}: {ended.codes}\n{ended.said}"
        assert ended.codes[victim] == -9 and 0 not in ended.codes, f"{left[0]}: {ended.codes}\n{ended.said}"
        assert ended.seconds < 5.0, f"{left[0]}: {ended.seconds:.1f} s until all were gone"
        for path in candidates(run / "checkpoints"):  # old or new, never a mix
            verify(path)
    raise AssertionError("unreachable")


@forks
def test_a_kill_at_every_point_changes_nothing(config, calm, tmp_path, as_calm):
    assert storm(config, KILLS, 2, [*WORDS]) == len(KILLS)
    assert as_calm()
    assert not compare_samples(tmp_path / "orders", calm / "orders", 2, STEPS, 8)
    a, b = (load_tensors(latest(folder / "run/checkpoints")) for folder in (tmp_path, calm))
    assert a.keys() == b.keys() and all(torch.equal(a[name], tensor) for name, tensor in b.items())
    assert all(path.name.startswith("step_") for path in (tmp_path / "run/checkpoints").iterdir())


@pytest.mark.slow
@forks
@pytest.mark.parametrize("mode", ["false", "true"], ids=["sync", "async"])
def test_twenty_kills_at_random_steps(config, data, tmp_path, mode):
    """F01 on the first, a middle and the last of three ranks."""
    rng = random.Random(SEED)
    words = [*WORDS, *overrides(train__global_batch=12, train__steps=60, checkpoint__asynchronous=mode)]
    straight = tmp_path / "straight"
    straight.mkdir()
    text = config.read_text()
    (straight / "pretrain.toml").write_text(text.replace(str(tmp_path / "run"), str(straight / "run")))
    assert attempt(straight / "pretrain.toml", 3, words, folder=straight / "orders").codes == [0, 0, 0]
    points = ("batch", "forward", "backward", "reduce", "optimizer")
    steps = sorted(rng.sample(range(1, 61), 20))
    orders = [f"{rng.choice(points)}:kill:{rng.randrange(3)}:{step}" for step in steps]
    assert storm(config, orders, 3, words) == 20
    assert curve(tmp_path / "run") == curve(straight / "run"), f"seed {SEED}"
    assert not compare_samples(tmp_path / "orders", straight / "orders", 3, 60, 12)


@forks
def test_a_bug_and_a_lack_of_memory_on_one_rank_are_told_once_with_their_rank(config, as_calm):
    """F09, F10."""
    ended = attempt(config, 2, WORDS, orders="backward:raise:1:7")
    assert ended.codes == [71, 1] and ended.seconds < 5.0, ended.said
    assert ended.said.count("Traceback") == 1 and "rank 1: internal error in step (step 7): RuntimeError" in ended.said
    assert "rank 0: lost its peer in step (step 7)" in ended.said
    ended = attempt(config, 2, WORDS, orders="forward:memory:1:8")
    assert ended.codes == [71, 6], ended.said
    assert "rank 1: out of memory in step (step 8)" in ended.said and "Traceback" not in ended.said
    ended = attempt(config, 2, WORDS, orders="reduce:segv:0:9")
    assert ended.codes == [-11, 71], ended.said
    assert attempt(config, 2, WORDS).codes == [0, 0]
    assert as_calm()
