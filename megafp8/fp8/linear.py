"""A linear layer's three GEMMs in FP8 as one autograd function, and the state that goes with a layer.

The layer itself (its parameters, its parallelism) lives in nn. Master weights stay in high precision; the gradient
passes straight through the quantization.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist

from megafp8.core.rng import seed_for
from megafp8.core.waiting import WAITING
from megafp8.fp8.backend import Backend
from megafp8.fp8.kernels import scaler
from megafp8.fp8.quantized import Operand, QuantizedTensor
from megafp8.fp8.recipe import ROLES, Recipe, TensorSpec

Observer = Callable[[str, torch.Tensor, QuantizedTensor, torch.Tensor | None], None]


@dataclass
class RoleState:
    """One tensor of a layer: its spec and, for a recipe with memory, `amax_history` [L] and `scale` [1], fp32.

    `warming`: the memory is being filled and not yet read; the scale is the tensor's own.
    """

    spec: TensorSpec
    tensors: dict[str, torch.Tensor]
    warming: bool = False

    @property
    def scale(self) -> torch.Tensor | None:
        """What a tensor is quantized with; None: the scale of its own amax."""
        return None if self.warming else self.tensors.get("scale")

    def record(self, amax: torch.Tensor | None) -> None:
        """Fold the amax [1] of a tensor of this micro-batch into the history's running entry, if there is one."""
        if "amax_history" in self.tensors and amax is not None:
            running = self.tensors["amax_history"][:1]
            torch.maximum(running, amax, out=running)


@dataclass(frozen=True)
class _CachedWeight:
    quantized: QuantizedTensor | None
    amax: torch.Tensor | None
    key: tuple[Any, ...]
    recorded: bool
    scale: torch.Tensor | None
    observed: Callable[[], tuple[torch.Tensor, QuantizedTensor]] | None = None  # of a weight that was given


_GIVEN = ("given",)  # the key of a quantized weight that came from elsewhere


@dataclass(eq=False)
class LinearState:
    """What FP8 remembers of one linear layer.

    Attributes:
        name: the module's name, for statistics and checkpoints.
        keeps_weight: the quantized weight is kept for the step. Else, as where a weight's memory is given away between
            its passes (full sharding), it is made again for each use, until the cache is dropped with the same scale.
        observer: called with (role, x, quantized, amax) at every quantization while statistics are armed; `amax` is
            None where scales are of blocks.
        shared_widely: whether amaxes of delayed scaling, if shared, are shared by all ranks of a pipeline stage and not
            by those of tp alone.
        warmup_until: the last optimizer step in which delayed scaling takes each tensor's own scale, as current scaling
            does, while the history fills: at scale 1, where it begins, E5M2 loses every gradient below 2^-17. Steps are
            told by `begin_step`; who never calls it has no warm-up.
        step: the optimizer step, as `begin_step` said.
    """

    name: str
    recipe: Recipe
    backend: Backend
    device: torch.device | str = "cpu"
    observer: Observer | None = None
    shared_widely: bool = True
    warmup_until: int = 0
    step: int = field(init=False, default=0)
    roles: dict[str, RoleState] = field(init=False)
    _cached: _CachedWeight | None = field(init=False, default=None)
    keeps_weight: bool = field(init=False, default=True)
    _seed: int = field(init=False, default=0)
    _draws: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.roles = {r: RoleState(self.recipe.spec(r), self.recipe.new_state(self.device)) for r in ROLES}
        self.warm_up(self.warmup_until)

    def warm_up(self, until: int) -> None:
        """Delayed scaling warms up to the end of optimizer step `until`; 0, or a step that is past: it does not."""
        self.warmup_until, before = until, self.warming
        for role in self.roles.values():
            role.warming = role.spec.delayed and 1 <= self.step <= until
        if self.warming != before:  # a weight that an evaluation quantized has the other scale
            self.drop_weight_cache()

    @property
    def warming(self) -> bool:
        """Whether delayed scaling is still warming up."""
        return any(role.warming for role in self.roles.values())

    def tensors(self) -> dict[str, torch.Tensor]:
        """`{"input.scale": ...}`: fp32, live; load a checkpoint by copying into them, then drop the weight cache."""
        return {f"{r}.{key}": tensor for r, role in self.roles.items() for key, tensor in role.tensors.items()}

    def drop_weight_cache(self) -> None:
        """Forget the quantized weight; call it when the weight or the scales were replaced.

        One that was given stays until another is, and its amax counts anew.
        """
        given = self._cached is not None and self._cached.key == _GIVEN
        self._cached = replace(self._cached, recorded=False) if self._cached is not None and given else None

    def give_weight(
        self,
        quantized: QuantizedTensor,
        amax: torch.Tensor | None,
        *,
        observed: Callable[[], tuple[torch.Tensor, QuantizedTensor]],
    ) -> None:
        """From now on this is the quantized weight; the parameter is not read any more.

        `amax`: of the weight, fp32 [1], where one scale serves it. `observed`: makes what statistics look at.
        """
        self._cached = _CachedWeight(quantized, amax, _GIVEN, recorded=False, scale=None, observed=observed)

    def begin_step(self, step: int, seed: int) -> None:
        """A new optimizer step, and the seed from which its stochastic rounding draws."""
        self.step, self._seed, self._draws = step, seed, 0
        self.warm_up(self.warmup_until)

    def alike(self, role: str, rows: int) -> bool:
        """Whether ranks that hold `rows` rows each of one tensor make the codes of the whole: see `quantize`'s `group`.

        Not so for delayed scaling without `reduce_amax`, where every rank has a scale of its own, and where a piece
        ends inside a block of the column-wise copy.
        """
        spec = self.roles[role].spec
        if spec.block is not None:
            return rows % max(spec.block) == 0
        return self.roles[role].scale is None or self.recipe.shares_amax

    def alike_everywhere(self, role: str) -> bool:
        """Whether any rank of a pipeline stage makes a row's codes as any other would, for all three GEMMs."""
        if self.roles[role].spec.block is not None:
            return False
        return self.roles[role].scale is None or (self.recipe.shares_amax and self.shared_widely)

    def quantize(
        self,
        role: str,
        x: torch.Tensor,
        *,
        record: bool,
        group: dist.ProcessGroup | None = None,
        columnwise: bool = True,
    ) -> QuantizedTensor:
        """Quantize `x` [M, K] in `role`, with its amax into the history if `record`.

        `group`: the ranks that hold the other pieces of the same tensor; a scale made from the tensor itself is then
        made from its largest magnitude over all of them. `columnwise`: also the transpose, for the weight gradient.
        """
        spec, scale = self.roles[role].spec, self.roles[role].scale
        amaxes = None
        if group is not None and scale is None and (spec.block is None or spec.two_level):
            amaxes = self.backend.amaxes(x, spec)
            with WAITING:
                dist.all_reduce(amaxes, dist.ReduceOp.MAX, group=group)
            if spec.block is None:
                scale, amaxes = scaler(spec)(amaxes), None
        quantized, amax = self.backend.quantize(
            x, spec, scale, columnwise=columnwise, tensor_amax=amaxes, seed=self._noise(role)
        )
        if record:
            self.roles[role].record(amax)
        if self.observer is not None:
            self.observer(role, x, quantized, amax)
        return quantized

    def _noise(self, role: str) -> torch.Tensor | None:
        if not self.roles[role].spec.stochastic:
            return None
        self._draws += 1
        return torch.tensor([seed_for(self._seed, self.name, role, self._draws)], device=self.device)

    def quantized_weight(
        self, weight: torch.Tensor, *, record: bool, rows: Sequence[slice] | None = None, columnwise: bool = True
    ) -> QuantizedTensor:
        """The weight [N, K], quantized once until the cache is dropped or the weight changes in place.

        `columnwise`: also the transpose, for the input's gradient.
        `rows`: only these of it, one after the other. Its amax counts once for each quantization, in the first pass
        that records (an evaluation before it may have done the quantization: it must leave no trace).
        """
        key: tuple[Any, ...] = ()
        if self._cached is not None and self._cached.key == _GIVEN:
            key = _GIVEN
        elif self.keeps_weight:
            key = (weight.data_ptr(), weight.shape, None if weight.is_inference() else weight._version)
        cached, role = self._cached, self.roles["weight"]
        if cached is None or cached.key != key:
            scale = role.scale if self.keeps_weight or role.scale is None else role.scale.clone()
            cached = self._quantized_now(weight, rows, key, scale, columnwise)
        elif cached.quantized is None or (columnwise and not cached.quantized.has_columns):
            again = self._quantized_now(weight, rows, key, cached.scale, columnwise)
            cached = replace(again, recorded=cached.recorded)
        quantized = cached.quantized
        assert quantized is not None
        if record and not cached.recorded:
            self.roles["weight"].record(cached.amax)
            cached = replace(cached, recorded=True)
        if self.observer is not None:
            seen = (picked(weight, rows), quantized) if cached.observed is None else cached.observed()
            self.observer("weight", *seen, cached.amax)
        self._cached = cached if self.keeps_weight else replace(cached, quantized=None)
        return quantized

    def quantized_once(self, weight: torch.Tensor, *, record: bool, columnwise: bool = True) -> QuantizedTensor:
        """A weight [N, K] that is one pass's own (nn/smooth), with a scale of its own amax; nothing is kept of it."""
        quantized, amax = self.backend.quantize(weight, self.roles["weight"].spec, None, columnwise=columnwise)
        if record:
            self.roles["weight"].record(amax)
        if self.observer is not None:
            self.observer("weight", weight, quantized, amax)
        return quantized

    def _quantized_now(
        self,
        weight: torch.Tensor,
        rows: Sequence[slice] | None,
        key: tuple[Any, ...],
        scale: torch.Tensor | None,
        columnwise: bool,
    ) -> _CachedWeight:
        spec = self.roles["weight"].spec
        quantized, amax = self.backend.quantize(picked(weight.detach(), rows), spec, scale, columnwise=columnwise)
        return _CachedWeight(quantized, amax, key, recorded=False, scale=scale)


def begin_step(states: Iterable[LinearState], step: int, seed: int) -> None:
    """Tell all layers that optimizer step `step` begins; `seed` (this rank's, of the step) is for random rounding."""
    for state in states:
        state.begin_step(step, seed)


def picked(tensor: torch.Tensor, rows: Sequence[slice] | None) -> torch.Tensor:
    """These rows (along dim 0), one after the other, as a copy; None: the tensor as it is."""
    return tensor if rows is None else torch.cat([tensor[part] for part in rows])


def fprop(
    state: LinearState, x: QuantizedTensor, weight: QuantizedTensor, bias: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """x [M, K] times weight [N, K] transposed, plus bias [N] -> [M, N] of `dtype`."""
    # fast accumulation forward, the precise one backward: Transformer Engine's choice where one scale serves a tensor
    return state.backend.gemm(x.rows, weight.rows, bias, dtype, precise=x.rows.spec.block is not None)


def dgrad(state: LinearState, grad: QuantizedTensor, weight: QuantizedTensor, dtype: torch.dtype) -> torch.Tensor:
    """grad [M, N] times weight [N, K] -> [M, K] of `dtype`."""
    return state.backend.gemm(grad.rows, weight.columnwise, None, dtype, precise=True)


def wgrad(state: LinearState, grad: QuantizedTensor, x: QuantizedTensor, dtype: torch.dtype) -> torch.Tensor:
    """grad [M, N] transposed times x [M, K] -> [N, K] of `dtype`."""
    return state.backend.gemm(grad.columnwise, x.columnwise, None, dtype, precise=True)


@dataclass(eq=False)
class Kept:
    """What a forward pass keeps of its quantized input for the weight gradient, apart from the tensors themselves.

    The tensors go through save_for_backward: `pop` gives them once, `restored` takes them back.
    """

    like: Operand | None
    of_columns: bool
    tensors: tuple[torch.Tensor | None, ...]

    @staticmethod
    def of(x: QuantizedTensor | None) -> Kept:
        """`x` None: nothing is kept."""
        if x is None:
            return Kept(None, False, ())
        operand = x.rows if x.blockwise_columns is None else x.blockwise_columns
        return Kept(operand, operand is not x.rowwise, (operand.data, operand.scale_inv, operand.tensor_amax))

    def pop(self) -> tuple[torch.Tensor | None, ...]:
        """The tensors, to be saved; they are no longer held here."""
        found, self.tensors = self.tensors, ()
        if self.like is not None:
            empty = self.like.data.new_empty(0)
            self.like = replace(self.like, data=empty, scale_inv=empty, tensor_amax=None)
        return found

    def restored(self, saved: Sequence[torch.Tensor | None]) -> QuantizedTensor:
        """The quantized input, fit for `wgrad`."""
        data, scale_inv, tensor_amax = saved
        assert self.like is not None and data is not None and scale_inv is not None
        operand = replace(self.like, data=data, scale_inv=scale_inv, tensor_amax=tensor_amax)
        return QuantizedTensor(None, operand) if self.of_columns else QuantizedTensor(operand)


# It has state, and its kernels are compiled by themselves. torch.compiler.disable, but for the import of the compiler:
# that is half of what a start of a run without FP8 imports (1 s), and comes with the first call here.
@torch._disable_dynamo
def quantized_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, state: LinearState
) -> torch.Tensor:
    """`x @ weight.T + bias` with all three GEMMs in FP8.

    Args:
        x: [..., K], bf16 (or wider).
        weight: [N, K]; may be a view of the parameter.
        bias: [N] or None; added in high precision.
        state: of this layer; its amaxes are recorded only while gradients are enabled.

    Returns:
        [..., N] in `x`'s dtype. The gradients come in the dtypes of `x`, `weight` and `bias`.
    """
    y: torch.Tensor = _QuantizedLinear.apply(x, weight, bias, state, torch.is_grad_enabled())
    return y


class _QuantizedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        state: LinearState,
        record: bool,
    ) -> torch.Tensor:
        x_quantized = state.quantize("input", x.detach().reshape(-1, x.shape[-1]), record=record, columnwise=record)
        w_quantized = state.quantized_weight(weight, record=record, columnwise=record)
        # through save_for_backward, so that activation recompute can free and remake it
        ctx.state, ctx.weight, ctx.kept = state, w_quantized, Kept.of(x_quantized if record else None)
        ctx.save_for_backward(*ctx.kept.pop())
        ctx.x_shape, ctx.dtypes = x.shape, (x.dtype, weight.dtype, None if bias is None else bias.dtype)
        y = fprop(state, x_quantized, w_quantized, bias, x.dtype)
        return y.view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        state: LinearState = ctx.state
        grad = grad_output.reshape(-1, grad_output.shape[-1]).contiguous()
        # one quantization serves both GEMMs
        quantized = state.quantize("grad_output", grad, record=True)
        x_dtype, weight_dtype, bias_dtype = ctx.dtypes
        dx = dw = db = None
        if ctx.needs_input_grad[0]:
            dx = dgrad(state, quantized, ctx.weight, x_dtype).view(ctx.x_shape)
        if ctx.needs_input_grad[1]:
            dw = wgrad(state, quantized, ctx.kept.restored(ctx.saved_tensors), weight_dtype)
        if ctx.needs_input_grad[2]:
            db = grad.sum(0, dtype=torch.float32).to(bias_dtype)
        return dx, dw, db, None, None


@torch.no_grad()
def update_states(states: Iterable[LinearState], group: dist.ProcessGroup | None = None) -> None:
    """End a micro-batch after its backward: reduce the amaxes, roll the histories, compute the next scales.

    With `group`, one MAX all-reduce for all tensors, forward and backward, of recipes that share amaxes; every
    rank of it must pass the same layers. Recipes without memory are left alone.
    """
    by_recipe: dict[Recipe, list[RoleState]] = {}
    for state in states:
        if any(role.tensors for role in state.roles.values()):
            by_recipe.setdefault(state.recipe, []).extend(state.roles.values())
    if not by_recipe:
        return
    recipes = sorted(by_recipe, key=lambda recipe: not recipe.shares_amax)
    running = [role.tensors["amax_history"][:1] for recipe in recipes for role in by_recipe[recipe]]
    num_shared = sum(len(by_recipe[recipe]) for recipe in recipes if recipe.shares_amax)
    amax = torch.cat(running)
    if group is not None and num_shared:
        with WAITING:
            dist.all_reduce(amax[:num_shared], dist.ReduceOp.MAX, group=group)
    for recipe, part in zip(recipes, amax.split([len(by_recipe[r]) for r in recipes]), strict=True):
        roles = by_recipe[recipe]
        recipe.update([role.tensors for role in roles], [role.spec for role in roles], part)
