"""train/keeper: a trainer that dies, hangs, holds the interpreter or is told to stop ends with the documented code."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megafp8.train.hangs import judge, waits_for_peer
from tests.journeys.runs import environment

PROLOGUE = """
import ctypes, os, re, signal, sys, time
from megafp8.core.heartbeat import HEART
from megafp8.train.keeper import keep
def begin(seconds=1.0, **facts):
    HEART.tell(limits={"step": seconds}, **facts)
    HEART.beat("step", 7)
    print(os.getpid(), flush=True)
def wait():
    while not HEART.stops:
        time.sleep(0.02)
        HEART.beat()
    print("asked", HEART.stops, flush=True)
"""


def _start(body: str, **env: str) -> subprocess.Popen[str]:
    lines = "".join(f"    {line}\n" for line in body.strip().splitlines())
    code = f"{PROLOGUE}\ndef train():\n{lines}\nsys.exit(keep(train, dict(os.environ)))"
    return subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=environment() | env,
    )  # fmt: skip


def _run(body: str, **env: str) -> tuple[int, str]:
    process = _start(body, **env)
    _, err = process.communicate(timeout=30)
    return process.returncode, err


def _trainer(process: subprocess.Popen[str]) -> int:
    assert process.stdout is not None
    return int(process.stdout.readline())


def _gone(pid: int) -> bool:
    end = time.monotonic() + 5
    while time.monotonic() < end:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state == "Z":
            return True
        time.sleep(0.02)
    return False


@pytest.mark.parametrize(
    ("body", "code", "says"),
    [
        ("begin(); return 5", 5, ""),
        ("begin(); HEART.finish(5); os.abort()", 5, ""),
        ("begin(); sys.exit(0)", 1, "rank 3: ended with exit code 0 in step 7, before its work was done"),
        ("begin(); os._exit(0)", 1, "before its work was done"),
        ("begin(); os.abort()", 134, "killed by SIGABRT in step 7: a crash in native code"),
        ("begin(); ctypes.string_at(0)", 139, "killed by SIGSEGV in step 7"),
        ("begin(); os.kill(os.getpid(), signal.SIGKILL)", 137, "killed by SIGKILL in step 7: by a person, or out of"),
    ],
    ids=["code", "killed-at-exit", "exit-0", "_exit-0", "abort", "segfault", "kill"],
)
def test_every_end_has_its_code_and_a_line(body, code, says):
    got, err = _run(body, RANK="3")
    assert got == code and says in err, err


def test_a_trainer_that_holds_the_interpreter_is_seen_and_shown(tmp_path):
    # one regular expression that backtracks for ever: no other thread of that process runs
    body = f"begin(folder={str(tmp_path)!r}, world=1)\nre.match(r'(a*)*b', 'a' * 64)"
    begin = time.monotonic()
    code, err = _run(body)
    assert code == 70 and time.monotonic() - begin < 1.0 + 35
    assert re.search(r"busy or blocked, waits for no peer, silent for \d+ s in step, step 7", err), err
    assert "in train" in (tmp_path / "hangs/rank-00000.txt").read_text()
    assert "rank 0" in (tmp_path / "hangs/verdict.txt").read_text()


def test_a_stopped_trainer_is_seen_and_shown(tmp_path):
    process = _start(f"begin(folder={str(tmp_path)!r}, world=1)\ntime.sleep(60)")
    os.kill(_trainer(process), signal.SIGSTOP)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 70 and "stopped by a signal, silent for" in err
    assert "in train" in (tmp_path / "hangs/rank-00000.txt").read_text()


def test_signs_of_life_keep_a_slow_trainer():
    body = "begin(0.6)\nfor _ in range(12):\n    time.sleep(0.1)\n    HEART.beat()\nreturn 0"
    assert _run(body) == (0, "")


@pytest.mark.parametrize("to_trainer", [False, True], ids=["keeper", "both"])
def test_one_request_to_stop_counts_once_however_many_processes_get_it(to_trainer):
    process = _start("begin(); wait(); return 75")
    trainer = _trainer(process)
    if to_trainer:
        os.kill(trainer, signal.SIGTERM)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (75, "asked 1\n", "")


def test_a_request_that_came_before_anyone_listened_is_not_lost():
    # run_ranks holds signals back while it starts ranks, and they inherit that
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    try:
        process = _start("begin(); wait(); return 75")
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 75
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])


def test_the_second_request_ends_a_trainer_that_cannot_listen():
    process = _start("begin(60.0); re.match(r'(a*)*b', 'a' * 64)")
    trainer = _trainer(process)
    process.send_signal(signal.SIGINT)
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=10)
    assert process.returncode == 130 and "second signal, stopping at once" in err and _gone(trainer)


def test_a_signal_that_the_run_does_not_take_ends_it():
    process = _start("begin(60.0, stop_signals=['SIGUSR1']); time.sleep(60)")
    trainer = _trainer(process)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=10)
    assert process.returncode == -signal.SIGTERM and _gone(trainer)


def test_a_trainer_ends_with_its_keeper_though_it_holds_the_interpreter():
    process = _start("begin(60.0); re.match(r'(a*)*b', 'a' * 64)")
    trainer = _trainer(process)
    process.kill()
    process.communicate(timeout=10)
    assert _gone(trainer)


STACK = """Thread 0x00007f (most recent call first):
  File "/x/threading.py", line 324 in wait

Current thread 0x00008f (most recent call first):
  File "{innermost}", line 2828 in all_reduce
  File "/x/megafp8/train/step.py", line 108 in gradients
"""


def test_the_rank_that_others_wait_for_is_named():
    waits = waits_for_peer(STACK.format(innermost="/x/torch/distributed/distributed_c10d.py"))
    assert waits and not waits_for_peer(STACK.format(innermost="/x/megafp8/nn/mlp.py"))
    ranks = [
        {"rank": r, "host": "n1", "pid": 10 + r, "section": "step", "step": 7, "silent_seconds": 20.0, "state": "",
         "waits": r != 2}
        for r in range(4)
    ]  # fmt: skip
    text = judge(ranks, 4)
    assert "rank 2 (host n1, pid 12): busy or blocked" in text and "3 of 4 ranks wait for it" in text
    stopped = [{**r, "waits": r["rank"] != 1, "state": "stopped by a signal" * (r["rank"] == 1)} for r in ranks]
    assert "rank 1 (host n1, pid 11): stopped by a signal" in judge(stopped, 4)
    assert "all 4 ranks wait for each other in step 7" in judge([{**r, "waits": True} for r in ranks], 4)
    assert "no report of rank 2" in judge([r for r in ranks if r["rank"] != 2], 4)
