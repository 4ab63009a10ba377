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
import time
from collections.abc import Sequence
from types import FrameType

from megafp8.core.errors import EXIT_HUNG, EXIT_PEER_LOST, EXIT_PREEMPTED, EXIT_STOP_FILE
from megafp8.train.keeper import LIFELINE

# Once a rank has failed, the others mostly notice and say so; who has not by then waits in a library, and is killed.
_NOTICE_SECONDS = 2.0

# Ends that are agreed by all ranks, and one that is another's fault: none of them makes a rank the one that failed.
_TOGETHER = (0, EXIT_PREEMPTED, EXIT_STOP_FILE)
_HUNG_SECONDS = 15.0  # for all ranks to write down where they stand, once one has seen a hang

PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)


def free_port() -> int:
    """A TCP port of the loopback interface that was free a moment ago."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _loopback_interface() -> str:
    """The name of the interface of 127.0.0.1: lo, on macOS lo0."""
    return next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), "lo")


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
        # gloo listens where the host's name leads, which may be the world's side
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", _loopback_interface()),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)),
        # spinning OpenMP threads starve the neighbour rank when ranks fill all cores
        "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "passive"),
    }


def run_ranks(words: Sequence[str], *, world: int) -> int:
    """Run `python -m megafp8 *words` as `world` ranks on this machine; returns the exit code of the first that failed.

    The signals SIGTERM, SIGINT and SIGUSR1 are passed on, SIGHUP as SIGTERM. Ranks that outlive a failed one by
    2 s are killed. If this process is killed, its ranks stop at once: see `keeper`.
    """
    port, threads = free_port(), max(1, (os.cpu_count() or 1) // world)
    lifeline, held = os.pipe()
    # a signal waits until everyone who must know of it can; ranks inherit this and undo it once they listen
    signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)
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

    old = {number: signal.signal(number, forward) for number in PASSED_ON}
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
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
    """Wait for all; once one has failed, end the others. Says which failed first, and returns its code."""
    first: int | None = None
    seen: float | None = None  # when a first rank was gone too early
    while any(process.poll() is None for process in ranks):
        codes, now = [process.poll() for process in ranks], time.monotonic()
        first = _first_failed(codes) if first is None else first
        if seen is None and any(code is not None and code not in _TOGETHER for code in codes):
            seen = now
        if seen is not None and now - seen >= (_HUNG_SECONDS if EXIT_HUNG in codes else _NOTICE_SECONDS):
            for process in ranks:
                if process.poll() is None:
                    process.kill()
        time.sleep(0.05)
    codes = [process.returncode for process in ranks]
    first = _first_failed(codes) if first is None else first
    code = (next((code for code in codes if code), 0) if first is None else codes[first]) or 0
    code = 128 - code if code < 0 else code
    if first is not None and len(ranks) > 1 and code != EXIT_HUNG:  # of a hang, rank 0 has named the rank
        sys.stderr.write(f"megafp8 pretrain: rank {first} failed first, with exit code {code}\n")
    return code


def _first_failed(codes: Sequence[int | None]) -> int | None:
    """The rank that failed by itself, not because another did; None if none has (yet)."""
    failed = [rank for rank, code in enumerate(codes) if code is not None and code not in (*_TOGETHER, EXIT_PEER_LOST)]
    return failed[0] if failed else None
