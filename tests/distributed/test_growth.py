"""R192: a run of any length keeps its memory, its open files and its threads."""

from __future__ import annotations

import ctypes
import gc
import sys
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist

from megafp8.train.step import train_step
from tests.distributed.ranks import run_ranks
from tests.distributed.small_run import make_parts, run_config

STEPS, WARM_UP, EVERY = 300, 100, 20
# torch.distributed remembers its last calls for a post-mortem, 2000 by default, 1 kB each: filled before we look
REMEMBERED = 2000
_FIELDS = ["arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"]


class _Heap(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in _FIELDS]


def bytes_in_use() -> int:
    """What malloc has given out and not got back; resident memory jumps by megabytes with its arenas."""
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = _Heap
    heap = mallinfo2()
    return int(heap.uordblks + heap.hblkhd)


def samples(rank: int, world: int, sections: dict[str, Any]) -> list[tuple[int, int, int]]:
    """(bytes in use, open files, threads) every so many steps after a warm-up."""
    torch.set_num_threads(1)
    parts, process = make_parts(run_config(**sections), world), psutil.Process()
    for _ in range(REMEMBERED):
        dist.all_reduce(torch.zeros(1))
    found = []
    for step in range(1, STEPS + 1):
        train_step(parts, step, 1e-3)
        if step >= WARM_UP and step % EVERY == 0:
            gc.collect()
            found.append((bytes_in_use(), process.num_fds(), process.num_threads()))
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="mallinfo2 is glibc's")
@pytest.mark.slow
@pytest.mark.parametrize(
    "sections",
    [
        {"parallel": {"pp": 2, "schedule": "zb_v"}, "model": {"num_layers": 4}},
        {"parallel": {"tp": 2}, "precision": {"dtype": "fp32", "recipe": "delayed"},
         "model": {"hidden_size": 64, "ffn_hidden_size": 64, "head_dim": 16}},
        {"parallel": {"dp": 2, "ep": 2, "dp_shard": "optimizer"}, "model": {"moe": {"num_experts": 4}}},
    ],
    ids=["pp2-zb_v", "tp2-fp8", "ep2-optimizer"],
)  # fmt: skip
def test_nothing_grows(sections: dict[str, Any]) -> None:
    for found in run_ranks(samples, 2, sections, timeout=300):
        memory, files, threads = (np.array(column) for column in zip(*found))
        steps = WARM_UP + EVERY * np.arange(len(found))
        slope = np.polyfit(steps, memory, 1)[0]
        assert slope < 1024, f"{slope:.0f} bytes a step: {memory}"
        assert len(set(files[1:])) == len(set(threads[1:])) == 1, (files, threads)
