"""Floor 4: the model, its sizes, its names and its arithmetic. No collective and no precision in this folder.

`build` needs torch and is therefore loaded when it is first asked for; everything else here is light.
"""

from __future__ import annotations

import importlib
from typing import Any

from megafp8.models.config import ModelConfig, check_model
from megafp8.models.families import preset, preset_names

__all__ = ["ModelConfig", "build", "check_model", "preset", "preset_names"]


def __getattr__(name: str) -> Any:
    if name == "build":
        return importlib.import_module("megafp8.models.builder").build
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
