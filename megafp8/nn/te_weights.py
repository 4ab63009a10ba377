"""A model's parameters inside Transformer Engine's modules, and their gradients on the way back.

A module of the model owns its parameters, under the model's names; the Transformer Engine module that computes with
them is no child of it and gets leaves on the same memory, in the shapes that it wants (gate_up [2, F, H] as [2 F, H],
each expert's matrix by itself). Gradients come back to the parameter: added to its fp32 main gradient inside the GEMM
(`fuse_wgrad_accumulation`), or as a tensor. Under `delay_wgrad_compute` they wait in the store of nn/deferred.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from megafp8.nn.deferred import current_store, deliver

Tensor = torch.Tensor


class Loan:
    """One parameter of `owner`, lent to a Transformer Engine module under the names `inner_names`.

    Args:
        stacked: one name for each index of the parameter's first dim (an expert).
        rows: these rows of it only, as a copy (kv heads fewer than tp); then nothing is fused.
        quantized: the module has quantized weights of its own (`quantized_model_init`), filled from the parameter.

    Attributes:
        fused: its gradients are added to the main gradient by the GEMM; known from the first `lend` on.
    """

    def __init__(
        self,
        owner: nn.Module,
        name: str,
        inner: nn.Module,
        inner_names: Sequence[str],
        *,
        stacked: bool = False,
        rows: Sequence[slice] | None = None,
        quantized: bool = False,
    ) -> None:
        assert stacked or len(inner_names) == 1
        self.owner, self.name, self.inner, self.inner_names = owner, name, inner, tuple(inner_names)
        self.is_vector = name == "bias"
        self.stacked, self.rows, self.quantized, self.fused = stacked, rows, quantized and not self.is_vector, False
        self._grads: dict[str, Tensor] = {}

    @property
    def parameter(self) -> nn.Parameter:
        """The model's own."""
        found: nn.Parameter = getattr(self.owner, self.name)
        return found

    def lend(self, *, fuse: bool, changed: bool) -> None:
        """Bring the inner module's leaves up to the parameter.

        Args:
            fuse: let the GEMM add to the main gradient, where the parameter has one.
            changed: the parameter's values are new since the last call.
        """
        parameter = self.parameter
        main_grad = getattr(parameter, "main_grad", None)
        self.fused = fuse and main_grad is not None and self.rows is None and not self.is_vector
        for index, inner_name in enumerate(self.inner_names):
            view = self._view(parameter.detach(), index)
            leaf: Any = self.inner._parameters[inner_name]
            if self.quantized:
                if changed:
                    with torch.no_grad():
                        leaf.copy_(view)
            elif self.rows is not None and leaf.device == view.device and leaf.shape == view.shape:
                with torch.no_grad():
                    leaf.copy_(view)
            elif leaf.data_ptr() != view.data_ptr() or leaf.device != view.device:
                with torch.inference_mode(False):  # it outlives a pass of inference
                    leaf = nn.Parameter(view, requires_grad=parameter.requires_grad)
                self.inner._parameters[inner_name] = leaf
            if not getattr(leaf, "lent", False):
                leaf.lent = True
                leaf.register_post_accumulate_grad_hook(self._receiver(inner_name))
            if self.fused and getattr(leaf, "main_grad", None) is None:
                assert main_grad is not None
                leaf.main_grad = self._view(main_grad, index)

    def open(self, overwrites: bool) -> None:
        """Before a GEMM that adds to (`overwrites`: writes) the main gradient."""
        if self.fused:
            self.parameter.open_main_grad(overwrites)  # type: ignore[attr-defined]

    def close(self) -> None:
        """After it."""
        if self.fused:
            self.parameter.close_main_grad()  # type: ignore[attr-defined]

    def collect(self) -> None:
        """Hand on the gradients that the inner module has put into its leaves' `grad`."""
        for inner_name in self.inner_names:
            leaf: Any = self.inner._parameters[inner_name]
            self._receive(inner_name, leaf)

    def _view(self, tensor: Tensor, index: int) -> Tensor:
        tensor = tensor[index] if self.stacked else tensor
        flat = tensor.flatten() if self.is_vector else tensor.flatten(0, -2)
        return flat if self.rows is None else torch.cat([flat[part] for part in self.rows])

    def _receiver(self, inner_name: str) -> Callable[[Tensor], None]:
        return lambda leaf: self._receive(inner_name, leaf)

    @torch.no_grad()
    def _receive(self, inner_name: str, leaf: Tensor) -> None:
        """A leaf has a gradient; the parameter gets its own when all leaves have theirs."""
        if leaf.grad is None:  # it went into the main gradient, or waits
            return
        self._grads[inner_name] = leaf.grad
        leaf.grad = None
        if len(self._grads) < len(self.inner_names):
            return
        grads, self._grads = [self._grads[name] for name in self.inner_names], {}
        parameter = self.parameter
        whole = torch.stack(grads) if self.stacked else grads[0]
        deliver(parameter, self._put_back(whole).view(parameter.shape))

    def _put_back(self, grad: Tensor) -> Tensor:
        if self.rows is None:
            return grad
        parameter = self.parameter
        full = grad.new_zeros(parameter.shape).view(-1, *grad.shape[1:])
        start = 0
        for part in self.rows:
            stop = start + part.stop - part.start
            full[part] = grad[start:stop]
            start = stop
        return full


class _InBackward(torch.autograd.Function):
    """Identity; `work` is called when the gradient passes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, work: Callable[[], None]) -> Tensor:
        ctx.work = work
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.work()
        return grads[0], None


class Part:
    """One Transformer Engine module, called with a model's parameters lent to it.

    Args:
        inner: the module; kept out of the model's own modules, so that it adds no names and no `_extra_state`.
        fuse: as `fuse_wgrad_accumulation`.
        delays: it was made with `delay_wgrad_compute`.
        caches: pass `is_first_microbatch`, so that a weight is quantized once a step.

    Attributes:
        norm: the model's module in front, whose parameters the Transformer Engine module computes with, if it does.
        graphed: the module as a CUDA graph, if it was captured.
    """

    def __init__(self, inner: Any, *, fuse: bool, delays: bool, caches: bool) -> None:
        self.inner, self.loans = inner, list[Loan]()
        self.fuse, self.delays, self.caches = fuse, delays, caches
        self.norm: nn.Module | None = None
        self.graphed: Callable[..., Tensor] | None = None
        self.quantized = False  # whether its GEMMs are
        self.around: Callable[[], AbstractContextManager[Any]] = nullcontext  # of each call
        self._fresh = True
        self._waiting: deque[object] = deque()

    def lend(self, owner: nn.Module, name: str, *inner_names: str, **how: Any) -> None:
        """Add a parameter of `owner`, unless it has none of that name; `how`: see Loan."""
        if getattr(owner, name) is not None:
            self.loans.append(Loan(owner, name, self.inner, inner_names, **how))

    def renew(self) -> None:
        """The parameters have new values: the next pass quantizes them again."""
        self._fresh = True

    def prepare(self) -> None:
        """Lend what is needed for a pass to come."""
        if self._has_no_memory():
            self.inner.reset_parameters()  # quantized weights of its own, on the current device; nothing is lent yet
        for loan in self.loans:
            loan.lend(fuse=self.fuse, changed=self._fresh)
        self.inner.fuse_wgrad_accumulation = any(loan.fused for loan in self.loans)
        for name in ("weight", "bias") if self.norm is not None else ():
            # its gradients come through autograd, so it is no loan
            self.inner._parameters[f"layer_norm_{name}"] = getattr(self.norm, name, None)

    def _has_no_memory(self) -> bool:
        own = [(loan, self.inner._parameters[name]) for loan in self.loans for name in loan.inner_names]
        return any(loan.quantized and leaf.is_meta and not loan.parameter.is_meta for loan, leaf in own)

    def __call__(self, x: Tensor, *args: Any) -> Tensor:
        """The module's output for x and more arguments of its own."""
        self.prepare()
        if not torch.is_grad_enabled():
            with self.around():
                result: Tensor = self.inner(x, *args, is_first_microbatch=None)
            return result
        first = self._fresh if self.caches else None
        self._fresh = False
        overwrites = bool(first) and self.graphed is None  # a graph was captured adding
        x = x if x.requires_grad else x.detach().requires_grad_()  # else no gradient would pass here
        x = _InBackward.apply(x, lambda: self._after(overwrites))
        with self.around():
            y = (self.graphed or self.inner)(x, *args, is_first_microbatch=first)
        result = _InBackward.apply(y, lambda: self._before(overwrites))
        return result

    def _before(self, overwrites: bool) -> None:
        if self._waits():
            self.inner.wgrad_store.enable_delay_wgrad_compute()
            return
        if self.delays:  # a pass that is not split goes past those that wait
            self.inner.wgrad_store.disable_delay_wgrad_compute()
        for loan in self.loans:
            loan.open(overwrites)

    def _after(self, overwrites: bool) -> None:
        store = current_store()
        if store is None or not self.delays:
            for loan in self.loans:
                loan.close()
            return
        token = object()
        self._waiting.append(token)
        store.defer(lambda: self._weight_grads(token, overwrites))

    def _waits(self) -> bool:
        return self.delays and current_store() is not None

    @torch.no_grad()
    def _weight_grads(self, token: object, overwrites: bool) -> None:
        first = self._waiting.popleft()
        assert first is token, "Transformer Engine computes delayed weight gradients in the order of backward passes"
        self.inner.wgrad_store.enable_delay_wgrad_compute()
        for loan in self.loans:
            loan.open(overwrites)
        self.inner.backward_dw()
        for loan in self.loans:
            loan.close()
            loan.collect()
