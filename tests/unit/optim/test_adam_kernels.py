"""Which kernel runs: a named one is obeyed or refused with the reason; CUDA ones get the right arguments."""

from __future__ import annotations

import logging
import sys
from types import ModuleType

import pytest
import torch

from megafp8.core.errors import ConfigError
from megafp8.optim import kernels
from megafp8.optim.config import OptimizerConfig
from megafp8.optim.kernels import TensorLists, choose_kernel

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_auto_on_a_cpu_is_torchs_and_says_why(caplog):
    with caplog.at_level(logging.INFO, logger="megafp8"):
        name, _ = choose_kernel("auto", CPU, torch.float32)
    assert name == "torch"
    assert "optimizer kernel kernel=torch" in caplog.text and "te: it runs on CUDA only" in caplog.text


@pytest.mark.parametrize("name", ["te", "apex"])
def test_a_named_kernel_is_refused_where_it_cannot_run(name):
    with pytest.raises(
        ConfigError, match=rf'optimizer.kernel = "{name}": it runs on CUDA only.*use "auto" or "torch"'
    ):
        choose_kernel(name, CPU, torch.float32)
    with pytest.raises(ConfigError, match="updates fp32 masters only"):
        choose_kernel(name, CUDA, torch.float64)


@pytest.mark.parametrize(("name", "module"), [("te", "transformer_engine"), ("apex", "amp_C")])
def test_a_named_kernel_is_refused_where_it_is_not_installed(name, module, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)  # import raises ImportError
    with pytest.raises(ConfigError, match=r"cannot be loaded \("):
        choose_kernel(name, CUDA, torch.float32)


def plain_adamw(chunk, overflow, lists, lr, beta1, beta2, eps, step, mode, bias_correction, decay):
    """What apex's and Transformer Engine's multi_tensor_adam do, on lists (gradients, weights, moments)."""
    assert chunk > 0 and overflow.tolist() == [0] and mode == 1 and bias_correction == 1
    for grad, weight, mean, square in zip(*lists, strict=True):
        mean.mul_(beta1).add_(grad, alpha=1 - beta1)
        square.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        root = (square / (1 - beta2**step)).sqrt() + eps
        weight.sub_(lr * (mean / (1 - beta1**step) / root + decay * weight))


@pytest.mark.parametrize("name", ["te", "apex"])
def test_the_multi_tensor_kernels_take_the_step_that_torchs_takes(name, monkeypatch):
    modules = {
        m: ModuleType(m)
        for m in ("transformer_engine", "transformer_engine.pytorch", "transformer_engine_torch", "amp_C")
    }
    modules["transformer_engine"].pytorch = modules["transformer_engine.pytorch"]
    for key, module in modules.items():
        module.multi_tensor_adam = plain_adamw
        monkeypatch.setitem(sys.modules, key, module)
    monkeypatch.setattr(kernels, "_needs_cuda_fp32", lambda device, dtype: "")
    chosen, kernel = choose_kernel(name, CPU, torch.float32)
    assert chosen == name
    results = []
    for function in (kernel, choose_kernel("torch", CPU, torch.float32)[1]):
        generator = torch.Generator().manual_seed(0)
        weight, grad = torch.randn(50, generator=generator), torch.randn(50, generator=generator)
        lists = TensorLists(0.1, [weight], [grad], [torch.zeros(50)], [torch.zeros(50)])
        for step in (1, 2, 3):
            grad.copy_(torch.randn(50, generator=generator))
            function(lists, OptimizerConfig(), step, 1e-2, 0.5)
        results.append(weight)
    # three steps of 1e-2, a dozen fp32 roundings each, plus one rounding a step of a weight below 4
    assert (results[0] - results[1]).abs().max() < 3 * (12 * 2**-24 * 1e-2 * 4 + 2**-24 * 4)


def test_auto_prefers_what_is_installed(monkeypatch):
    module = ModuleType("amp_C")
    module.multi_tensor_adam = plain_adamw
    monkeypatch.setitem(sys.modules, "amp_C", module)
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    monkeypatch.setattr(kernels, "_needs_cuda_fp32", lambda device, dtype: "")
    assert choose_kernel("auto", CPU, torch.float32)[0] == "apex"
