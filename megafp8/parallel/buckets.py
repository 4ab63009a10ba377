"""GradBuckets: main gradients in fp32, contiguous, summed over the replicas while backward is still running.

Gradients arrive by a hook on each parameter, or are handed in by `param.take_grad`; the optimizer reads
`param.main_grad`. What a gradient means (which loss, which scale) is not known here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

import torch
import torch.distributed as dist

from megafp8.core.layout import layout_of
from megafp8.core.waiting import WAITING
from megafp8.parallel.collectives import Pending, start_all_reduce_, start_reduce_scatter
from megafp8.parallel.mesh import Mesh
from megafp8.parallel.pieces import Packing, cut, zero_dim

# gloo's throughput falls above 16 MB (measured).
BUCKET_BYTES = 16 << 20
_IN_FLIGHT = 2  # reduce-scatters under way, each with two copies of its bucket


@dataclass(eq=False)
class _Bucket:
    """Parameters whose main gradients lie side by side and are summed over the same ranks in one call.

    With a `packing`, each rank of `group` gets the sum of its pieces only, in `own`, which is part of `flat`; `others`
    are ranks over which the pieces are summed after that.
    """

    names: list[str]
    params: list[torch.nn.Parameter]
    flat: torch.Tensor
    group: dist.ProcessGroup | None
    packing: Packing | None = None
    own: torch.Tensor | None = None
    others: dist.ProcessGroup | None = None
    waiting: set[str] = field(default_factory=set)
    scatter: Pending[torch.Tensor] | None = None
    work: dist.Work | None = None

    def start(self) -> None:
        """Start the reduction."""
        if self.packing is None:
            self.work = start_all_reduce_(self.flat, self.group)
            return
        main_grads = [p.main_grad for p in self.params]  # type: ignore[attr-defined]
        rows = self.packing.rows(main_grads)
        self.packing.pack(main_grads, rows)
        self.scatter = start_reduce_scatter(rows, self.group)

    def settle(self) -> None:
        """Wait for the pieces, free what they travelled in, and sum them over the other ranks."""
        if self.scatter is not None:
            assert self.own is not None
            self.own.copy_(self.scatter.wait().view(-1))
            self.scatter = None
            self.work = start_all_reduce_(self.own, self.others)

    def wait(self) -> None:
        """Wait until the sum is there."""
        self.settle()
        if self.work is not None:
            with WAITING:
                self.work.wait()
            self.work = None


class GradBuckets:
    """The main gradients of all parameters of this rank.

    A step is: `zero_(contributions=micro-batches)`; their backward passes in any order; `finish()`. Then
    `param.main_grad` (local shape, fp32, fp64 for fp64 parameters) is the sum over micro-batches, over the
    replicas (`data_axes` of the parameter's layout) and over the axes that its `grad_sum` names. `param.grad`
    is freed as it arrives. A parameter is complete when `contributions` gradients have come, times
    `param.grad_uses` (default 1) where one micro-batch gives it several. Gradients that do not come through
    autograd, as those of deferred weight-gradient products, are handed to `param.take_grad(grad)`, which
    this class sets. A GEMM that adds to `param.main_grad` itself is put between `param.open_main_grad(overwrites)`
    and `param.close_main_grad()`; `overwrites`: it writes instead, which only a step's first gradient may.

    Buckets fill in backward order and are reduced in one fixed order, the same on all ranks of a pipeline
    stage, each as soon as it and those before it are complete. Weights tied over two stages come last on
    both. So any two ranks start the reductions that they share in one order, whatever the mesh, and none
    waits for another in a circle, also where a library runs collectives of all groups one after the other.
    A parameter that got fewer gradients than announced, or none, is reduced at `finish()`, so ranks that
    used different parameters do not wait for each other for ever.

    With `shard` (ZeRO-1, Rajbhandari et al. 2020) each replica gets the sum of its own pieces only: `own_piece(param)`
    (see `pieces`) is what it updates, and after `finish()` the content of `main_grad` is undefined.

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
        shard: bool = False,
    ) -> None:
        self.events: list[tuple[str, str | int]] = []
        self._next = self._settled = 0  # the bucket whose turn it is; those before this one hold no rows any more
        self._left: dict[str, int] = {}  # gradients still to come
        self._untouched: dict[str, torch.nn.Parameter] = {}
        self._buckets = _make_buckets(_backward_order(named_params), mesh, dtype, bucket_bytes, shard)
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
        assert self._settled == len(self._buckets) or not self._next, "finish() comes before the next zero_()"
        self.events.clear()
        self._next = self._settled = 0
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
            bucket.wait()
        self._settled = self._next
        self.events.append(("finish", 0))

    def _listen(self, number: int, name: str, param: torch.nn.Parameter) -> None:
        def take_grad(grad: torch.Tensor) -> None:
            self._take(number, name, param, grad)

        def hook(_: torch.Tensor) -> None:
            if param.grad is not None:  # else backward left it out: it is deferred, and take_grad will get it
                take_grad(param.grad)
                param.grad = None

        def open_main_grad(overwrites: bool) -> None:
            self._open(number, name, param, overwrites)

        def close_main_grad() -> None:
            self._close(number, name)

        param.take_grad = take_grad  # type: ignore[attr-defined]
        param.open_main_grad = open_main_grad  # type: ignore[attr-defined]
        param.close_main_grad = close_main_grad  # type: ignore[attr-defined]
        param.register_post_accumulate_grad_hook(hook)

    @torch.no_grad()
    def _take(self, number: int, name: str, param: torch.nn.Parameter, grad: torch.Tensor) -> None:
        self._check(number, name, param)
        main_grad: torch.Tensor = param.main_grad  # type: ignore[attr-defined]
        if self._untouched.pop(name, None) is not None:
            main_grad.copy_(grad.reshape(main_grad.shape))
        else:
            main_grad.add_(grad.reshape(main_grad.shape))
        self._close(number, name)

    @torch.no_grad()
    def _open(self, number: int, name: str, param: torch.nn.Parameter, overwrites: bool) -> None:
        self._check(number, name, param)
        untouched = self._untouched.pop(name, None) is not None
        assert untouched or not overwrites, f"{name}: a gradient would overwrite those of earlier micro-batches"
        if untouched and not overwrites:
            param.main_grad.zero_()  # type: ignore[attr-defined]

    def _check(self, number: int, name: str, param: torch.nn.Parameter) -> None:
        assert self._left[name] > 0 and self._next <= number, f"{name} got more gradients than were announced"
        assert not getattr(param, "is_stale", False), f"{name} was used before its pieces were gathered"

    def _close(self, number: int, name: str) -> None:
        self._left[name] -= 1
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
        while self._settled <= self._next - _IN_FLIGHT:
            self._buckets[self._settled].settle()
            self._settled += 1
        bucket.start()
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


@dataclass(frozen=True)
class _Kind:
    """What the parameters of a bucket have in common; axes are those larger than 1."""

    dtype: torch.dtype
    replicas: tuple[str, ...]
    partial: tuple[str, ...]
    sharded: bool

    @staticmethod
    def of(param: torch.Tensor, mesh: Mesh, dtype: torch.dtype, shard: bool) -> _Kind:
        layout = layout_of(param)
        replicas, partial = (
            tuple(axis for axis in axes if mesh.size(axis) > 1) for axes in (layout.data_axes, layout.grad_sum)
        )
        sharded = shard and zero_dim(param.shape, prod(mesh.size(axis) for axis in replicas)) is not None
        wide = torch.float64 if param.dtype == torch.float64 else dtype
        return _Kind(wide, replicas, partial, sharded)


def _make_buckets(
    ordered: list[tuple[str, torch.nn.Parameter]], mesh: Mesh, dtype: torch.dtype, bucket_bytes: int, shard: bool
) -> list[_Bucket]:
    """Cut the parameters of each kind into buckets; order them by when they are full.

    Those that link two pipeline stages stand last.
    """
    kinds: dict[_Kind, list[list[int]]] = {}
    room: dict[_Kind, int] = {}
    for position, (_, param) in enumerate(ordered):
        kind = _Kind.of(param, mesh, dtype, shard)
        needed, runs = param.numel() * kind.dtype.itemsize, kinds.setdefault(kind, [])
        alone = kind.sharded and needed * 8 >= bucket_bytes  # then it travels without a copy, mostly
        if alone or room.get(kind, 0) < needed:
            runs.append([])
            room[kind] = bucket_bytes
        runs[-1].append(position)
        room[kind] = 0 if alone else room[kind] - needed
    runs_of = [(positions, kind) for kind, runs in kinds.items() for positions in runs]
    runs_of.sort(key=lambda item: ("embedding" in item[1].partial, item[0][-1]))
    return [_fill([ordered[i] for i in positions], mesh, kind) for positions, kind in runs_of]


def _fill(members: list[tuple[str, torch.nn.Parameter]], mesh: Mesh, kind: _Kind) -> _Bucket:
    names, params = [name for name, _ in members], [param for _, param in members]
    flat = torch.zeros(sum(p.numel() for p in params), dtype=kind.dtype, device=params[0].device)
    for param, part in zip(params, flat.split([p.numel() for p in params]), strict=True):
        param.main_grad = part.view(param.shape)  # type: ignore[attr-defined]
    if not kind.sharded:
        return _Bucket(names, params, flat, mesh.group_of(kind.replicas + kind.partial))
    rank, parts = mesh.place(kind.replicas)
    packing = Packing([tuple(p.shape) for p in params], parts)
    # The sum goes where the main gradients were, which nobody needs once they are on their way.
    first = rank * packing.width if packing.in_place else 0
    own = flat[first : first + packing.width]
    for param, grad in zip(params, packing.pieces(own, rank), strict=True):
        cut(param, grad, mesh)
    return _Bucket(names, params, flat, mesh.group_of(kind.replicas), packing, own, mesh.group_of(kind.partial))
