"""One rank of `megafp8 pretrain`: from its arguments to its exit code, with one line for whatever ends it."""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Sequence

from megafp8.core.errors import (
    EXIT_INTERNAL,
    EXIT_PEER_LOST,
    CorruptionError,
    MegaError,
    NumericsError,
    ResourceError,
)
from megafp8.core.heartbeat import HEART

# what gloo, NCCL and the store say when a peer is gone
_PEER_GONE = (
    "closed by peer", "Connection reset", "Broken pipe", "Connection closed", "connection was likely closed",
    "failed to recv", "Failed to recv", "remote process has exited", "ncclRemoteError", "Timed out waiting",
)  # fmt: skip
_NO_MEMORY = ("can't allocate memory", "out of memory", "bad_alloc", "Cannot allocate memory")


def be_a_rank(path: str, overrides: Sequence[str], *, debug: bool) -> int:
    """Train as one rank; returns its exit code.

    Raises:
        MegaError: what a user can mend; it names the rank unless it is 0, whose errors are mostly those of all.
    """
    rank = int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")))
    try:
        return _train(path, overrides, rank)
    except MegaError as error:
        if rank == 0:
            raise
        # What all ranks find alike, rank 0 says, and the launcher ends this one before it wakes.
        alike = isinstance(error, (NumericsError, CorruptionError)) or HEART.last.section in ("start", "setup")
        time.sleep(10 if alike else 1)
        raise type(error)(f"rank {rank}: {error}") from error
    except Exception as error:
        if debug:
            raise
        return _explain(error, rank)


def _train(path: str, overrides: Sequence[str], rank: int) -> int:
    from megafp8.train.config import load_run_config, section_limits

    config = load_run_config(path, overrides)
    HEART.tell(
        limits=section_limits(config), folder=str(config.dir.absolute()), stop_signals=config.guard.stop_signals,
    )  # fmt: skip
    from megafp8.core import log
    from megafp8.train.loop import train

    log.set_up(rank=rank)
    open_foreign = None
    if config.checkpoint.load_from:  # how a foreign folder is read, where one may have to be
        from megafp8.convert.source import HuggingFaceFolder

        open_foreign = HuggingFaceFolder
    return train(config, open_foreign).exit_code


def _explain(error: Exception, rank: int) -> int:
    """One line for an error that no code raised on purpose, and its traceback where it is this rank's own."""
    text, where = str(error), f"{HEART.last.section} (step {HEART.last.step})"
    if any(part in text for part in _PEER_GONE):
        # the peer has said why; this rank only adds that its connection is gone
        print(f"megafp8 pretrain: rank {rank}: lost its peer in {where}, stopping", file=sys.stderr)
        return EXIT_PEER_LOST
    if isinstance(error, MemoryError) or any(part in text for part in _NO_MEMORY):
        first = (text.splitlines() or [type(error).__name__])[0]
        raise ResourceError(
            f"rank {rank}: out of memory in {where}: {first}; lower train.micro_batch, raise parallel sizes or set "
            "train.recompute"
        ) from error
    traceback.print_exception(error)
    print(f"megafp8 pretrain: rank {rank}: internal error in {where}: {type(error).__name__}: {text}", file=sys.stderr)
    return EXIT_INTERNAL
