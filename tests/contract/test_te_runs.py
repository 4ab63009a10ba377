"""Transformer Engine's own Python, with nn/te around it, computes what our layers compute.

On the stub of te_stub, with te_kernels in place of what is compiled: casts, caches, amax updates, main gradients,
delayed weight gradients and checkpoints are Transformer Engine's and nn/te's, the arithmetic beneath is torch's. So
this says that data goes where it belongs; what a GPU's kernels compute is for tests/gpu.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from megafp8.nn.te_config import TEConfig
from tests.contract import te_kernels
from tests.contract.te_models import (
    PARTS,
    buckets_of,
    grads,
    models,
    state_of,
    step,
)
from tests.contract.te_stub import transformer_engine

# a bf16 weight gradient is rounded once where ours is kept in bf16 before it is added; Transformer Engine's GEMM adds
# fp32 to fp32: at most half a bf16 ulp of each element, 2**-9
ROUNDED = 2.0**-9


@pytest.fixture(scope="module", autouse=True)
def te() -> Iterator[Any]:
    with transformer_engine() as module, mock.patch("megafp8.nn.te.gpu_problem", lambda device: None):
        yield module


@pytest.mark.parametrize("normed", [False, True], ids=["Linear", "LayerNormLinear"])
def test_reference_quantizers_give_the_bits_of_our_exact_backend(normed: bool, te: Any) -> None:
    from transformer_engine.common.recipe import CustomRecipe
    from transformer_engine.pytorch.custom_recipes.reference_current_scaling import current_scaling_ref_factory

    recipe = CustomRecipe(qfactory=current_scaling_ref_factory)
    # the reference's gemm leaves `out` alone, so nothing is fused
    with mock.patch("megafp8.nn.te.library_recipe", lambda ours: recipe):
        own, theirs = models("tiny_llama", "current", replace(PARTS, fuse_wgrad_accumulation=False))
    config, generator = own.config, torch.Generator().manual_seed(1)
    x = torch.randn(128, 4, config.hidden_size, generator=generator).bfloat16()
    found = []
    for model in (own, theirs):
        layer, leaf = model.layers[0], x.clone().requires_grad_()
        with model._surround():
            if normed:
                y = layer.attention.qkv(layer.attention_norm(leaf, None)[1])
                weight = layer.attention.qkv.weight
            else:
                y, weight = layer.attention.out(leaf), layer.attention.out.weight
        y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).bfloat16())
        found.append([y, leaf.grad, weight.grad])
    for name, ours, other in zip(("y", "dx", "dw"), *found, strict=True):
        same = (ours == other).float().mean()
        # bf16 bits of one sign are ordered as their values; a difference of 1 is one ulp
        bits = [t.detach().view(torch.int16).to(torch.int32) for t in (ours, other)]
        assert same >= 0.999, f"{name}: {same:.4%} identical"
        assert ((bits[0] - bits[1]).abs() <= 1).all(), name


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("tiny_llama", PARTS),
        ("tiny_llama", TEConfig()),
        ("tiny_gpt", TEConfig()),
        ("tiny_mixtral", TEConfig()),
        ("tiny_llama", replace(PARTS, fuse_wgrad_accumulation=False)),
    ],
    ids=["parts", "LayerNormMLP", "gpt", "experts", "not fused"],
)
def test_delayed_scaling_runs_as_ours(name: str, options: TEConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps of two micro-batches: losses, forward scales and histories are those of our layers, bit for bit."""
    monkeypatch.setattr(te_kernels, "rounds_first", True)
    own, theirs = models(name, "delayed", options)
    mine, other = buckets_of(own), buckets_of(theirs)
    for seeds in ((1, 2), (3, 4)):
        assert step(own, mine, seeds) == step(theirs, other, seeds)
        ours, found = grads(own), grads(theirs)
        last = [n for n in ours if n.startswith(("layers.1.mlp", "final_norm", "output"))]
        assert len(last) >= 4
        for key in ours:  # before the last MLP the residual gradient is added after rounding, where we add before
            bound = ROUNDED if key in last else 0.1
            error = (ours[key] - found[key]).norm() / ours[key].norm()
            assert error <= bound, f"{key}: {error:.5f}"
    ours, found = state_of(own), state_of(theirs)
    assert list(ours) == list(found)
    for key, tensor in ours.items():
        assert tensor.shape == found[key].shape, key
        if "grad_output" not in key or ".1.mlp" in key:
            assert torch.equal(tensor, found[key]), key
        else:  # one bf16 ulp of an amax, after the flips of single codes that such an ulp brings about
            assert torch.allclose(tensor, found[key], rtol=0.1), key


def test_bf16_runs_as_ours() -> None:
    own, theirs = models("tiny_mixtral", "none")
    mine, other = buckets_of(own), buckets_of(theirs)
    assert step(own, mine, (1, 2)) == step(theirs, other, (1, 2))
    found = grads(theirs)
    for key, ours in grads(own).items():  # three roundings to bf16 a layer that are elsewhere in ours, a weight's last
        assert (ours - found[key]).norm() <= (2 * 3 + 1) * ROUNDED * ours.norm(), key


def test_unrounded_values_are_quantized_as_on_a_gpu() -> None:
    """Without `rounds_first` codes differ from ours: the comparison above can fail."""
    own, theirs = models("tiny_llama", "delayed")
    assert step(own, buckets_of(own), (1,)) != step(theirs, buckets_of(theirs), (1,))
