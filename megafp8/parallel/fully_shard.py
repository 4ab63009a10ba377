"""ZeRO-3 through torch's fully_shard: parameters, gradients and optimizer state cut over the replicas.

A unit's parameters are gathered for its forward and backward pass and freed in between; gradients are reduce-scattered
after each backward pass and summed in fp32. The sharded fp32 parameters are the masters. The tensors that are cut are
this rank's own (after tp, pipeline and experts), so every other axis stays as it is.

Source: Zhao et al. 2023, arXiv 2304.11277; torch.distributed.fsdp (FSDP2).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from megafp8.core.layout import layout_of, stamp
from megafp8.parallel.collectives import all_reduce_
from megafp8.parallel.mesh import Mesh

Tensor = torch.Tensor
# (name, this rank's piece to be filled in the master's dtype, the parameter as it was declared, in the compute dtype)
Fill = Callable[[str, nn.Parameter, nn.Parameter], None]


def shard_fully(
    root: nn.Module, units: Iterable[nn.Module], mesh: Mesh, *, device: torch.device | str, fill: Fill
) -> None:
    """Cut every parameter of `root`, which is on meta, over its replicas, and give the pieces memory and values.

    Args:
        units: modules of `root` that are gathered one at a time, each by its forward call; the rest is the root's unit
            and stays whole between forward and backward.
        fill: writes a piece's values, given its `Layout`.
    """
    # A layer's output may be a view; what follows never writes into it, which alone would be wrong.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    declared = dict(root.named_parameters())
    _widen(root)
    for unit in (*units, root):
        for part in (*_with_own_replicas(unit), unit):
            if part is root or any(True for _ in _waiting(part)):
                _fully_shard(part, mesh, device)
    root._apply(lambda t: torch.empty_like(t, device=device) if t.is_meta else t.to(device))
    for name, param in root.named_parameters():
        assert isinstance(param, DTensor)
        stamp(param, layout_of(declared[name]).with_zero(_cut_dim(param)))
        piece = _piece_of(param)
        fill(name, piece, declared[name])


@torch.no_grad()
def _widen(root: nn.Module) -> None:
    """Parameters of 16 bits become fp32 ones: fully_shard computes in a narrower dtype than it stores."""
    for module in root.modules():
        for name, old in list(module._parameters.items()):
            if old is None:
                continue
            wide = torch.promote_types(old.dtype, torch.float32)
            new = nn.Parameter(torch.empty(old.shape, dtype=wide, device="meta"))
            stamp(new, layout_of(old))
            new.compute_dtype = old.dtype  # type: ignore[attr-defined]
            module._parameters[name] = new


def _with_own_replicas(unit: nn.Module) -> list[nn.Module]:
    """Modules inside `unit` whose parameters have other replicas than the dense layers: experts."""
    return [m for m in unit.modules() if m is not unit and any(layout_of(p).is_expert for p in _waiting(m, deep=False))]


def _waiting(module: nn.Module, *, deep: bool = True) -> Iterator[nn.Parameter]:
    return (p for p in module.parameters(recurse=deep) if not isinstance(p, DTensor))


def _fully_shard(module: nn.Module, mesh: Mesh, device: torch.device | str) -> None:
    params = list(_waiting(module))  # none in the root of a pipeline's inner stage, which still guides its layers
    axes = {layout_of(p).data_axes for p in params} or {("dp", "cp")}
    dtypes = {(p.compute_dtype, p.dtype) for p in params}  # type: ignore[attr-defined]
    assert len(axes) == 1 and len(dtypes) <= 1, f"one unit with replicas {axes} and dtypes {dtypes}"
    policy = MixedPrecisionPolicy(cast_forward_inputs=False)
    for compute, stored in dtypes:
        if compute != stored:
            policy = MixedPrecisionPolicy(compute, stored, cast_forward_inputs=False)
    replicas = _device_mesh(mesh, axes.pop(), device)
    parts = replicas.size()

    def placement(param: nn.Parameter) -> Shard:
        return Shard(next((dim for dim, size in enumerate(param.shape) if size % parts == 0), 0))

    fully_shard(module, mesh=replicas, mp_policy=policy, shard_placement_fn=placement)
    assert isinstance(module, FSDPModule)
    # The loss is divided by the targets of the global batch, so that gradients are summed, not averaged.
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)


def _device_mesh(mesh: Mesh, axes: tuple[str, ...], device: torch.device | str) -> DeviceMesh:
    group = mesh.group_of(axes)
    if group is None:  # experts with one replica: torch wants a group all the same
        group = dist.new_group([mesh.rank], use_local_synchronization=True)
    return DeviceMesh.from_group(group, torch.device(device).type)


def _cut_dim(param: DTensor) -> int:
    (placement,) = param.placements
    assert isinstance(placement, Shard)
    return placement.dim


def _piece_of(param: DTensor) -> nn.Parameter:
    """This rank's piece as a plain parameter in the same memory, with its Layout."""
    piece = nn.Parameter(param.to_local().detach())
    stamp(piece, layout_of(param))
    return piece


class ShardedGrads:
    """The gradients of fully sharded parameters; stands for GradBuckets.

    A step is: `zero_()`; backward passes in any order; `finish()`. Then the `main_grad` of each of
    `named_parameters` is its piece of the gradient, summed over micro-batches, over the replicas, and over the axes
    that `grad_sum` of its layout names.

    Args:
        roots: modules that `shard_fully` has cut.

    Attributes:
        named_parameters: this rank's pieces by global name, for optimizer and norm: plain tensors, in the memory of the
            sharded parameters, with the piece's Layout.
    """

    def __init__(self, roots: Sequence[nn.Module], mesh: Mesh) -> None:
        self._roots, self._mesh = roots, mesh
        sharded = {id(p): (name, p) for root in roots for name, p in root.named_parameters()}
        self.named_parameters: list[tuple[str, nn.Parameter]] = []
        groups: dict[tuple[torch.dtype, tuple[str, ...]], list[tuple[DTensor, nn.Parameter]]] = {}
        for name, param in sharded.values():
            assert isinstance(param, DTensor), f"{name} is not fully sharded"
            piece = _piece_of(param)
            self.named_parameters.append((name, piece))
            axes = tuple(axis for axis in layout_of(param).grad_sum if mesh.size(axis) > 1)
            groups.setdefault((param.dtype, axes), []).append((param, piece))
        self._flats = [(_lay_out(members), axes) for (_, axes), members in groups.items()]

    def zero_(self, contributions: int = 1) -> None:
        """Begin a step of `contributions` micro-batches."""
        assert contributions >= 1, f"a step of {contributions} micro-batches"
        for flat, _ in self._flats:
            flat.zero_()

    def finish(self) -> None:
        """End a step; afterwards every `main_grad` is final."""
        for flat, axes in self._flats:
            all_reduce_(flat, self._mesh.group_of(axes))
        for root in self._roots:
            assert isinstance(root, FSDPModule)
            root.reshard()  # an evaluation leaves the root's unit whole


def _lay_out(members: Sequence[tuple[DTensor, nn.Parameter]]) -> Tensor:
    """Gradients of all members side by side; fully_shard adds to a gradient that is there."""
    first = members[0][1]
    flat = torch.zeros(sum(piece.numel() for _, piece in members), dtype=first.dtype, device=first.device)
    parts = flat.split([piece.numel() for _, piece in members])
    for (param, piece), part in zip(members, parts, strict=True):
        grad = part.view(piece.shape)
        piece.main_grad = grad  # type: ignore[attr-defined]
        param.grad = _like(param, grad)
    return flat


def _like(param: Any, local: Tensor) -> DTensor:
    return DTensor.from_local(
        local, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
    )
