"""Whether a verification fits in memory, told before anything is written: it runs the model layer by layer."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megafp8.core.errors import ResourceError
from megafp8.infer.weights import weight_shapes
from megafp8.models import ModelConfig

_OF_PART = 12.5  # bytes a parameter of the largest layer, measured (docs/convert.md): as stored, and in fp64 over that
OF_RANKS = 4.0  # bytes a parameter of the whole, which the reader of native checkpoints holds: as stored, and joined
_CGROUP = Path("/sys/fs/cgroup")


def check_memory(config: ModelConfig, say: Callable[[str], Any], *, whole: float = 0.0) -> None:
    """Say how much memory the verification of such a model takes.

    Args:
        whole: bytes a parameter that are held of the whole model.

    Raises:
        ResourceError: less is free.
    """
    parts: Counter[str] = Counter()
    for name, shape in weight_shapes(config).items():
        parts[".".join(name.split(".")[:2]) if name.startswith("layers.") else ""] += math.prod(shape)
    need = _OF_PART * (parts.pop("") + max(parts.values())) + whole * parts.total()  # the ends run with a layer
    free = free_memory()
    if free is not None and need > free:
        raise ResourceError(
            f"verification runs the model layer by layer, which takes about {need / 1e9:.1f} GB of memory; "
            f"{free / 1e9:.1f} GB are free: convert on a machine with more, or with --no-verify, which needs less"
        )
    if need > 1e9:
        say(f"verification will take about {need / 1e9:.1f} GB of memory; the conversion itself takes far less")


def free_memory() -> int | None:
    """Bytes that a process can still take, by the machine and by its control group; None: not known."""
    found = []
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        found += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
        limit, used, stat = ((_CGROUP / f"memory.{name}").read_text(encoding="ascii").strip()
                             for name in ("max", "current", "stat"))  # fmt: skip
        if limit != "max":  # pages of files count as used, and go when their place is needed
            values = dict(line.split() for line in stat.splitlines())
            files = int(values["inactive_file"]) + int(values["active_file"])
            found.append(max(0, int(limit) - int(used) + files))
    except (OSError, ValueError, KeyError):  # another system, or no control group
        pass
    return min(found, default=None)
