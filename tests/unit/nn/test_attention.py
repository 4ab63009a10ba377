"""The blocked core against torch's SDPA: values, gradients, documents; and that it is as accurate in bf16."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from megafp8.nn import attention_blocks as blocks
from megafp8.nn.attention_core import fused

B, G, R, D = 2, 2, 3, 16


def inputs(length: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(length)
    shapes = [(B, G, length, R, D), (B, G, length, D), (B, G, length, D)]
    tensors = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    tensors[0] /= D**0.5
    return [x.to(dtype).requires_grad_() for x in tensors]


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments: torch.Tensor | None) -> torch.Tensor:
    q, k, v = q.double(), k.double(), v.double()
    mask = torch.ones(k.shape[2], k.shape[2], dtype=torch.bool).tril()[None, None]
    if segments is not None:
        mask = mask & (segments[:, None, :, None] == segments[:, None, None, :])
    q = q.permute(0, 1, 3, 2, 4).flatten(1, 2)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=1.0, enable_gqa=True)
    return out.permute(2, 0, 1, 3).flatten(2)


@pytest.mark.parametrize("length", [7, 128, 200, 300])
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("chunk", [1 << 10, 1 << 21])
def test_blocked_is_sdpa(length: int, documents: bool, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "_CHUNK", chunk)  # small: every group in a chunk of its own
    segments = (torch.arange(length) * 3 // length).expand(B, -1) if documents else None
    ours = inputs(length, torch.float32)
    out = blocks.blocked(*ours, segments)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    out.backward(grad)
    theirs = inputs(length, torch.float32)
    expected = exact(*theirs, segments)
    expected.backward(grad.double())
    # sums of up to 300 products of size 1 in fp32: 300 * 2^-24 = 2e-5
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=2e-5)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-4, atol=1e-4)


def test_as_accurate_as_sdpa_in_bf16() -> None:
    """Scores and weights are rounded once more than in SDPA's kernel: errors add in squares, at most 3 times its."""
    errors = []
    for core in (blocks.blocked, fused):
        tensors = inputs(256, torch.bfloat16)
        out = core(*tensors, None)
        reference = [x.detach().double().requires_grad_() for x in tensors]
        expected = exact(*reference, None)
        grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
        out.backward(grad)
        expected.backward(grad.double())
        pairs = [(x.grad, y.grad) for x, y in zip(tensors, reference, strict=True)]
        pairs.append((out.detach(), expected.detach()))
        errors.append([float((a.double() - b).norm() / b.norm()) for a, b in pairs])
    for mine, theirs in zip(*errors, strict=True):
        assert mine < 3 * theirs
        assert mine < 2**-7  # and small in itself: two roundings to bf16
