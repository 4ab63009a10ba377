"""DotProductAttention gets q, k, v and documents as it wants them, and the loss its logits: against our own core.

By the one attention of Transformer Engine that is written in Python (its unfused one), on the stub.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from megafp8.core.config import build as make
from megafp8.models.builder import build
from megafp8.models.config import ModelConfig
from megafp8.models.decoder import Decoder
from megafp8.models.families import preset
from megafp8.nn.attention_core import AttentionCore
from megafp8.nn.precision import PrecisionConfig
from megafp8.nn.te_config import TEConfig
from tests.contract.te_stub import transformer_engine

Tensor = torch.Tensor
LENGTH = 32


@pytest.fixture(scope="module", autouse=True)
def te() -> Iterator[Any]:
    with transformer_engine() as module, mock.patch("megafp8.nn.te.gpu_problem", lambda device: None):
        yield module


@pytest.fixture(autouse=True)
def unfused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"NVTE_FLASH_ATTN": "0", "NVTE_FUSED_ATTN": "0", "NVTE_UNFUSED_ATTN": "1"}.items():
        monkeypatch.setenv(name, value)


def models(name: str, **options: Any) -> list[Decoder]:
    config = make(ModelConfig, preset(name))
    moe = replace(config.moe, first_dense_layers=0) if config.moe.num_experts else config.moe
    config = replace(config, num_layers=1, moe=moe)
    return [build(config, precision=p) for p in (None, PrecisionConfig(backend="te", te=TEConfig(**options)))]


@pytest.mark.parametrize("name", ["tiny_llama", "tiny_qwen3", "tiny_deepseek"])
@pytest.mark.parametrize("documents", [False, True])
def test_attention_is_that_of_our_core(name: str, documents: bool) -> None:
    ids = torch.tensor([[0] * 10 + [1] * 22, [3] * LENGTH]) if documents else None
    tokens, found = torch.zeros(2, LENGTH, dtype=torch.int64), []
    for model in models(name):
        generator = torch.Generator().manual_seed(5)
        x = torch.randn(LENGTH, 2, model.config.hidden_size, generator=generator).bfloat16().requires_grad_()
        layer, context = model.layers[0], model._context(tokens, ids, None, None, 0)
        own = mock.patch.object(AttentionCore, "__call__", side_effect=AssertionError("our core was called"))
        with own if len(found) else mock.patch.dict({}):
            y = layer.attention(layer.attention_norm(x, None)[1], context)
        y.backward(torch.randn(y.shape, generator=generator).bfloat16())
        found.append((y, x.grad, layer.attention.out.weight.grad))
    for ours, theirs in zip(*found, strict=True):
        # scores, weights and their gradients are rounded to bf16 here and kept in fp32 there: 2**-9 each, which
        # five products in a row at most add up
        assert (ours - theirs).float().norm() <= 5 * 2.0**-9 * ours.float().norm()


@pytest.mark.parametrize("name", ["tiny_llama", "tiny_gpt"])
def test_the_fused_cross_entropy_gives_our_loss(name: str, te: Any) -> None:
    """The kernel is Triton's; what it is called with, and what becomes of its result, is ours."""

    def kernel(inp: Tensor, target: Tensor, **more: Any) -> Tensor:
        assert more == {"dist_process_group": None, "ignore_idx": -100, "overwrite_input": True}
        flat = F.cross_entropy(inp.float().flatten(0, 1), target.flatten(), reduction="none", ignore_index=-100)
        return flat.view(target.shape)

    # LayerNormMLP would compile bias and GELU in bf16 for a GPU
    own, theirs = models(name, cross_entropy=True, layernorm_mlp=False)
    for model in (own, theirs):
        model.layers[0].attention.core = own.layers[0].attention.core
    tokens = torch.randint(0, own.config.vocab_size, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    targets = torch.where(tokens % 5 == 0, -100, tokens.roll(-1, 1))
    found = []
    with mock.patch.object(te, "parallel_cross_entropy", side_effect=kernel) as called:
        for model in (own, theirs):
            loss, count = model(tokens, targets)
            loss.backward()
            weight = model.embedding.weight if model.output.weight is None else model.output.weight
            found.append((loss.detach(), count, weight.grad.float()))
    assert called.call_count == 1
    assert found[0][1] == found[1][1] == (targets >= 0).sum()
    assert torch.allclose(found[0][0], found[1][0], rtol=1e-5)  # the same bf16 logits, summed in fp32 in another order
    # gradients of the logits are bf16 in both, 2**-9, and so is the product
    assert (found[0][2] - found[1][2]).norm() <= 2 * 2.0**-9 * found[0][2].norm()
