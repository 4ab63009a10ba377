"""Starts the ranks of one machine and hands their exit code on.

torchrun and srun start ranks as well; what is different here is that a rank's documented exit code becomes the
command's, that a signal reaches every rank once, and that a rank that dies takes the others with it.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from types import FrameType

from megafp8.core.errors import EXIT_INTERRUPTED, EXIT_PREEMPTED

# What the other ranks get once one has failed, by seconds since: the second SIGTERM is the one that a rank obeys at
# once, and two sent together could arrive as one.
_AFTER_A_FAILURE = ((0.0, signal.SIGTERM), (1.0, signal.SIGTERM), (30.0, signal.SIGKILL))

# The read end of a pipe whose write end only the launcher holds: it ends when the launcher does, however that ends.
LIFELINE = "MEGAFP8_LIFELINE_FD"


def free_port() -> int:
    """A TCP port of the loopback interface that was free a moment ago."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _environment(rank: int, world: int, port: int, threads: int, lifeline: int) -> dict[str, str]:
    return {
        **os.environ,
        LIFELINE: str(lifeline),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)),
        # spinning OpenMP threads starve the neighbour rank when ranks fill all cores
        "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "passive"),
    }


def leave_with_launcher(env: Mapping[str, str]) -> None:
    """In a rank that `run_ranks` started: end at once when the launcher is gone, so that no orphan holds the folder.

    A checkpoint commits by one rename, so leaving at any moment damages none.
    """
    if LIFELINE not in env:
        return
    lifeline = int(env[LIFELINE])

    def wait() -> None:
        os.read(lifeline, 1)  # nobody writes: this returns at the end of the pipe
        os._exit(EXIT_INTERRUPTED)

    threading.Thread(target=wait, name="lifeline", daemon=True).start()


def run_ranks(words: Sequence[str], *, world: int) -> int:
    """Run `python -m megafp8 *words` as `world` ranks on this machine; returns the first failing exit code.

    The signals SIGTERM, SIGINT and SIGUSR1 are passed on, SIGHUP as SIGTERM. Ranks that outlive a failed one get
    SIGTERM twice, and SIGKILL after 30 s. If this process is killed, its ranks stop at once: see `leave_with_launcher`.
    """
    port, threads = free_port(), max(1, (os.cpu_count() or 1) // world)
    lifeline, held = os.pipe()
    ranks = [
        # a session of its own keeps the terminal's Ctrl-C from reaching a rank twice
        subprocess.Popen(
            [sys.executable, "-m", "megafp8", *words],
            env=_environment(rank, world, port, threads, lifeline),
            pass_fds=(lifeline,),
            start_new_session=True,
        )
        for rank in range(world)
    ]

    def forward(number: int, frame: FrameType | None) -> None:
        for process in ranks:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM if number == signal.SIGHUP else number)

    watched = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
    old = {s: signal.signal(s, forward) for s in watched}
    try:
        return _wait(ranks)
    finally:
        for process in ranks:
            if process.poll() is None:
                process.kill()
        os.close(lifeline)
        os.close(held)
        for number, handler in old.items():
            signal.signal(number, handler)


def _wait(ranks: Sequence[subprocess.Popen[bytes]]) -> int:
    failed, since = 0, 0.0
    left = list(_AFTER_A_FAILURE)
    while any(process.poll() is None for process in ranks):
        if not failed:
            codes = [process.poll() for process in ranks]
            failed = next((code for code in codes if code not in (None, 0, EXIT_PREEMPTED)), 0) or 0
            since = time.monotonic()
        elif left and time.monotonic() - since >= left[0][0]:
            number = left.pop(0)[1]
            for process in ranks:
                if process.poll() is None:
                    process.send_signal(number)
        time.sleep(0.05)
    code = failed or next((process.returncode for process in ranks if process.returncode), 0)
    return 128 - code if code < 0 else code
