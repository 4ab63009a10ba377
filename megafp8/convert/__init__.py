"""Floor 6: our checkpoints to foreign formats and back, one file a format, each verified by what it wrote."""

import importlib
from typing import Any

__all__ = ["from_hf", "to_hf"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module("megafp8.convert.hf"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
