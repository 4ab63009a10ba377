"""Activation recompute: what the backward pass needs is made again instead of kept, by the same functions: same bits.

full: a layer keeps its inputs only. selective: the outputs of norms and activations, which are cheap to make from
tensors that are kept anyway, are dropped (the inputs of the linears behind them).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch.utils.checkpoint import checkpoint

Recompute = Literal["none", "selective", "full"]
Rebuild = Callable[[], torch.Tensor]


@contextmanager
def rebuilt(tensor: torch.Tensor, rebuild: Rebuild | None) -> Iterator[None]:
    """While open, whoever saves `tensor` (or a view of all of it) for backward saves `rebuild` in its place.

    `rebuild` must give the tensor again, bit for bit. None: everything is saved as usual.
    """
    if rebuild is None:
        yield
        return
    place, size = tensor.data_ptr(), tensor.numel()

    def pack(saved: torch.Tensor) -> Any:
        if saved.data_ptr() == place and saved.numel() == size and saved.is_contiguous():
            shape = saved.shape
            return lambda: rebuild().view(shape)
        return saved

    def unpack(packed: Any) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        with torch.no_grad():
            result: torch.Tensor = packed()
        return result

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


def checkpointed(function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)`, of which only the inputs are kept. Layers draw no random state: dropout is by place."""
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)
