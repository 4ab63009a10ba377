"""Run a function as several real processes over gloo; a hang ends with every rank's stack, never in silence.

Processes come from a fork server that has imported torch once and computed nothing, so that a test costs
tens of milliseconds a rank, and no thread pool is ever forked.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

# Forking after Apple's frameworks were loaded is unsafe, hence spawn there.
_CONTEXT = multiprocessing.get_context("spawn" if sys.platform == "darwin" else "forkserver")
if sys.platform != "darwin":
    # the builder brings torch._dynamo along, a second in every process otherwise
    _CONTEXT.set_forkserver_preload(["torch.distributed", "megafp8.models.builder", "megafp8.optim.adamw"])

_GRACE_SECONDS = 3.0  # for ranks that wait for one that has failed


def run_ranks(function: Callable[..., Any], world: int, *args: Any, timeout: float = 60.0) -> list[Any]:
    """Call `function(rank, world, *args)` in `world` processes joined by gloo; return their results by rank.

    `function` is a module-level function, its arguments and result can be pickled. At world 1 there is one
    process and no torch.distributed, as in production. Ranks meet through a file: ports cannot collide.

    Raises:
        AssertionError: a rank raised (its traceback is shown), died, or did not end within `timeout` seconds
            (the stacks of all ranks are shown).
    """
    with tempfile.TemporaryDirectory(prefix="megafp8-ranks-") as folder_name:
        folder = Path(folder_name)
        processes = [
            _CONTEXT.Process(
                target=_rank_main, args=(function, rank, world, args, folder, timeout), daemon=True
            )
            for rank in range(world)
        ]
        for process in processes:
            process.start()
        hung = _wait(processes, timeout)
        if hung:
            _dump_stacks(processes)
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join()
        report = _report(processes, folder, hung)
        assert not report, report
        return [pickle.loads((folder / f"{rank}.result").read_bytes()) for rank in range(world)]


def _wait(processes: list[Any], timeout: float) -> list[int]:
    """Wait until all have ended, or the time is up, or one has failed and the others had their grace."""
    end = time.monotonic() + timeout
    while alive := [rank for rank, process in enumerate(processes) if process.is_alive()]:
        if any(process.exitcode not in (0, None) for process in processes):
            end = min(end, time.monotonic() + _GRACE_SECONDS)
        if time.monotonic() > end:
            return alive
        time.sleep(0.005)
    return []


def _dump_stacks(processes: list[Any]) -> None:
    for process in processes:
        if process.is_alive():
            os.kill(process.pid, signal.SIGUSR1)
    time.sleep(0.5)  # faulthandler writes from the signal handler, at once


def _report(processes: list[Any], folder: Path, hung: list[int]) -> str:
    parts = []
    for rank, process in enumerate(processes):
        error, stack = folder / f"{rank}.error", folder / f"{rank}.stack"
        if error.exists():
            parts.append(f"rank {rank} raised:\n{error.read_text()}")
        elif rank in hung:
            text = stack.read_text() if stack.exists() else "(it had not started)"
            parts.append(f"rank {rank} was still running:\n{text}")
        elif process.exitcode != 0:
            parts.append(f"rank {rank} died with exit code {process.exitcode}")
    return "\n".join(parts)


def _rank_main(
    function: Callable[..., Any], rank: int, world: int, args: tuple[Any, ...], folder: Path, timeout: float
) -> None:
    stack = open(folder / f"{rank}.stack", "w")  # noqa: SIM115 - faulthandler needs it open for the process's life
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
    try:
        result = _joined(function, rank, world, args, folder, timeout)
        (folder / f"{rank}.result").write_bytes(pickle.dumps(result))
    except BaseException:
        (folder / f"{rank}.error").write_text(traceback.format_exc())
        os._exit(1)  # no clean-up: it could wait for ranks that will never answer


def _joined(
    function: Callable[..., Any], rank: int, world: int, args: tuple[Any, ...], folder: Path, timeout: float
) -> Any:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if world == 1:
        return function(rank, world, *args)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=2 * timeout),  # the parent's time-out comes first and shows every stack
    )
    result = function(rank, world, *args)
    dist.barrier()  # a rank that leaves early would break what the others still have under way
    dist.destroy_process_group()
    return result
