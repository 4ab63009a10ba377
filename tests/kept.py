"""What a forward pass keeps for its backward pass, measured: storages it made that are alive when it is over."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class _Made(TorchDispatchMode):
    """Remembers every storage that an operation returned, without keeping it alive."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {_storage_of(x) for x in tree_leaves((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor) and x.untyped_storage()._cdata not in known:
                storage = x.untyped_storage()
                self.storages[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return result


def _storage_of(x: Any) -> int | None:
    """Of a tensor, or of a storage that a view is made on (`Tensor.set_`)."""
    if isinstance(x, torch.Tensor):
        return x.untyped_storage()._cdata
    return x._cdata if isinstance(x, torch.UntypedStorage) else None


def kept_bytes(forward: Callable[[], Any]) -> int:
    """Bytes of the storages made in `forward()` that its result keeps alive, the result's own among them.

    Unlike hooks on saved tensors this sees what closures hold, too (recomputation's inputs).
    """
    with _Made() as made:
        result = forward()
    gc.collect()
    total = sum(size for reference, size in made.storages.values() if not reference.expired())
    del result
    return total
