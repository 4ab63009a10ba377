"""Every collective, plain and as autograd pairs; the only file in which CPU (gloo) and GPU (NCCL) differ.

Facts of gloo that are met here (torch 2.13, measured): it sums bf16 in bf16 with a result that depends on
the element's position, so 16-bit floats are summed in fp32; its reduce-scatter and all-gather are several
times slower than all-to-all plus a local sum in rank order, and than point-to-point into slices; and it
refuses FP8 types except point-to-point.

Each autograd function names its conjugate, the collective of its backward pass:

    copy_to     identity        <->  reduce_from  all-reduce
    gather_from all-gather      <->  scatter_to   reduce-scatter
    split_to    local slice     <->  join_from    all-gather

A collective over an axis of size 1 is the identity.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist

from megafp8.core.waiting import WAITING
from megafp8.parallel.mesh import Mesh

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
_NARROW = (torch.bfloat16, torch.float16)

# Renamed in torch 2.13; the old names still work there but warn.
_library_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_library_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

_GATHER_TAG = 7001  # what travels during a forward pass is not mixed up with what layers exchange

Group = dist.ProcessGroup | None
T = TypeVar("T")
U = TypeVar("U")


def all_reduce_(tensor: torch.Tensor, group: Group, op: str = "sum") -> torch.Tensor:
    """Reduce `tensor` (any shape, contiguous) over `group` in place by "sum", "max" or "min"; return it.

    On a CPU 16-bit floats are summed in fp32 and rounded once.
    """
    if group is None:
        return tensor
    if op == "sum" and tensor.dtype in _NARROW and not _by_library(tensor):
        return _all_reduce_narrow_(tensor, group)
    with WAITING:
        dist.all_reduce(tensor, _OPS[op], group=group)
    return tensor


def _all_reduce_narrow_(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    if tensor.numel() % dist.get_world_size(group):
        wide = tensor.float()
        with WAITING:
            dist.all_reduce(wide, group=group)
        return tensor.copy_(wide)
    # 16 bits on the wire, fp32 in the sum: 1.4 times as fast from a million elements on (measured, 2 ranks).
    flat = tensor.view(-1)
    flat.copy_(all_gather(reduce_scatter(flat, group), group))
    return tensor


def start_all_reduce_(tensor: torch.Tensor, group: Group) -> dist.Work | None:
    """Start summing `tensor` (fp32 or fp64, contiguous) in place; `.wait()` on the result, None if alone."""
    assert tensor.dtype not in _NARROW, "gloo sums 16-bit floats in 16 bits"
    return None if group is None else dist.all_reduce(tensor, group=group, async_op=True)


def broadcast_(tensor: torch.Tensor, group: Group, source: int = 0) -> torch.Tensor:
    """Overwrite `tensor` (contiguous) by that of the group's rank `source`, in place; return it."""
    if group is not None:
        with WAITING:
            dist.broadcast(_as_bytes(tensor), group=group, group_src=source)
    return tensor


class Pending(Generic[T]):
    """A communication under way; `wait` (once) gives its result. Keeps what it reads and writes alive until then."""

    def __init__(self, works: Sequence[dist.Work | None], finish: Callable[[], T], held: Any = None) -> None:
        self._works, self._finish, self._held = works, finish, held

    def wait(self) -> T:
        """The result; on a GPU the current stream waits, not the caller."""
        for work in self._works:
            if work is not None:
                with WAITING:
                    work.wait()
        return self._finish()

    def then(self, function: Callable[[T], U]) -> Pending[U]:
        """`function` of the result, applied by `wait`."""
        return Pending((), lambda: function(self.wait()))


def done(value: T) -> Pending[T]:
    """A result that is there already."""
    return Pending((), lambda: value)


def merge_dicts(mine: dict[str, Any], group: Group) -> dict[str, Any]:
    """The ranks' small dicts as one, in rank order; for what is logged, not for what is computed with."""
    if group is None:
        return mine
    found: list[Any] = [None] * dist.get_world_size(group)
    with WAITING:
        dist.all_gather_object(found, mine, group=group)
    return {key: value for part in found for key, value in part.items()}


def all_gather(tensor: torch.Tensor, group: Group, dim: int = 0) -> torch.Tensor:
    """Concatenate the ranks' equally shaped tensors along `dim`, in rank order; any dtype."""
    return start_all_gather(tensor, group, dim).wait()


def start_all_gather(tensor: torch.Tensor, group: Group, dim: int = 0) -> Pending[torch.Tensor]:
    """Start an `all_gather`; `tensor` must not change before its `wait`."""
    if group is None:
        return done(tensor)
    size, dim = dist.get_world_size(group), dim % tensor.dim()
    source = tensor.contiguous()
    pieces = source.new_empty((size, *source.shape))
    works: list[dist.Work | None]
    if _by_library(source):
        ready = _library_all_gather(_as_bytes(pieces), _as_bytes(source).unsqueeze(0), group=group, async_op=True)
        works = [ready]
    else:
        works = _exchange_pieces(pieces, source, group)

    def finish() -> torch.Tensor:
        if dim == 0:
            return pieces.flatten(0, 1)
        shape = list(source.shape)
        shape[dim] *= size
        return pieces.movedim(0, dim).reshape(shape)

    return Pending(works, finish)


def start_all_gather_(rows: torch.Tensor, group: dist.ProcessGroup) -> Pending[torch.Tensor]:
    """Start filling `rows` [ranks, n] (contiguous, any dtype but FP8), of which each rank has filled its own."""
    own = rows[dist.get_rank(group)]
    if _by_library(rows):
        works: list[dist.Work | None] = [_library_all_gather(rows, own.unsqueeze(0), group=group, async_op=True)]
    else:
        works = _exchange_pieces(rows, own, group, tag=_GATHER_TAG)
    return Pending(works, lambda: rows)


def reduce_scatter(tensor: torch.Tensor, group: Group, dim: int = 0) -> torch.Tensor:
    """Sum the ranks' tensors and return this rank's part of the sum along `dim`, in the tensor's dtype.

    On a CPU the sum is taken in rank order, in fp32 (fp64 for fp64), and rounded once.
    """
    return start_reduce_scatter(tensor, group, dim).wait()


def start_reduce_scatter(tensor: torch.Tensor, group: Group, dim: int = 0) -> Pending[torch.Tensor]:
    """Start a `reduce_scatter`; `tensor` must not change before its `wait`."""
    if group is None:
        return done(tensor)
    size, dim = dist.get_world_size(group), dim % tensor.dim()
    assert tensor.shape[dim] % size == 0, f"dim {dim} of {tuple(tensor.shape)} does not divide by {size} ranks"
    parts = tensor.unflatten(dim, (size, tensor.shape[dim] // size)).movedim(dim, 0).contiguous()
    if _by_library(parts):
        out = torch.empty_like(parts[0])
        work = _library_reduce_scatter(out.unsqueeze(0), parts, group=group, async_op=True)
        return Pending([work], lambda: out, held=parts)
    received = torch.empty_like(parts)
    work = dist.all_to_all_single(received, parts, group=group, async_op=True)
    return Pending([work], lambda: _sum_in_order(received), held=parts)


def start_all_reduce(tensor: torch.Tensor, group: Group) -> Pending[torch.Tensor]:
    """Start summing `tensor` (contiguous; overwritten) over `group`, with the bits of `all_reduce_`."""
    if group is None:
        return done(tensor)
    if tensor.dtype in _NARROW and not _by_library(tensor):
        if tensor.numel() % dist.get_world_size(group):
            return start_all_reduce(tensor.float(), group).then(tensor.copy_)
        flat = tensor.view(-1)
        return start_reduce_scatter(flat, group).then(lambda part: all_gather(part, group).view_as(tensor))
    return Pending([dist.all_reduce(tensor, group=group, async_op=True)], lambda: tensor)


def all_to_all(tensor: torch.Tensor, group: Group, sent: Sequence[int], received: Sequence[int]) -> torch.Tensor:
    """Exchange rows: `sent[i]` of `tensor`, in rank order, go to rank i, which sends `received[i]`; any may be 0.

    Conjugate: itself with the two sizes changed over.
    """
    if group is None:
        return tensor
    out = tensor.new_empty((sum(received), *tensor.shape[1:]))
    source = _as_bytes(tensor.contiguous())
    with WAITING:
        dist.all_to_all_single(_as_bytes(out), source, list(received), list(sent), group=group)
    return out


def all_gather_uneven(tensor: torch.Tensor, group: Group, sizes: Sequence[int]) -> torch.Tensor:
    """Concatenate the ranks' rows, `sizes[i]` from rank i. Conjugate: `reduce_scatter_uneven`."""
    if group is None:
        return tensor
    source = tensor.contiguous()
    out = source.new_empty((sum(sizes), *source.shape[1:]))
    pieces = list(_as_bytes(out).split(list(sizes)))
    if _by_library(source):
        dist.all_gather(pieces, _as_bytes(source), group=group)
    else:
        Pending(_exchange_pieces(pieces, _as_bytes(source), group), lambda: None).wait()
    return out


def reduce_scatter_uneven(tensor: torch.Tensor, group: Group, sizes: Sequence[int]) -> torch.Tensor:
    """Sum the ranks' tensors and return this rank's `sizes[rank]` rows of the sum, in the tensor's dtype.

    Summed in rank order, 16-bit floats in fp32. Conjugate: `all_gather_uneven`.
    """
    if group is None:
        return tensor
    size, mine = dist.get_world_size(group), sizes[dist.get_rank(group)]
    parts = all_to_all(tensor, group, sizes, [mine] * size).view(size, mine, *tensor.shape[1:])
    return _sum_in_order(parts)


def _sum_in_order(parts: torch.Tensor) -> torch.Tensor:
    total = parts[0].float() if parts.dtype in _NARROW else parts[0]
    for piece in parts[1:]:
        total += piece
    return total.to(parts.dtype)


def _by_library(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda  # NCCL's own calls are right and fast


def _exchange_pieces(
    pieces: torch.Tensor | list[torch.Tensor], source: torch.Tensor, group: dist.ProcessGroup, tag: int = 0
) -> list[dist.Work | None]:
    """Start a point-to-point all-gather of `source` into the rows of `pieces`; empty ones do not travel."""
    rank = dist.get_rank(group)
    others = [peer for peer in range(len(pieces)) if peer != rank]
    sources = [peer for peer in others if pieces[peer].numel()]
    works = [dist.irecv(pieces[peer], group=group, group_src=peer, tag=tag) for peer in sources]
    works += [dist.isend(source, group=group, group_dst=peer, tag=tag) for peer in others if source.numel()]
    pieces[rank].copy_(source)
    return works


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    # Collectives that only move data need not know FP8 types, which the libraries refuse.
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor


def _my_slice(tensor: torch.Tensor, mesh: Mesh, axis: str, dim: int) -> torch.Tensor:
    size = mesh.size(axis)
    assert tensor.shape[dim] % size == 0, f"dim {dim} of {tuple(tensor.shape)} does not divide by {axis} {size}"
    step = tensor.shape[dim] // size
    return tensor.narrow(dim, mesh.coord(axis) * step, step).contiguous()


class _CopyTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, mesh: Mesh, axis: str) -> torch.Tensor:
        ctx.group = mesh.group(axis)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return all_reduce_(_fresh(grads[0]), ctx.group), None, None


class _ReduceFrom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, mesh: Mesh, axis: str) -> torch.Tensor:
        return all_reduce_(_fresh(x), mesh.group(axis))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0], None, None


class _GatherFrom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, mesh: Mesh, axis: str, dim: int) -> torch.Tensor:
        ctx.group, ctx.dim = mesh.group(axis), dim
        return all_gather(x, ctx.group, dim)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return reduce_scatter(grads[0], ctx.group, ctx.dim), None, None, None


class _ScatterTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, mesh: Mesh, axis: str, dim: int) -> torch.Tensor:
        ctx.group, ctx.dim = mesh.group(axis), dim
        return reduce_scatter(x, ctx.group, dim)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return all_gather(grads[0], ctx.group, ctx.dim), None, None, None


class _SplitTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, mesh: Mesh, axis: str, dim: int) -> torch.Tensor:
        ctx.group, ctx.dim = mesh.group(axis), dim
        return _my_slice(x, mesh, axis, dim)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return all_gather(grads[0], ctx.group, ctx.dim), None, None, None


class _JoinFrom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, mesh: Mesh, axis: str, dim: int) -> torch.Tensor:
        ctx.mesh, ctx.axis, ctx.dim = mesh, axis, dim
        return all_gather(x, mesh.group(axis), dim)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return _my_slice(grads[0], ctx.mesh, ctx.axis, ctx.dim), None, None, None


def _fresh(tensor: torch.Tensor) -> torch.Tensor:
    # Autograd owns gradients and inputs: never reduce them in place.
    return tensor.clone(memory_format=torch.contiguous_format)


def copy_to(x: torch.Tensor, mesh: Mesh, axis: str) -> torch.Tensor:
    """Enter a region where the ranks of `axis` do different work on the same x. Conjugate: all-reduce."""
    return x if mesh.size(axis) == 1 else _CopyTo.apply(x, mesh, axis)


def reduce_from(x: torch.Tensor, mesh: Mesh, axis: str) -> torch.Tensor:
    """Sum the ranks' partial results; all get the sum. Conjugate: identity."""
    return x if mesh.size(axis) == 1 else _ReduceFrom.apply(x, mesh, axis)


def gather_from(x: torch.Tensor, mesh: Mesh, axis: str, dim: int) -> torch.Tensor:
    """Concatenate shards along `dim` for ranks that go on with different work. Conjugate: reduce-scatter."""
    return x if mesh.size(axis) == 1 else _GatherFrom.apply(x, mesh, axis, dim)


def scatter_to(x: torch.Tensor, mesh: Mesh, axis: str, dim: int) -> torch.Tensor:
    """Sum partial results and keep this rank's shard along `dim`. Conjugate: all-gather."""
    return x if mesh.size(axis) == 1 else _ScatterTo.apply(x, mesh, axis, dim)


def split_to(x: torch.Tensor, mesh: Mesh, axis: str, dim: int) -> torch.Tensor:
    """Keep this rank's shard along `dim` of an x that all ranks hold. Conjugate: all-gather."""
    return x if mesh.size(axis) == 1 else _SplitTo.apply(x, mesh, axis, dim)


def join_from(x: torch.Tensor, mesh: Mesh, axis: str, dim: int) -> torch.Tensor:
    """Concatenate shards along `dim` for ranks that go on with the same work. Conjugate: local slice."""
    return x if mesh.size(axis) == 1 else _JoinFrom.apply(x, mesh, axis, dim)
