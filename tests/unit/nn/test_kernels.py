"""Hand-written backward functions against autograd of their forward functions, and compiled against plain."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from megafp8.nn import kernels as k

# fp64 with some ten roundings of 1e-16 on values of size 1 to 100
EXACT = {"rtol": 1e-11, "atol": 1e-11}


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def gradients(function: Callable[..., Any], inputs: list[torch.Tensor], grad: Any) -> tuple[torch.Tensor, ...]:
    leaves = [x.clone().requires_grad_() for x in inputs]
    return torch.autograd.grad(function(*leaves), leaves, grad)


def test_rms_norm() -> None:
    x, w, dy, dx = randn(3, 2, 8), randn(8, seed=1), randn(3, 2, 8, seed=2), randn(3, 2, 8, seed=3)
    y, rstd = k.rms_norm(x, w, 1e-3)
    torch.testing.assert_close(y, F.rms_norm(x, (8,), w, 1e-3), **EXACT)
    gx, gw = gradients(lambda x, w: F.rms_norm(x, (8,), w, 1e-3), [x, w], dy)
    torch.testing.assert_close(k.rms_norm_backward(dy, dx, x, rstd, w), (gx + dx, gw), **EXACT)
    torch.testing.assert_close(k.rms_norm_backward(dy, None, x, rstd, w), (gx, gw), **EXACT)


def test_layer_norm() -> None:
    x, w, b, dy = randn(3, 2, 8), randn(8, seed=1), randn(8, seed=2), randn(3, 2, 8, seed=3)
    y, mean, rstd = k.layer_norm(x, w, b, 1e-3)
    torch.testing.assert_close(y, F.layer_norm(x, (8,), w, b, 1e-3), **EXACT)
    expected = gradients(lambda x, w, b: F.layer_norm(x, (8,), w, b, 1e-3), [x, w, b], dy)
    torch.testing.assert_close(k.layer_norm_backward(dy, None, x, mean, rstd, w), expected, **EXACT)


@pytest.mark.parametrize("forward, backward", [(k.swiglu, k.swiglu_backward), (k.gelu, k.gelu_backward)])
def test_activations(forward: Callable[..., Any], backward: Callable[..., Any]) -> None:
    x = randn(3, 2, 2, 8) * 3
    y = forward(x)
    expected = F.silu(x[..., 0, :]) * x[..., 1, :] if forward is k.swiglu else F.gelu(x, approximate="tanh")
    torch.testing.assert_close(y, expected, **EXACT)
    dy = randn(*y.shape, seed=1)
    torch.testing.assert_close(backward(dy, x), *gradients(forward, [x], dy), **EXACT)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("order", [(1, 2, 3, 0, 4), (1, 2, 0, 3, 4)])
def test_split_rotate(normed: bool, order: tuple[int, ...]) -> None:
    s, b, g, r, d = 5, 2, 3, 2, 8
    qkv = randn(s, b, g, r + 2, d)
    angles = randn(s, 1, d // 2, seed=1)
    cos, sin = angles.cos(), angles.sin()
    weights = [randn(d, seed=2), randn(d, seed=3)] if normed else []

    def forward(qkv: torch.Tensor, *weights: torch.Tensor) -> Any:
        q_weight, k_weight = weights or (None, None)
        return k.split_rotate(qkv, cos, sin, q_weight, k_weight, 1e-3, 0.5, order)

    grads = [randn(*x.shape, seed=9 + i) for i, x in enumerate(forward(qkv, *weights))]
    back = k.split_rotate_backward(*grads, cos, sin, 0.5, order)
    got = k.head_norm_backward(back, qkv, *weights, 1e-3) if normed else (back,)
    torch.testing.assert_close(tuple(got), gradients(forward, [qkv, *weights], grads), **EXACT)


def test_softmax_gradient_is_that_of_cross_entropy() -> None:
    logits, targets = randn(6, 11) * 4, torch.tensor([0, 10, 3, -100, 5, 5])
    peak = logits.amax(-1, keepdim=True)
    total, target = k.softmax_parts(logits, peak, targets)
    losses = (total.log() - target).squeeze(1)[targets >= 0]
    torch.testing.assert_close(losses.sum(), F.cross_entropy(logits, targets, reduction="sum"), **EXACT)
    expected = gradients(lambda x: F.cross_entropy(x, targets, reduction="sum") * 0.25, [logits], None)[0]
    k.softmax_gradient_(logits, peak + total.log(), targets, (targets >= 0).double()[:, None] * 0.25)
    torch.testing.assert_close(logits, expected, **EXACT)


def test_compiled_is_plain_in_bf16() -> None:
    """One compiled pair, to an ulp of bf16 (2^-8 relative): only the order of fp32 sums may differ."""
    kernels = k.Kernels(compiled=True)
    x, dy = randn(4, 2, 2, 32, dtype=torch.bfloat16), randn(4, 2, 32, seed=1, dtype=torch.bfloat16)
    for name, args in (("swiglu", (x,)), ("swiglu_backward", (dy, x))):
        torch.testing.assert_close(getattr(kernels, name)(*args), getattr(k, name)(*args), rtol=2**-7, atol=1e-6)


def test_no_compiler_falls_back_with_one_event(monkeypatch: Any, caplog: Any) -> None:
    def broken(function: Any, **_: Any) -> Any:
        def call(*args: Any) -> Any:
            raise RuntimeError("no C++ compiler")

        return call

    monkeypatch.setattr(torch, "compile", broken)
    monkeypatch.setattr(logging.getLogger("megafp8"), "propagate", True)
    kernels = k.Kernels(compiled=True)
    x = randn(2, 2, 4)
    with caplog.at_level(logging.WARNING, "megafp8"):
        for _ in range(2):
            torch.testing.assert_close(kernels.swiglu(x), k.swiglu(x), rtol=0, atol=0)
            kernels.gelu(x)
    # one record, however many of pytest's handlers have seen it
    assert [message.count("no C++ compiler") for message in {id(r): r.message for r in caplog.records}.values()] == [1]
    assert not kernels.compiled
