"""Limits, tables and single values of the formats."""

import math

import numpy as np
import pytest
import torch

from megafp8.fp8.formats import BF16, E2M1, E4M3, E5M2, E8M0, cast, finite_values, nearest_value, round_to, table
from tests.unit.fp8.reference import round_by_search


@pytest.mark.parametrize(
    ("fmt", "largest", "normal", "smallest", "num_finite"),
    # counts: E4M3 256 - 2 NaN - the second zero; E5M2 256 - 2 infinities - 6 NaN - the second zero
    [(E4M3, 448.0, 2.0**-6, 2.0**-9, 253), (E5M2, 57344.0, 2.0**-14, 2.0**-16, 247), (E2M1, 6.0, 1.0, 0.5, 15)],
)
def test_limits(fmt, largest, normal, smallest, num_finite):
    values = finite_values(fmt)
    assert (fmt.max, fmt.smallest_normal, fmt.smallest) == (largest, normal, smallest)
    assert len(values) == num_finite
    assert values.max() == largest and values.min() == -largest
    assert values[values > 0].min() == smallest


def test_e8m0_is_powers_of_two():
    values = table(E8M0)
    assert values[127] == 1.0 and values[0] == 2.0**-127 and values[254] == 2.0**127 and values[255].isnan()


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
