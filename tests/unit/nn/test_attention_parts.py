"""Attention in parts: outputs, log-sum-exps and gradients of any queries against any keys, merged into the whole."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megafp8.nn import attention_blocks as blocks
from megafp8.nn import attention_flash as flash
from megafp8.nn.attention_blocks import Sight
from megafp8.nn.attention_context import merge_
from megafp8.nn.attention_core import fused
from megafp8.nn.dropout import DropoutKey, weight_dropout

Tensor = torch.Tensor
B, G, R, D, E = 2, 2, 3, 8, 6  # value heads narrower than the others


def inputs(length: int, dtype: torch.dtype = torch.float64, width: int = E) -> list[Tensor]:
    generator = torch.Generator().manual_seed(length)
    shapes = [(B, G, length, R, D), (B, G, length, D), (B, G, length, width), (B, G, length, R, width)]
    q, k, v, dout = (torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes)
    return [q / D**0.5, k, v, dout]


def exact(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, factors: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """visible [B, L, K]; factors [B, G, L, R, K]: out [B, G, L, R, E] and lse, nan where nothing is visible."""
    scores = torch.einsum("bglrd,bgkd->bglrk", q, k).masked_fill(~visible[:, None, :, None], float("-inf"))
    p = torch.softmax(scores, -1)
    p = p if factors is None else p * factors
    return torch.einsum("bglrk,bgke->bglre", p, v), torch.logsumexp(scores, -1)


def ids(length: int) -> Tensor:
    return torch.stack([torch.arange(length) * 3 // length, (torch.arange(length) > 4).long()])


def dropped(length: int) -> Any:
    key = DropoutKey(5, torch.tensor([7, 2]))
    places = torch.arange(length)
    return weight_dropout(key, 0.3, "here", groups=G, r=R, first=0, num_heads=G * R, places=places)


@pytest.mark.parametrize("length", [10, 150])
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("dropping", [False, True])
def test_parts_make_the_whole(length: int, documents: bool, dropping: bool) -> None:
    """Queries of the last 3/5 against the first half of the keys, then against the rest up to their own."""
    first, half = length * 2 // 5, length // 2
    q, k, v, dout = inputs(length)
    segments, dropout = ids(length), dropped(length) if dropping else None
    visible = torch.ones(length, length, dtype=torch.bool).tril().expand(B, -1, -1)
    if documents:
        visible = visible & (segments[:, :, None] == segments[:, None, :])
    factors = None if dropout is None else dropout.factors(slice(0, B * G), *[slice(0, length)] * 2, q.dtype)
    factors = None if factors is None else factors.view(B, G, length, R, length)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    expected, _ = exact(*leaves, visible, factors)
    own = expected[:, :, half:]
    own.backward(dout[:, :, half:])

    def sight(queries: slice, keys: slice, causal: bool) -> Sight:
        places = torch.arange(length)
        among = None if dropout is None else dropout.among(places[queries], places[keys])
        return Sight(causal, (segments[:, queries], segments[:, keys]) if documents else None, among)

    later = slice(half, length)
    cuts = [(later, slice(first, length), True), (later, slice(0, first), False)]
    with torch.no_grad():
        parts = [
            blocks.forward(q[:, :, mine], k[:, :, keys], v[:, :, keys], sight(mine, keys, causal))
            for mine, keys, causal in cuts
        ]
        out, lse = (x.clone() for x in parts[0])
        merge_(out, lse, *parts[1])
        # fp64 sums of 150 terms of size 1
        torch.testing.assert_close(out, own, rtol=0, atol=1e-12)
        dq, dk, dv = (torch.zeros_like(x) for x in leaves)
        for mine, keys, causal in cuts:
            given = dout[:, :, mine], q[:, :, mine], k[:, :, keys], v[:, :, keys], out, lse
            part = blocks.backward(*given, sight(mine, keys, causal))
            for total, piece, at in zip((dq, dk, dv), part, (mine, keys, keys), strict=True):
                total[:, :, at] += piece
    for got, leaf in zip((dq, dk, dv), leaves, strict=True):
        torch.testing.assert_close(got, leaf.grad, rtol=0, atol=1e-12)


def test_a_query_that_sees_nothing_counts_nothing() -> None:
    q, k, v, _ = inputs(6)
    segments = torch.tensor([[0] * 6, [1] * 6]), torch.tensor([[0] * 6, [2] * 6])
    out, lse = blocks.forward(q, k, v, Sight(False, segments))
    assert torch.isfinite(lse[0]).all() and (lse[1] == float("-inf")).all() and (out[1] == 0).all()
    total, total_lse = out[:1].clone(), lse[:1].clone()
    merge_(total, total_lse, out[1:], lse[1:])
    assert torch.equal(total, out[:1]) and torch.equal(total_lse, lse[:1])


def test_as_accurate_as_sdpa_in_bf16() -> None:
    """Parts are rounded once more than in SDPA's kernel: errors add in squares, at most 3 times its."""
    reference = inputs(256, width=D)
    leaves = [x.requires_grad_() for x in reference[:3]]
    visible = torch.ones(256, 256, dtype=torch.bool).tril().expand(B, -1, -1)
    expected, _ = exact(*leaves, visible)
    expected.backward(reference[3])
    q, k, v, dout = inputs(256, torch.bfloat16, width=D)
    theirs = [x.clone().requires_grad_() for x in (q, k, v)]
    their_out = fused(*theirs, None)
    their_out.backward(dout.permute(2, 0, 1, 3, 4).flatten(2))
    out, lse = blocks.forward(q, k, v, Sight(True))
    ours = [out, *blocks.backward(dout, q, k, v, out.bfloat16(), lse, Sight(True))]
    sdpa = [their_out.view(256, B, G, R, D).permute(1, 2, 0, 3, 4), *(x.grad for x in theirs)]
    for mine, other, good in zip(ours, sdpa, [expected.detach(), *(x.grad for x in leaves)], strict=True):
        errors = [float((x.detach().double() - good).norm() / good.norm()) for x in (mine, other)]
        assert errors[0] < 3 * errors[1] and errors[0] < 2**-7


class FakeKernels:
    """torch's CUDA kernels by their documented contract, in plain torch: what they are given must make sense."""

    def _scaled_dot_product_flash_attention(
        self, q: Tensor, k: Tensor, v: Tensor, dropout_p: float, is_causal: bool, *, scale: float
    ) -> tuple[Any, ...]:
        assert q.shape[-1] == k.shape[-1] == v.shape[-1] and (dropout_p, scale) == (0.0, 1.0)
        p, lse = self._weights(q, k, self._mask(q, k, is_causal))
        return self._times(p, v), lse, None, None, q.shape[2], k.shape[2], None, None, None

    def _scaled_dot_product_flash_attention_backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cum_q: None, cum_k: None,
        max_q: int, max_k: int, dropout_p: float, is_causal: bool, seed: Tensor, offset: Tensor, *, scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        assert (max_q, max_k) == (q.shape[2], k.shape[2]) and lse.shape == q.shape[:3] and lse.is_contiguous()
        dq, dk, dv = self._gradients(dout, q, k, v, out, lse, self._mask(q, k, is_causal))
        return dq, self._shared(dk, k), self._shared(dv, v)

    def _scaled_dot_product_efficient_attention(
        self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, with_lse: bool, dropout_p: float, is_causal: bool, *,
        scale: float,
    ) -> tuple[Any, ...]:  # fmt: skip
        assert q.shape[1] == k.shape[1] and with_lse and not is_causal and bias.stride(-2) % 8 == 0
        p, lse = self._weights(q, k, bias)
        padding = -lse.shape[-1] % 32
        return p @ v, torch.nn.functional.pad(lse, (0, padding), value=float("inf")), None, None

    def _scaled_dot_product_efficient_attention_backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, out: Tensor, lse: Tensor, seed: Tensor,
        offset: Tensor, dropout_p: float, wanted: list[bool], is_causal: bool, *, scale: float,
    ) -> tuple[Any, ...]:  # fmt: skip
        assert lse.shape[-1] % 32 == 0
        return *self._gradients(dout, q, k, v, out, lse[..., : q.shape[2]], bias), None

    @staticmethod
    def _mask(q: Tensor, k: Tensor, causal: bool) -> Tensor:
        length, keys = q.shape[2], k.shape[2]
        mask = torch.zeros(length, keys, dtype=q.dtype)
        hidden = torch.ones_like(mask, dtype=torch.bool).triu(keys - length + 1)
        return mask.masked_fill(hidden, float("-inf")) if causal else mask

    @staticmethod
    def _weights(q: Tensor, k: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        scores = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).transpose(2, 3) + bias
        return torch.softmax(scores, -1), torch.logsumexp(scores, -1)

    @staticmethod
    def _times(p: Tensor, v: Tensor) -> Tensor:
        return p @ v.repeat_interleave(p.shape[1] // v.shape[1], 1)

    @staticmethod
    def _gradients(
        dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, bias: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        p = (q @ k.transpose(2, 3) + bias - lse.to(q.dtype)[..., None]).exp()
        ds = p * (dout @ v.transpose(2, 3) - (dout * out).sum(-1, keepdim=True))
        return ds @ k, ds.transpose(2, 3) @ q, p.transpose(2, 3) @ dout

    @staticmethod
    def _shared(gradient: Tensor, x: Tensor) -> Tensor:
        return gradient.unflatten(1, (x.shape[1], -1)).sum(2)


@pytest.mark.parametrize("width", [E, D])
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_gpu_kernels_are_called_right(
    width: int, documents: bool, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later queries against more keys, through kernels that behave as the library's do."""
    monkeypatch.setattr(flash, "_ATEN", FakeKernels())
    q, k, v, dout = inputs(20, width=width)
    q, dout = q[:, :, 8:], dout[:, :, 8:]
    sight = Sight(causal, (ids(20)[:, 8:], ids(20)) if documents else None)
    out, lse = blocks.forward(q, k, v, sight)
    got, got_lse = flash.forward(q, k, v, sight)
    torch.testing.assert_close(got, out, rtol=0, atol=1e-12)
    torch.testing.assert_close(got_lse, lse, rtol=0, atol=1e-12)
    expected = blocks.backward(dout, q, k, v, out, lse, sight)
    for mine, other in zip(flash.backward(dout, q, k, v, out, lse, sight), expected, strict=True):
        # the log-sum-exp goes through fp32 there: 2^-24 of a value up to 4
        torch.testing.assert_close(mine.double(), other, rtol=1e-5, atol=1e-5)


def test_what_the_gpu_kernels_serve() -> None:
    def like(width: int, dtype: torch.dtype = torch.bfloat16, cuda: bool = True) -> Any:
        return SimpleNamespace(shape=(1, 1, 4, 1, width), dtype=dtype, is_cuda=cuda)

    assert flash.serves(like(64), like(32), False) and flash.serves(like(192), like(128), False)
    assert not flash.serves(like(64), like(64), True) and not flash.serves(like(60), like(64), False)
    assert not flash.serves(like(264), like(64), False) and not flash.serves(like(64, cuda=False), like(64), False)
    assert not flash.serves(like(64, torch.float32), like(64), False)
