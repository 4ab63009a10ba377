"""core/heartbeat: what one process writes, the other reads whole."""

from __future__ import annotations

import os
import signal
import sys
import time

import pytest

from megafp8.core.heartbeat import Heartbeat


@pytest.mark.skipif(sys.platform == "darwin", reason="fork after frameworks were loaded is unsafe there")
def test_a_reader_never_sees_half_a_beat():
    # a word that is zeroed before it is written reads as a rank that has been silent since the machine was started
    heart = Heartbeat()
    child = os.fork()
    if child == 0:
        while True:
            heart.beat("step", 7)
    try:
        end = time.monotonic() + 1.0
        while time.monotonic() < end:
            for _ in range(1000):
                beat = heart.last
                assert beat.silent_seconds < 10 and beat.step in (0, 7)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
