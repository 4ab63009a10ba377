"""Where a value that is not finite came from: the failed step is run again, with every tensor looked at.

Steps in order pay nothing. After a step whose loss or gradient norm is not finite, all ranks run its micro-batches once
more, from the state in which it began and without an update, with hooks on every module: on its parameters, inputs and
outputs in the forward pass, on their gradients in the backward pass. A step is deterministic, so that what went wrong
goes wrong again; what does not come back was a fault of the machine, and is said to be one. The first finding of the
model wins: forward before backward, an earlier micro-batch before a later one, then the order in which the model
computes. Ranks that share a tensor compute it alike, so that the one where it broke is ahead of those that it reached
by communication.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from megafp8.parallel.collectives import merge_dicts
from megafp8.parallel.mesh import Mesh
from megafp8.parallel.mesh_config import RANK_ORDER
from megafp8.parallel.pieces import own_piece

Tensor = torch.Tensor
NamedParameters = list[tuple[str, nn.Parameter]]
_PASSES = ("forward", "backward", "after the backward passes")


@dataclass(frozen=True)
class Finding:
    """The first tensor of a step that was not finite.

    Attributes:
        module, tensor: global name; and "input", "output", a parameter's name, "grad_output", "grad_input" (the
            gradients of its output and input), or "<parameter> gradient".
        when: "forward", "backward", or "after the backward passes", when gradients have been summed over ranks.
        rank, ranks: the first of the ranks where it was so, and all of them.
        num_nan, num_inf, num_values: of the tensor on that rank.
        micro_batch: number within the step on that rank; -1 after the backward passes.
    """

    module: str
    tensor: str
    when: str
    rank: int
    ranks: tuple[int, ...]
    num_nan: int
    num_inf: int
    num_values: int
    micro_batch: int

    def __str__(self) -> str:
        where = f", micro-batch {self.micro_batch}" if self.micro_batch >= 0 else ""
        others = [str(rank) for rank in self.ranks if rank != self.rank]
        also = f" (and {', '.join(others[:8])}{f' and {len(others) - 8} more' if len(others) > 8 else ''})"
        return (
            f"first not finite: {self.tensor} of {self.module}, {self.when}{where}, rank {self.rank}"
            f"{also if others else ''}: {self.num_nan} NaN and {self.num_inf} infinite of {self.num_values} values"
        )

    def fields(self) -> dict[str, Any]:
        """For a record of metrics.jsonl."""
        return asdict(self)


@dataclass(frozen=True)
class _Seen:
    """A finding of this rank; `key` orders those of all ranks."""

    key: tuple[int, ...]
    finding: Finding


class Watch:
    """Looks at the tensors of a step's passes while `attached`; keeps the first that is not finite.

    Args:
        stages: this rank's by number; modules bear global names.
    """

    def __init__(self, stages: Mapping[int, nn.Module], named_parameters: NamedParameters, rank: int) -> None:
        self._stages, self._named, self._rank = stages, named_parameters, rank
        self._first: _Seen | None = None
        self._handles: list[Any] = []
        self._listening: set[int] = set()  # parameters whose gradient is watched
        self._stage = self._micro_batch = self._forwards = self._backwards = 0
        self._turn: tuple[int, int] | None = None  # (stage, micro-batch) of the backward pass
        self._gradient: Tensor | None = None  # the one that was found, and the modules that it came from
        self._users: list[str] = []
        self._makers: list[str] = []

    def begin(self, stage: int, micro_batch: int) -> None:
        """A forward pass begins."""
        self._stage, self._micro_batch, self._forwards = stage, micro_batch, 0

    def attach(self) -> None:
        """Put the hooks on."""
        for stage in self._stages.values():
            for name, module in stage.named_modules():
                if name:
                    enter = partial(self._enter, name)
                    self._handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
                    self._handles.append(module.register_forward_hook(partial(self._leave, name)))
        for name, param in self._named:
            take = getattr(param, "take_grad", None)
            if take is not None:  # how gradients come that a schedule computes apart from the backward pass
                param.take_grad = partial(self._taken, name, take)  # type: ignore[attr-defined]

    def detach(self) -> None:
        """Take them off again; nothing of them stays."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for _, param in self._named:
            take = getattr(param, "take_grad", None)
            if isinstance(take, partial) and take.func == self._taken:
                param.take_grad = take.args[1]  # type: ignore[attr-defined]
        self._gradient = None

    def look_at_sums(self) -> None:
        """After the passes: the gradients as the optimizer would read them, last layers first."""
        for number, (name, param) in enumerate(reversed(self._named)):
            module, _, last = name.rpartition(".")
            self._check((2, 0, number), module, f"{last} gradient", own_piece(param).grad, -1)

    @property
    def first(self) -> _Seen | None:
        """What was found; a gradient is that of the input of the module that made it, where it is one alone.

        Modules that only hand a tensor on (a dropout of 0) make none.
        """
        seen, users = self._first, [name for name in self._users if name not in self._makers]
        if seen is None or not users or not all(f"{users[-1]}.".startswith(f"{user}.") for user in users):
            return seen
        return replace(seen, finding=replace(seen.finding, module=users[-1], tensor="grad_input"))

    def _enter(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        for last, param in module.named_parameters(recurse=False):
            # still in pieces, gathered by a module further in; or without values, as its layer has codes
            if isinstance(param, DTensor) or getattr(param, "in_codes", False):
                continue
            self._forward(name, last, param.detach())
            if param.requires_grad and torch.is_grad_enabled() and id(param) not in self._listening:
                self._listening.add(id(param))
                self._handles.append(param.register_hook(partial(self._param_gradient, name, last)))
        for tensor in _tensors((args, tuple(kwargs.values()))):
            self._forward(name, "input", tensor.detach())
            self._listen(tensor, name, "grad_input")

    def _leave(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        for tensor in _tensors(output):
            self._forward(name, "output", tensor.detach())
            self._listen(tensor, name, "grad_output")

    def _forward(self, name: str, what: str, tensor: Tensor) -> None:
        self._forwards += 1
        self._check((0, self._micro_batch, self._stage, self._forwards), name, what, tensor, self._micro_batch)

    def _listen(self, tensor: Tensor, name: str, what: str) -> None:
        if tensor.requires_grad:
            tensor.register_hook(partial(self._gradient_of, (self._stage, self._micro_batch), name, what))

    def _gradient_of(self, turn: tuple[int, int], name: str, what: str, gradient: Tensor) -> None:
        if turn != self._turn:
            self._turn, self._backwards = turn, 0
        # a tensor is the output of one module and the input of others
        if gradient is not self._gradient and self._backward(name, what, gradient):
            self._gradient, self._users, self._makers = gradient, [], []
        if gradient is self._gradient:
            (self._users if what == "grad_input" else self._makers).append(name)

    def _param_gradient(self, module: str, last: str, gradient: Tensor | None) -> None:
        # None: a schedule takes it apart from the backward pass, see `_taken`
        if gradient is not None and self._backward(module, f"{last} gradient", gradient):
            self._gradient, self._users = None, []

    def _taken(self, name: str, take: Callable[[Tensor], None], gradient: Tensor) -> None:
        module, _, last = name.rpartition(".")
        self._param_gradient(module, last, gradient)
        take(gradient)

    def _backward(self, name: str, what: str, gradient: Tensor) -> bool:
        self._backwards += 1
        stage, micro_batch = self._turn or (self._stage, self._micro_batch)
        return self._check((1, micro_batch, -stage, self._backwards), name, what, gradient, micro_batch)

    def _check(self, key: tuple[int, ...], module: str, what: str, tensor: Tensor, micro_batch: int) -> bool:
        """Whether this is the first one that is not finite so far."""
        if (self._first is not None and self._first.key <= key) or bool(torch.isfinite(tensor).all()):
            return False
        nan, inf = int(torch.isnan(tensor).sum()), int(torch.isinf(tensor).sum())
        finding = Finding(
            module, what, _PASSES[key[0]], self._rank, (self._rank,), nan, inf, tensor.numel(), micro_batch
        )
        self._first = _Seen(key, finding)
        return True


def _tensors(values: Any) -> Iterator[Tensor]:
    """The floating tensors among a module's arguments or results."""
    if isinstance(values, Tensor):
        if values.is_floating_point() and values.numel():
            yield values
    elif isinstance(values, (tuple, list)):
        for value in values:
            yield from _tensors(value)


def first_nonfinite(
    watch: Watch, run_again: Callable[[Watch], None], named_parameters: NamedParameters, mesh: Mesh
) -> Finding | None:
    """Run a step again and find where it breaks; collective over all ranks, equal on all of them.

    Args:
        run_again: runs the passes of the step and tells `watch` of each that begins.
        named_parameters: this rank's, or its pieces of them.

    Returns:
        None where everything is finite this time.
    """
    watch.attach()
    try:
        run_again(watch)
    finally:
        watch.detach()
    watch.look_at_sums()
    with_values = [(name, param) for name, param in named_parameters if not getattr(param, "in_codes", False)]
    broken = {name for name, param in with_values if not bool(torch.isfinite(param).all())}
    return agree(watch.first, broken, mesh)


def agree(seen: _Seen | None, broken: set[str], mesh: Mesh) -> Finding | None:
    """The earliest finding of all ranks; collective.

    Args:
        broken: this rank's parameters that are not finite in the piece that it holds itself; of ranks that have all
            gathered the same parameter, the one whose piece broke it is named.
    """
    found: dict[str, tuple[bool, _Seen]] = {}
    if seen is not None:
        theirs = f"{seen.finding.module}.{seen.finding.tensor}" not in broken
        found = {str(mesh.rank): (theirs, seen)}
    everyone = merge_dicts(found, mesh.group_of(RANK_ORDER)).values()
    if not everyone:
        return None
    best = min(everyone, key=lambda item: (item[1].key, item[0], item[1].finding.rank))
    same = [seen.finding.rank for theirs, seen in everyone if (seen.key, theirs) == (best[1].key, best[0])]
    return replace(best[1].finding, ranks=tuple(sorted(same)))
