"""The linear's autograd function of one process against torch's and against the FP8 room's own."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from megafp8.fp8 import LinearState, backend, quantized_linear, recipe
from megafp8.nn.gemm import Split, linear


def tensors(dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = ((6, 4, 32), (2, 24, 32), (2, 24), (6, 4, 48))
    return [torch.randn(shape, generator=generator, dtype=torch.float32).to(dtype) for shape in shapes]


def results(function, x, weight, bias, grad) -> list[torch.Tensor]:
    leaves = [t.clone().requires_grad_() for t in (x, weight, bias)]
    y = function(*leaves)
    y.backward(grad)
    return [y.detach(), *(leaf.grad for leaf in leaves)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_plain_is_torchs_linear(dtype: torch.dtype) -> None:
    x, weight, bias, grad = tensors(dtype)
    ours = results(lambda x, w, b: linear(x, w, b), x, weight, bias, grad)
    torchs = results(lambda x, w, b: F.linear(x, w.flatten(0, 1), b.flatten()), x, weight, bias, grad)
    assert all(torch.equal(a, b) for a, b in zip(ours, torchs, strict=True))


@pytest.mark.parametrize("name", ["delayed", "current"])
def test_fp8_is_the_fp8_rooms(name: str) -> None:
    x, weight, bias, grad = tensors(torch.bfloat16)
    states = [LinearState("x", recipe(name), backend("native")) for _ in range(2)]
    ours = results(lambda x, w, b: linear(x, w, b, states[0]), x, weight, bias, grad)
    theirs = results(
        lambda x, w, b: quantized_linear(x, w.flatten(0, 1), b.flatten(), states[1]), x, weight, bias, grad
    )
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    for key, tensor in states[0].tensors().items():
        assert torch.equal(tensor, states[1].tensors()[key])


def test_rebuilt_input_is_not_kept_and_gives_the_same_bits() -> None:
    x, weight, bias, grad = tensors(torch.bfloat16)
    kept: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    def function(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            return linear(x, w, b, rebuild=lambda: x.detach())

    again = results(function, x, weight, bias, grad)
    assert [tuple(t.shape) for t in kept] == [tuple(weight.shape)]
    assert all(torch.equal(a, b) for a, b in zip(again, results(linear, x, weight, bias, grad), strict=True))


@pytest.mark.parametrize("name", ["none", "current"])
def test_rows_of_a_shared_weight(name: str) -> None:
    """Some rows of the weight, one after the other: the product of those; zero gradients elsewhere."""
    x, weight, bias, grad = tensors(torch.bfloat16)
    weight, bias = weight.flatten(0, 1), bias.flatten()
    rows = (slice(4, 12), slice(40, 48))
    picks = torch.cat([torch.arange(48)[part] for part in rows])
    made = [None if name == "none" else LinearState("x", recipe(name), backend("native")) for _ in range(2)]
    split = Split("column", rows=rows)
    y, dx, dw, db = results(lambda x, w, b: linear(x, w, b, made[0], split), x, weight, bias, grad[..., :16])
    expected = results(lambda x, w, b: linear(x, w, b, made[1]), x, weight[picks], bias[picks], grad[..., :16])
    assert torch.equal(y, expected[0]) and torch.equal(dx, expected[1])
    for full, part in ((dw, expected[2]), (db, expected[3])):
        assert torch.equal(full[picks], part)
        full[picks] = 0
        assert not full.any()
