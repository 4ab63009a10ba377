"""The switch itself: off it does nothing, on it does what is ordered, where and once."""

from __future__ import annotations

import errno
import subprocess
import sys

import numpy as np
import pytest
import torch

from megafp8.core import faults
from megafp8.core.heartbeat import HEART
from tests.journeys.runs import environment


@pytest.fixture
def on(tmp_path):
    def order(text: str, rank: int = 0, folder: bool = False) -> None:
        places = {faults.FOLDER: str(tmp_path)} if folder else {}
        faults.order({faults.SWITCH: text, "RANK": str(rank), **places})

    yield order
    faults.order(None)
    HEART.beat("start", 0)


def test_off_it_does_nothing_and_no_test_left_it_on():
    values = torch.ones(3)
    for point in faults.POINTS:
        faults.at(point)
    faults.spoil("loss", values)
    faults.trace("samples", ids=values)
    assert torch.equal(values, torch.ones(3)) and faults.SWITCH not in environment()


def test_an_order_is_carried_out_on_its_rank_in_its_step_once(on):
    on("forward:full:1:7")
    for step in (6, 7, 7):
        HEART.beat("step", step)
        faults.at("forward")  # rank 0 has none
    on("forward:full:1:7", rank=1)
    HEART.beat("step", 6)
    faults.at("forward")
    HEART.beat("step", 7)
    faults.at("backward")
    with pytest.raises(OSError) as caught:
        faults.at("forward")
    assert caught.value.errno == errno.ENOSPC
    faults.at("forward")


def test_with_a_folder_once_over_all_processes_and_more_while_it_is_on(on, tmp_path):
    for _ in range(2):
        on("setup:raise:*:*#1", folder=True)
        if not (tmp_path / "setup:raise:any:any#1").exists():
            with pytest.raises(RuntimeError, match="setup:raise"):
                faults.at("setup")
        faults.at("setup")
    (tmp_path / "armed").write_text("load:memory:0:*\n")
    with pytest.raises(MemoryError):
        faults.at("load")
    faults.trace("samples", ids=torch.arange(2))
    assert '"ids": [0, 1]' in (tmp_path / "samples-0.jsonl").read_text()


def test_values_are_spoilt_in_place(on):
    for dtype, bit in ((torch.float32, 31), (torch.float64, 63)):
        on(f"loss:nan:0:* weight:flip:0:*:{bit}")
        loss, weight = torch.ones((), dtype=dtype), torch.ones(4, dtype=dtype)
        faults.spoil("loss", loss)
        faults.spoil("weight", weight)
        assert np.isnan(float(loss)) and weight.tolist() == [-1.0, 1.0, 1.0, 1.0]


@pytest.mark.parametrize("word", ["nowhere:kill:0:1", "setup:dance:0:1", "setup:kill:one:1", "setup:kill:0"])
def test_an_order_that_is_none_is_refused(word):
    with pytest.raises(ValueError, match="is not point:action"):
        faults.parse(word)


def test_a_process_reads_it_at_its_start_and_says_so():
    code = "from megafp8.core import faults; faults.at('setup'); print('not reached')"
    env = environment() | {faults.SWITCH: "setup:kill:*:*"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=30)
    assert done.returncode == -9 and not done.stdout
    assert done.stderr == "megafp8: fault on purpose: setup:kill:*:* on rank 0, step 0\n"
