"""Floor 2: checkpoints. Knows Layout and torch.distributed.checkpoint's planners, not models, not FP8.

The functions that need torch are fetched when first named, so that a dry run can read CheckpointConfig without it.
"""

import importlib
from typing import TYPE_CHECKING, Any

from megafp8.checkpoint.config import CheckpointConfig
from megafp8.checkpoint.folders import find, latest, verify
from megafp8.checkpoint.retention import prune

if TYPE_CHECKING:
    from megafp8.checkpoint.read import (
        TensorReader,
        iterate_tensors,
        load,
        load_newest,
        load_tensors,
        read_meta,
        tensor_names,
        tensor_shapes,
    )
    from megafp8.checkpoint.write import save

__all__ = [
    "CheckpointConfig", "TensorReader", "find", "iterate_tensors", "latest", "load", "load_newest", "load_tensors",
    "prune", "read_meta", "save", "tensor_names", "tensor_shapes", "verify",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module(f"{__name__}.{'write' if name == 'save' else 'read'}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
