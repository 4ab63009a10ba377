"""Floor 6: a run. setup shows what exists, step what a step is, loop what happens around it.

What needs torch is fetched when it is first named, so that a dry run stays light.
"""

import importlib
from typing import TYPE_CHECKING, Any

from megafp8.train.config import RunConfig, load_run_config

if TYPE_CHECKING:
    from megafp8.train.loop import RunResult, train

__all__ = ["RunConfig", "RunResult", "load_run_config", "train"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module("megafp8.train.loop"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
