"""Quantization against the independent numpy reference, and the short cuts that look right and are not."""

import math

import numpy as np
import pytest
import torch

from megafp8.fp8 import TensorSpec, quantize
from megafp8.fp8.formats import E4M3, E5M2, cast
from megafp8.fp8.kernels import encode
from megafp8.fp8.quantized import Operand
from megafp8.fp8.recipe import amax_of, scale_from_amax
from tests.unit.fp8.reference import fake_quantize, scale_for

FORMATS = pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda f: f.name)


def bf16_tensors(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(64, 96, generator=generator).mul(10.0 ** (i % 7 - 3)).bfloat16() for i in range(count)]


@FORMATS
def test_current_scaling_equals_the_reference_in_every_value(fmt):
    for x in bf16_tensors(20):
        wide = x.float().numpy()
        got = quantize(x, TensorSpec(fmt)).dequantize().numpy()
        want = fake_quantize(wide, scale_for(wide, fmt), fmt)
        # one fp32 product of an exact code and scale_inv on our side, a float64 one on the other
        assert np.array_equal(got, want.astype(np.float32))


def test_division_is_not_a_reciprocal_product():
    """A quarter of random scales differ by 1 ulp when 448/amax is computed as (1/amax)*448, torch's `448.0 / t`."""
    amax = torch.rand(10_000, generator=torch.Generator().manual_seed(1)) + 0.1
    right = torch.from_numpy(np.float32(448.0) / amax.numpy())
    assert torch.equal(scale_from_amax(amax, 448.0), right)
    assert ((448.0 / amax) != right).float().mean() > 0.2  # the trap is still there


def test_the_product_is_taken_in_fp32():
    """bf16 times a 0-dim fp32 scale stays bf16 in torch: 3% of the bytes would be wrong."""
    scale = torch.tensor([37.3])
    x = torch.cat([t.flatten() for t in bf16_tensors(5)])
    right = cast(x.float() * scale, E4M3).view(torch.uint8)
    assert torch.equal(encode(x, scale, E4M3).view(torch.uint8), right)
    assert (cast(x * scale[0], E4M3).view(torch.uint8) != right).any()


def test_multiplies_by_scale_never_divides_by_its_inverse():
    differs = 0
    for x in bf16_tensors(100):
        quantized = quantize(x, TensorSpec(E4M3))
        scale = scale_from_amax(amax_of(x), 448.0)
        assert torch.equal(quantized.data.view(torch.uint8), cast(x.float() * scale, E4M3).view(torch.uint8))
        wrong = cast(x.float() / quantized.scale_inv, E4M3).view(torch.uint8)
        differs += int((wrong != quantized.data.view(torch.uint8)).sum())
    assert differs > 0


@FORMATS
def test_zeros_keep_scale_one(fmt):
    quantized = quantize(torch.zeros(16, 16).bfloat16(), TensorSpec(fmt))
    assert quantized.scale_inv.tolist() == [1.0] and quantized.dequantize().count_nonzero() == 0


def test_amax_ignores_nan_and_sees_infinity():
    assert amax_of(torch.tensor([1.0, math.nan, -3.0]).bfloat16()).tolist() == [3.0]
    assert amax_of(torch.tensor([math.nan])).tolist() == [0.0]
    assert amax_of(torch.tensor([1.0, -math.inf])).tolist() == [math.inf]
    assert amax_of(torch.empty(0, 16)).tolist() == [0.0]


def test_tiny_amax_gives_a_finite_scale():
    quantized = quantize(torch.full((16, 16), 1e-40), TensorSpec(E4M3))
    assert quantized.scale_inv.isfinite().all() and quantized.dequantize().isfinite().all()


def test_power_of_two_scales_round_down():
    quantized = quantize(torch.full((16, 16), 3.0), TensorSpec(E4M3, power_2_scale=True))
    assert quantized.scale_inv.tolist() == [2.0**-7]  # 448 / 3 = 149.3 -> 128


def test_columnwise_holds_the_same_bytes():
    quantized = quantize(torch.randn(16, 32), TensorSpec(E4M3))
    columns = quantized.columnwise
    assert torch.equal(columns.contiguous.view(torch.uint8), quantized.data.view(torch.uint8).t())
    assert columns.contiguous.is_contiguous()


@FORMATS
@pytest.mark.parametrize("as_values", [False, True])
def test_over_the_wire_as_bytes_and_back(fmt, as_values):
    codes = torch.arange(256, dtype=torch.uint8).view(fmt.dtype)
    codes = codes[codes.float().isfinite()]
    data = codes.bfloat16() if as_values else codes
    sent = Operand(data, torch.ones(1), TensorSpec(fmt)).to_bytes()
    assert sent.dtype == torch.uint8 and sent.shape == codes.shape
    back = Operand(data[:1], torch.ones(1), TensorSpec(fmt)).with_bytes(sent.view(2, -1)).data
    assert back.dtype == data.dtype and back.shape == (2, len(codes) // 2)
    assert torch.equal(back.float().flatten(), codes.float())
    assert torch.equal(torch.signbit(back.float()).flatten(), torch.signbit(codes.float()))
    nan = torch.tensor([0x7F], dtype=torch.uint8)  # a gradient that broke must stay broken
    assert Operand(data[:1], torch.ones(1), TensorSpec(fmt)).with_bytes(nan).data.float().isnan().all()
