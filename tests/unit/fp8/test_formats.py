"""Limits, tables and single values of the formats."""

import math

import numpy as np
import pytest
import torch

from megafp8.fp8.formats import (
    BF16,
    E2M1,
    E4M3,
    E5M2,
    E8M0,
    UE4M3,
    cast,
    finite_values,
    nearest_value,
    pack_e2m1,
    round_stochastic,
    round_to,
    table,
    uniform_noise,
    unpack_e2m1,
)
from tests.unit.fp8.reference import round_by_search


@pytest.mark.parametrize(
    ("fmt", "largest", "normal", "smallest", "num_finite"),
    # counts: E4M3 256 - 2 NaN - the second zero; E5M2 256 - 2 infinities - 6 NaN - the second zero
    # UE4M3 128 - 1 NaN
    [
        (E4M3, 448.0, 2.0**-6, 2.0**-9, 253),
        (E5M2, 57344.0, 2.0**-14, 2.0**-16, 247),
        (E2M1, 6.0, 1.0, 0.5, 15),
        (UE4M3, 448.0, 2.0**-6, 2.0**-9, 127),
    ],
)
def test_limits(fmt, largest, normal, smallest, num_finite):
    values = finite_values(fmt)
    assert (fmt.max, fmt.smallest_normal, fmt.smallest) == (largest, normal, smallest)
    assert len(values) == num_finite
    assert values.max() == largest and values.min() == (-largest if fmt.signed else 0.0)
    assert values[values > 0].min() == smallest


def test_e8m0_is_powers_of_two():
    values = table(E8M0)
    assert values[127] == 1.0 and values[0] == 2.0**-127 and values[254] == 2.0**127 and values[255].isnan()
    assert E8M0.smallest_normal == E8M0.smallest == 2.0**-127
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    assert torch.equal(codes.view(torch.float8_e8m0fnu).float()[:255], values[:255])


def test_ue4m3_is_e4m3_without_sign():
    assert torch.equal(table(UE4M3).view(torch.int32), table(E4M3)[:128].view(torch.int32))
    assert cast(torch.tensor([-1.0, 500.0, 1.06]), UE4M3).float().tolist() == [0.0, 448.0, 1.0]


def test_pairs_of_e2m1_codes_pack_and_unpack():
    codes = torch.arange(16, dtype=torch.uint8).view(2, 8)
    assert pack_e2m1(codes)[0].tolist() == [0x10, 0x32, 0x54, 0x76]
    assert torch.equal(unpack_e2m1(pack_e2m1(codes)), codes)
    assert pack_e2m1(codes[:, :3])[1].tolist() == [0x98, 0x0A]


@pytest.mark.parametrize("fmt", [E4M3, E5M2, E2M1], ids=lambda f: f.name)
def test_stochastic_rounding_takes_a_neighbour_with_the_right_chance(fmt):
    values = finite_values(fmt)
    generator = torch.Generator().manual_seed(3)
    edge, near_zero = fmt.max * 1.2, fmt.smallest * 3
    x = torch.cat([torch.empty(40).uniform_(-e, e, generator=generator) for e in (edge, near_zero, fmt.max / 8)])
    x[:2] = torch.tensor([math.nan, -math.inf])
    draws = 4000
    noise = uniform_noise(torch.tensor([7]), (draws, len(x)))
    got = round_stochastic(x.expand(draws, -1), fmt, noise)
    assert got[:, 0].isnan().all() and (got[:, 1] == -fmt.max).all()
    x, got = x[2:].clamp(-fmt.max, fmt.max), got[:, 2:]
    above = torch.searchsorted(values, x).clamp(1, len(values) - 1)
    low, high = values[above - 1], values[above]
    assert ((got == low) | (got == high)).all()
    share = (got == high).double().mean(dim=0)
    chance = (x.double() - low) / (high - low).double()
    # Hoeffding for the 118 elements at once, with probability 1 - 1e-9; the noise's grain adds 2**-24
    bound = math.sqrt(math.log(2 * 118 / 1e-9) / (2 * draws)) + 2.0**-24
    assert (share - chance).abs().max() <= bound


def test_noise_is_uniform_and_without_memory():
    """Also of seeds side by side, which training uses, and of elements side by side."""
    count = 1 << 18
    first, second = (uniform_noise(torch.tensor([seed]), (count,)).double() for seed in (0, 1))
    high = uniform_noise(torch.tensor([1 << 32]), (count,)).double()
    for noise in (first, second, high):
        assert noise.min() > 0 and noise.max() < 1
        # six standard deviations of a mean of uniforms (variance 1/12) and of counts in 64 bins
        assert abs(noise.mean() - 0.5) <= 6 * math.sqrt(1 / 12 / count)
        bins = torch.histc(noise, 64, 0, 1)
        assert (bins - count / 64).abs().max() <= 6 * math.sqrt(count / 64)
    # a correlation of independent uniforms has standard deviation 1 / sqrt(count)
    pairs = [(first, second), (first, high), (first[1:], first[:-1]), (first[64:], first[:-64])]
    for a, b in pairs:
        correlation = ((a - a.mean()) * (b - b.mean())).mean() * 12
        assert abs(correlation) <= 6 / math.sqrt(len(a))
    assert len(first.unique()) > 0.98 * count  # 2**18 draws of 2**23 values: 1.6 % fall on one another
    # another seed is not the same numbers in another order (birthday: 2**18 * 2**18 / 2**23 = 2**13 shared values)
    shared = torch.isin(first, second).sum()
    assert shared <= 1.1 * count * count / 2**23


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda f: f.name)
def test_stochastic_rounding_with_noise_of_a_half_is_nearest_but_for_ties(fmt):
    x = torch.randn(10_000, generator=torch.Generator().manual_seed(4)) * fmt.max / 3
    rounded = round_stochastic(x, fmt, torch.full_like(x, 0.5))
    nearest = cast(x, fmt).float()
    differs = rounded != nearest
    middle = (rounded[differs] + nearest[differs]) / 2
    assert torch.equal(middle, x[differs])


def test_the_articles_example():
    """4.543 is 0100000010010001 in BF16; E4M3 comes closest with 4.5, E5M2 with 5."""
    assert (nearest_value(4.543, E4M3), nearest_value(4.543, E5M2), nearest_value(4.543, E2M1)) == (4.5, 5.0, 4.0)
    bits = torch.tensor(nearest_value(4.543, BF16)).bfloat16().view(torch.uint16)
    assert f"{int(bits):016b}" == "0100000010010001"


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda f: f.name)
def test_casts_saturate_and_keep_nan(fmt):
    x = torch.tensor([math.inf, -math.inf, 1e30, -1e30, fmt.max * 1.07, math.nan, 0.0, -0.0])
    values = cast(x, fmt).float()
    assert values[:5].tolist() == [fmt.max, -fmt.max, fmt.max, -fmt.max, fmt.max]
    assert values[5].isnan() and torch.signbit(values[7]) and not torch.signbit(values[6])
    # the mistake this guards against: torch alone makes infinities of E5M2
    assert torch.tensor([61440.0]).to(torch.float8_e5m2).float().isinf()


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda f: f.name)
def test_random_fp32_bits_round_as_the_search_does(fmt):
    bits = torch.randint(-(2**31), 2**31 - 1, (200_000,), generator=torch.Generator().manual_seed(1))
    x = bits.to(torch.int32).view(torch.float32)
    x = torch.cat([x, torch.randn(200_000) * fmt.smallest_normal, torch.randn(200_000) * fmt.max / 3])
    x = x[x.isfinite()]
    want = torch.from_numpy(round_by_search(x.double().numpy(), fmt)).float()
    for got in (cast(x, fmt).float(), round_to(x, fmt)):
        assert torch.equal(got.view(torch.int32), want.view(torch.int32))


def test_the_search_itself_breaks_ties_to_even():
    ties = np.array([2.0**-10, 3 * 2.0**-10, 17.0, 19.0, -17.0])  # E4M3: halves of the smallest, and of 16..18..20
    assert round_by_search(ties, E4M3).tolist() == [0.0, 2.0**-8, 16.0, 20.0, -16.0]
