"""Fused AdamW kernels: torch's everywhere, Transformer Engine's and apex's on CUDA where they are installed.

A kernel is obeyed or refused, never replaced; "auto" takes the first that works and says so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from megafp8.core.errors import ConfigError
from megafp8.core.log import event, get_logger
from megafp8.optim.config import OptimizerConfig

_log = get_logger(__name__)
_CHUNK_ELEMENTS = 2048 * 32  # the work of one block, as apex and Transformer Engine launch it
_ADAMW_MODE, _BIAS_CORRECTION = 1, 1


@dataclass
class TensorLists:
    """Tensors of equal dtype that share one weight decay; the four lists run in parallel."""

    weight_decay: float
    masters: list[torch.Tensor]
    grads: list[torch.Tensor]
    exp_avgs: list[torch.Tensor]
    exp_avg_sqs: list[torch.Tensor]


# (lists, config, step counted from 1, learning rate, factor on the gradients); gradients are left multiplied
Kernel = Callable[[TensorLists, OptimizerConfig, int, float, float], None]


def choose_kernel(name: str, device: torch.device, dtype: torch.dtype) -> tuple[str, Kernel]:
    """The kernel of that name ("auto", "te", "apex", "torch") for masters of `dtype` on `device`.

    Raises:
        ConfigError: the named kernel does not work here, and why.
    """
    if name != "auto":
        kernel = _LOADERS[name](device, dtype)
        if isinstance(kernel, str):
            raise ConfigError(f'optimizer.kernel = "{name}": {kernel}; use "auto" or "torch"')
        return name, kernel
    refusals: list[str] = []
    for candidate, load in _LOADERS.items():
        kernel = load(device, dtype)
        if not isinstance(kernel, str):
            event(_log, "optimizer kernel", kernel=candidate, refused="; ".join(refusals) or "none")
            return candidate, kernel
        refusals.append(f"{candidate}: {kernel}")
    raise AssertionError("torch's kernel is never refused")


def _load_te(device: torch.device, dtype: torch.dtype) -> Kernel | str:
    if refusal := _needs_cuda_fp32(device, dtype):
        return refusal
    try:
        import transformer_engine.pytorch  # noqa: F401 - loads the library behind the next import
        import transformer_engine_torch
    except (ImportError, OSError, RuntimeError) as error:  # RuntimeError: its Python without the compiled part
        return f"Transformer Engine cannot be loaded ({error})"
    return _multi_tensor(transformer_engine_torch.multi_tensor_adam, device)


def _load_apex(device: torch.device, dtype: torch.dtype) -> Kernel | str:
    if refusal := _needs_cuda_fp32(device, dtype):
        return refusal
    try:
        import amp_C
    except (ImportError, OSError) as error:
        return f"apex's CUDA extensions cannot be loaded ({error})"
    return _multi_tensor(amp_C.multi_tensor_adam, device)


def _load_torch(device: torch.device, dtype: torch.dtype) -> Kernel | str:
    return _torch_kernel


_LOADERS: dict[str, Callable[[torch.device, torch.dtype], Kernel | str]] = {
    "te": _load_te,
    "apex": _load_apex,
    "torch": _load_torch,
}


def _needs_cuda_fp32(device: torch.device, dtype: torch.dtype) -> str:
    if device.type != "cuda":
        return f"it runs on CUDA only, and this run is on {device.type}"
    return f"it updates fp32 masters only, and these are {dtype}" if dtype != torch.float32 else ""


def _torch_kernel(lists: TensorLists, config: OptimizerConfig, step: int, lr: float, grad_scale: float) -> None:
    device, inverse = lists.masters[0].device, None
    if grad_scale != 1.0:
        if lists.masters[0].dtype == torch.float64:  # the kernel takes its scale in fp32
            torch._foreach_mul_(lists.grads, grad_scale)
        else:  # the kernel divides
            inverse = torch.tensor(1.0 / grad_scale, dtype=torch.float32, device=device)
    # The kernel only reads the step, so all tensors can share one.
    steps = [torch.full((), step, dtype=torch.float32, device=device)] * len(lists.masters)
    torch._fused_adamw_(
        lists.masters,
        lists.grads,
        lists.exp_avgs,
        lists.exp_avg_sqs,
        [],
        steps,
        lr=lr,
        beta1=config.beta1,
        beta2=config.beta2,
        weight_decay=lists.weight_decay,
        eps=config.eps,
        amsgrad=False,
        maximize=False,
        grad_scale=inverse,
    )


def _multi_tensor(function: Callable[..., Any], device: torch.device) -> Kernel:
    """The multi-tensor interface that apex began and Transformer Engine keeps."""
    no_overflow = torch.zeros(1, dtype=torch.int32, device=device)

    def kernel(lists: TensorLists, config: OptimizerConfig, step: int, lr: float, grad_scale: float) -> None:
        if grad_scale != 1.0:
            torch._foreach_mul_(lists.grads, grad_scale)
        tensors = [lists.grads, lists.masters, lists.exp_avgs, lists.exp_avg_sqs]
        settings = (lr, config.beta1, config.beta2, config.eps, step, _ADAMW_MODE, _BIAS_CORRECTION)
        function(_CHUNK_ELEMENTS, no_overflow, tensors, *settings, lists.weight_decay)

    return kernel
