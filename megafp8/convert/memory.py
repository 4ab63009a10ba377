"""Whether a verification fits in memory, told before anything is written: it runs the whole model, more than once."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megafp8.core.errors import ResourceError
from megafp8.infer.weights import weight_shapes
from megafp8.models import ModelConfig

# Bytes a parameter, measured (docs/convert.md): the weights as they are stored, and our model in fp64 over them; for
# quantized ones also what they decode to, in fp32, and where readers store them one after the other, joined.
OF_WEIGHTS = 12.5
OF_QUANTIZED = 17.5
_CGROUP = Path("/sys/fs/cgroup")


def check_memory(config: ModelConfig, bytes_each: float, say: Callable[[str], Any]) -> None:
    """Say how much memory the verification of such a model takes.

    Raises:
        ResourceError: less is free.
    """
    need = bytes_each * sum(math.prod(shape) for shape in weight_shapes(config).values())
    free = free_memory()
    if free is not None and need > free:
        raise ResourceError(
            f"verification runs the whole model, which takes about {need / 1e9:.1f} GB of memory; {free / 1e9:.1f} GB "
            "are free: convert on a machine with more, or with --no-verify, which needs twice the largest tensors"
        )
    if need > 1e9:
        say(f"verification will take about {need / 1e9:.1f} GB of memory; the conversion itself takes far less")


def free_memory() -> int | None:
    """Bytes that a process can still take, by the machine and by its control group; None: not known."""
    found = []
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        found += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
        limit, used = ((_CGROUP / f"memory.{name}").read_text(encoding="ascii").strip() for name in ("max", "current"))
        if limit != "max":
            found.append(max(0, int(limit) - int(used)))
    except (OSError, ValueError):  # another system, or no control group
        pass
    return min(found, default=None)
