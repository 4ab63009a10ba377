"""The backward pass split in two: input gradients now, weight gradients when a pipeline schedule has time for them.

    B:  loss.backward()                            both at once
    I:  with deferring(store): loss.backward()     input gradients; every linear puts its weight gradient into `store`
    W:  store.run()                                the weight gradients

I and W together give B's bits: the same GEMMs on the same tensors. Norms, biases, embedding and loss are not worth a
split and are computed in I. Source: Qi et al. 2023, "Zero Bubble Pipeline Parallelism", section 2.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

Work = Callable[[], None]


class WeightGrads:
    """Weight gradients of one micro-batch of one stage that wait for their turn."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[Work, Work | None]] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def defer(self, compute: Work, *, prepare: Work | None = None) -> None:
        """Keep `compute` for `run`; `prepare`, if given, starts what it waits for (communication) one turn earlier."""
        self._waiting.append((compute, prepare))

    @torch.no_grad()
    def run(self) -> None:
        """Compute all that wait, in the order in which backward came by, and forget them."""
        if self._waiting:
            _start(self._waiting[0][1])
        while self._waiting:
            compute, _ = self._waiting.popleft()
            if self._waiting:
                _start(self._waiting[0][1])
            compute()


def _start(prepare: Work | None) -> None:
    if prepare is not None:
        prepare()


_stores: list[WeightGrads] = []  # of the module, not of a thread: autograd's backward threads must see it


def current_store() -> WeightGrads | None:
    """Where weight gradients go at the moment; None: they are computed at once."""
    return _stores[-1] if _stores else None


@contextmanager
def deferring(store: WeightGrads) -> Iterator[None]:
    """While open, backward passes of the whole process put the weight gradients of linears into `store`."""
    _stores.append(store)
    try:
        yield
    finally:
        _stores.pop()


def deliver(param: torch.Tensor, grad: torch.Tensor) -> None:
    """Give `param` a gradient (its shape) that did not come through autograd.

    `param.take_grad` (gradient buckets set it) gets it, else it is added to `param.grad`, in the parameter's dtype.
    """
    take = getattr(param, "take_grad", None)
    if take is not None:
        take(grad)
    elif param.grad is None:
        param.grad = grad.to(param.dtype)
    else:
        param.grad += grad
