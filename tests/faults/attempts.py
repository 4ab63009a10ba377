"""Ranks of a real run, forked from a process that has imported torch already: an attempt costs a second, not five.

What is left out is the keeper around each rank and the launcher around all; `tests/unit/train/test_keeper.py` and
`tests/journeys` try those. Faults are ordered by the switch of `megafp8.core.faults`.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from megafp8.core import faults
from megafp8.core.errors import MegaError
from megafp8.core.heartbeat import HEART
from megafp8.train.local_ranks import free_port

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    ["torch.distributed", "megafp8.models.builder", "megafp8.optim.adamw", "megafp8.train.loop"]
)

forks = pytest.mark.skipif(sys.platform == "darwin", reason="fork after torch is unsafe there")


@dataclass(frozen=True)
class Ended:
    """An attempt's exit codes by rank (negative: the signal), what all said, seconds from the first end to the last."""

    codes: list[int]
    said: str
    seconds: float


def attempt(
    config: Path, world: int, words: Sequence[str] = (), *, orders: str = "", folder: Path | None = None,
    within: Callable[[int], None] | None = None, timeout: float = 60.0,
) -> Ended:  # fmt: skip
    """Run all ranks until they have ended; those that outlive a failed one by 5 s are killed and count as -9.

    Args:
        orders: faults; `folder` makes each fire once over all attempts and keeps traces.
        within: called in each rank's process before it begins, with the rank; module-level.
    """
    port, said = free_port(), config.parent / "said"
    said.mkdir(exist_ok=True)
    env = {faults.SWITCH: orders, **({faults.FOLDER: str(folder)} if folder else {})}
    if folder is not None:
        folder.mkdir(exist_ok=True)
    ranks = [
        _CONTEXT.Process(target=_rank, args=(str(config), list(words), rank, world, port, env, str(said), within))
        for rank in range(world)
    ]
    for process in ranks:
        process.start()
    end, first = time.monotonic() + timeout, 0.0
    while any(process.is_alive() for process in ranks):
        if not first and any(process.exitcode is not None for process in ranks):
            first = time.monotonic()
        if any(process.exitcode for process in ranks):
            end = min(end, first + 5.0)
        if time.monotonic() > end:
            for process in ranks:
                process.kill()
        time.sleep(0.01)
    seconds = time.monotonic() - first
    text = "".join((said / f"{rank}.txt").read_text() for rank in range(world) if (said / f"{rank}.txt").exists())
    return Ended([process.exitcode for process in ranks], text, seconds)


def _rank(
    config: str, words: list[str], rank: int, world: int, port: int, env: dict[str, str], said: str,
    within: Callable[[int], None] | None,
) -> None:  # fmt: skip
    os.dup2(os.open(f"{said}/{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o640), 2)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    os.environ |= {
        **env, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    if world == 1:
        for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK"):
            del os.environ[name]
        os.environ["SLURM_PROCID"] = os.environ.pop("RANK")
    HEART.__init__()  # type: ignore[misc]  # what a fork shares would be one for all ranks
    faults.order(os.environ)
    import torch

    from megafp8.cli.pretrain_rank import be_a_rank

    torch.set_num_threads(1)
    if within is not None:
        within(rank)
    try:
        code = be_a_rank(config, words, debug=False)
    except MegaError as error:
        print(f"megafp8 pretrain: error: {error}", file=sys.stderr)
        code = error.exit_code
    sys.stderr.flush()
    os._exit(code)
