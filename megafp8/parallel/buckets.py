"""GradBuckets: main gradients in fp32, contiguous, summed over the replicas while backward is still running.

Gradients arrive by a hook on each parameter, or are handed in by `param.take_grad`; the optimizer reads
`param.main_grad`. What a gradient means (which loss, which scale) is not known here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from megafp8.core.layout import Layout, layout_of
from megafp8.parallel.collectives import start_all_reduce_
from megafp8.parallel.mesh import Mesh

# gloo's throughput falls above 16 MB (measured).
BUCKET_BYTES = 16 << 20


@dataclass(eq=False)
class _Bucket:
    """Parameters whose main gradients lie side by side and are summed over the same ranks in one call."""

    names: list[str]
    params: list[torch.nn.Parameter]
    flat: torch.Tensor
    group: dist.ProcessGroup | None
    waiting: set[str] = field(default_factory=set)
    work: dist.Work | None = None


class GradBuckets:
    """The main gradients of all parameters of this rank.

    A step is: `zero_(contributions=micro-batches)`; their backward passes in any order; `finish()`. Then
    `param.main_grad` (local shape, fp32, fp64 for fp64 parameters) is the sum over micro-batches, over the
    replicas (`data_axes` of the parameter's layout) and over the axes that its `grad_sum` names. `param.grad`
    is freed as it arrives. A parameter is complete when `contributions` gradients have come, times
    `param.grad_uses` (default 1) where one micro-batch gives it several. Gradients that do not come through
    autograd, as those of deferred weight-gradient products, are handed to `param.take_grad(grad)`, which
    this class sets.

    Buckets fill in backward order and are reduced in one fixed order, the same on all ranks of a pipeline
    stage, each as soon as it and those before it are complete. Weights tied over two stages come last on
    both. So any two ranks start the reductions that they share in one order, whatever the mesh, and none
    waits for another in a circle, also where a library runs collectives of all groups one after the other.
    A parameter that got fewer gradients than announced, or none, is reduced at `finish()`, so ranks that
    used different parameters do not wait for each other for ever.

    Attributes:
        events: since `zero_()`: ("gradient", parameter name), ("reduce", bucket number), ("finish", 0) in
        order.
    """

    def __init__(
        self,
        named_params: Sequence[tuple[str, torch.nn.Parameter]],
        mesh: Mesh,
        *,
        dtype: torch.dtype = torch.float32,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self.events: list[tuple[str, str | int]] = []
        self._next = 0  # the bucket whose turn it is
        self._left: dict[str, int] = {}  # gradients still to come
        self._untouched: dict[str, torch.nn.Parameter] = {}
        self._buckets = _make_buckets(_backward_order(named_params), mesh, dtype, bucket_bytes)
        for number, bucket in enumerate(self._buckets):
            for name, param in zip(bucket.names, bucket.params, strict=True):
                self._listen(number, name, param)
        self.zero_()

    @property
    def num_buckets(self) -> int:
        """How many reductions a step makes."""
        return len(self._buckets)

    def zero_(self, contributions: int = 1) -> None:
        """Begin a step of `contributions` micro-batches; their gradients overwrite what is there.

        Nothing is written now.
        """
        assert contributions >= 1, f"a step of {contributions} micro-batches"
        assert all(bucket.work is None for bucket in self._buckets), "finish() comes before the next zero_()"
        self.events.clear()
        self._next = 0
        for bucket in self._buckets:
            bucket.waiting = set(bucket.names)
            for name, param in zip(bucket.names, bucket.params, strict=True):
                self._left[name] = contributions * getattr(param, "grad_uses", 1)
                self._untouched[name] = param

    def finish(self) -> None:
        """End a step: reduce what is left, wait for all; afterwards every `param.main_grad` is final."""
        while self._next < len(self._buckets):
            self._reduce_next()
        for bucket in self._buckets:
            if bucket.work is not None:
                bucket.work.wait()
                bucket.work = None
        self.events.append(("finish", 0))

    def _listen(self, number: int, name: str, param: torch.nn.Parameter) -> None:
        def take_grad(grad: torch.Tensor) -> None:
            self._take(number, name, param, grad)

        def hook(_: torch.Tensor) -> None:
            if param.grad is not None:  # else backward left it out: it is deferred, and handed to take_grad
                take_grad(param.grad)
                param.grad = None

        param.take_grad = take_grad  # type: ignore[attr-defined]
        param.register_post_accumulate_grad_hook(hook)

    @torch.no_grad()
    def _take(self, number: int, name: str, param: torch.nn.Parameter, grad: torch.Tensor) -> None:
        assert self._left[name] > 0 and self._next <= number, f"{name} got more gradients than were announced"
        self._left[name] -= 1
        main_grad: torch.Tensor = param.main_grad  # type: ignore[attr-defined]
        if self._untouched.pop(name, None) is not None:
            main_grad.copy_(grad.reshape(main_grad.shape))
        else:
            main_grad.add_(grad.reshape(main_grad.shape))
        self.events.append(("gradient", name))
        if self._left[name] == 0:
            self._buckets[number].waiting.discard(name)
            while self._next < len(self._buckets) and not self._buckets[self._next].waiting:
                self._reduce_next()

    def _reduce_next(self) -> None:
        bucket = self._buckets[self._next]
        for name, param in zip(bucket.names, bucket.params, strict=True):
            if self._untouched.pop(name, None) is not None:
                param.main_grad.zero_()  # type: ignore[attr-defined]
        self.events.append(("reduce", self._next))
        bucket.work = start_all_reduce_(bucket.flat, bucket.group)
        self._next += 1


def _backward_order(
    named_params: Sequence[tuple[str, torch.nn.Parameter]],
) -> list[tuple[str, torch.nn.Parameter]]:
    """Last used first; a parameter tied to two names stands at its first use, where backward ends with it."""
    once: dict[int, tuple[str, torch.nn.Parameter]] = {}
    for name, param in named_params:
        if param.requires_grad:
            once.setdefault(id(param), (name, param))
    return list(once.values())[::-1]


def _sum_axes(layout: Layout, mesh: Mesh) -> tuple[str, ...]:
    return tuple(axis for axis in (*layout.data_axes, *layout.grad_sum) if mesh.size(axis) > 1)


def _make_buckets(
    ordered: list[tuple[str, torch.nn.Parameter]], mesh: Mesh, dtype: torch.dtype, bucket_bytes: int
) -> list[_Bucket]:
    """Cut the parameters of each (dtype, axes to sum over) into buckets; order them by when they are full.

    Those that link two pipeline stages stand last.
    """
    kinds: dict[tuple[torch.dtype, tuple[str, ...]], list[list[int]]] = {}
    room: dict[tuple[torch.dtype, tuple[str, ...]], int] = {}
    for position, (_, param) in enumerate(ordered):
        kind = (torch.float64 if param.dtype == torch.float64 else dtype, _sum_axes(layout_of(param), mesh))
        needed = param.numel() * kind[0].itemsize
        runs = kinds.setdefault(kind, [])
        if room.get(kind, 0) < needed:
            runs.append([])
            room[kind] = bucket_bytes
        runs[-1].append(position)
        room[kind] -= needed
    cut = [(positions, kind) for kind, runs in kinds.items() for positions in runs]
    cut.sort(key=lambda item: ("embedding" in item[1][1], item[0][-1]))
    return [_fill([ordered[i] for i in positions], mesh, *kind) for positions, kind in cut]


def _fill(
    members: list[tuple[str, torch.nn.Parameter]], mesh: Mesh, dtype: torch.dtype, axes: tuple[str, ...]
) -> _Bucket:
    names, params = [name for name, _ in members], [param for _, param in members]
    flat = torch.zeros(sum(p.numel() for p in params), dtype=dtype, device=params[0].device)
    for param, part in zip(params, flat.split([p.numel() for p in params]), strict=True):
        param.main_grad = part.view(param.shape)  # type: ignore[attr-defined]
    return _Bucket(names, params, flat, mesh.group_of(axes))
