"""Number formats: E4M3, E5M2, E8M0, E2M1, UE4M3 and BF16, their limits, tables and saturating casts.

No scale lives here (that is a recipe's business) and no GEMM. The casts follow what NVIDIA's `cuda_fp8.hpp` does
under SATFINITE: round to nearest even, anything beyond the largest value (and infinity) becomes that value, NaN
stays NaN. Stochastic rounding draws from a hash of a seed and the element's index, so there is no generator state.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Format:
    """A small floating-point format.

    Attributes:
        name: as people write it, e.g. "E4M3".
        exponent_bits, mantissa_bits: a sign bit comes on top (E8M0 and UE4M3 have none).
        bias: what is subtracted from the exponent field.
        max: largest finite value; casts saturate to it.
        dtype: torch's dtype that holds the codes, None where torch has none.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    max: float
    dtype: torch.dtype | None
    signed: bool = True

    @property
    def bits(self) -> int:
        return int(self.signed) + self.exponent_bits + self.mantissa_bits

    @property
    def min_exponent(self) -> int:
        """Exponent of the smallest normal value, log2."""
        return -self.bias if self.mantissa_bits == 0 else 1 - self.bias  # E8M0 has no subnormals and no zero

    @property
    def smallest_normal(self) -> float:
        return math.ldexp(1.0, self.min_exponent)

    @property
    def smallest(self) -> float:
        """Smallest value above zero (a subnormal where the format has them)."""
        return math.ldexp(1.0, self.min_exponent - self.mantissa_bits)


# OCP 8-bit Floating Point Specification rev. 1.0: E4M3 spends no code on infinity, E5M2 is IEEE-like.
E4M3 = Format("E4M3", 4, 3, 7, 448.0, torch.float8_e4m3fn)
E5M2 = Format("E5M2", 5, 2, 15, 57344.0, torch.float8_e5m2)
# OCP Microscaling Formats rev. 1.0: a scale, powers of two only, code 255 is NaN.
E8M0 = Format("E8M0", 8, 0, 127, 2.0**127, torch.float8_e8m0fnu, signed=False)
E2M1 = Format("E2M1", 2, 1, 1, 6.0, None)
# NVFP4's block scales: E4M3 without its sign, held in bytes of E4M3.
UE4M3 = Format("UE4M3", 4, 3, 7, 448.0, torch.float8_e4m3fn, signed=False)
BF16 = Format("BF16", 8, 7, 127, 3.3895313892515355e38, torch.bfloat16)

FORMATS: dict[str, Format] = {f.name: f for f in (E4M3, E5M2, E8M0, E2M1, UE4M3, BF16)}


def clamp(x: torch.Tensor, fmt: Format) -> torch.Tensor:
    """`x` as fp32, limited to the finite range of `fmt`; NaN stays NaN. fp32, same shape."""
    return x.float().clamp(-fmt.max if fmt.signed else 0.0, fmt.max)


def cast(x: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Round to nearest even and saturate.

    Args:
        x: any floating dtype, any shape; taken to fp32 first.

    Returns:
        Codes of dtype `fmt.dtype`, same shape. Not for E2M1 and E8M0, see `encode_e2m1`, `encode_e8m0`.
    """
    assert fmt.dtype is not None and fmt != E8M0, f"{fmt.name} has no direct cast"
    # torch's own cast overflows to infinity (E5M2) or, in old releases, NaN (E4M3): clamp before the cast
    return clamp(x, fmt).to(fmt.dtype)


def round_to(x: torch.Tensor, fmt: Format) -> torch.Tensor:
    """fp32 `x` rounded to the values of `fmt` by arithmetic, equal to `cast(x, fmt).float()` bit for bit.

    Exists because compilers vectorise it, which they do not do for torch's E5M2 cast: 0.3 instead of 2 ns a value.

    Args:
        x: fp32, any shape.
    """
    return rounder(fmt)(x)


def rounder(fmt: Format) -> Callable[[torch.Tensor], torch.Tensor]:
    """`round_to` for one format, its constants plain floats so that torch.compile bakes them in.

    The unit in the first place by Rump, Ogita, Oishi, "Accurate floating-point summation part I" (2008), algorithm
    3.6; it must not be contracted to FMAs. Adding and taking away 1.5 * 2**23 units of the last kept place makes
    fp32's own rounding the one we want.
    """
    top, floor = fmt.max, fmt.smallest_normal
    units = 1.5 * 2.0 ** (23 - fmt.mantissa_bits)

    def round_values(x: torch.Tensor) -> torch.Tensor:
        v = x.clamp(-top, top)
        q = v.abs().clamp(min=floor) * (2.0**23 + 1.0)
        push = (q - q * (1.0 - 2.0**-24)) * units
        return torch.copysign((v + push) - push, v)

    return round_values


def round_stochastic(x: torch.Tensor, fmt: Format, noise: torch.Tensor) -> torch.Tensor:
    """`x` rounded to one of its two neighbours in `fmt`, the nearer the likelier, so that the mean is `x`.

    Args:
        x: any floating dtype, any shape; saturates like `cast`, NaN stays NaN.
        noise: fp32 in [0, 1), same shape, of `uniform_noise`: rounds up in magnitude where it is below the distance to
            the lower neighbour, in units of the step.

    Returns:
        Values of `fmt`, fp32, same shape. Every operation is exact: only the choice is by chance.
    """
    v = clamp(x, fmt)
    magnitude = v.abs()
    # the power of two at or below: the bits of the exponent alone
    power = (magnitude.view(torch.int32) & 0x7F800000).view(torch.float32).clamp(min=fmt.smallest_normal)
    step = power * 2.0**-fmt.mantissa_bits
    steps = magnitude / step
    lower = steps.floor()
    rounded = (lower + (steps - lower > noise).float()) * step
    return torch.where(v.isnan(), v, torch.copysign(rounded, v))


def stochastic_rounder(fmt: Format) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """`round_stochastic` for one format with few exponents, which compilers vectorise: steps found by comparisons."""
    exponents = range(fmt.min_exponent, math.frexp(fmt.max)[1])
    top, lowest = fmt.max, 2.0 ** (fmt.min_exponent - fmt.mantissa_bits)
    binades = [(2.0**e, 2.0 ** (e - fmt.mantissa_bits), 2.0 ** (fmt.mantissa_bits - e)) for e in exponents][1:]

    def round_values(x: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        v = x.clamp(-top, top)
        magnitude = v.abs()
        step, inverse = torch.full_like(v, lowest), torch.full_like(v, 1.0 / lowest)
        for begin, step_there, inverse_there in binades:
            step = torch.where(magnitude >= begin, step_there, step)
            inverse = torch.where(magnitude >= begin, inverse_there, inverse)
        steps = magnitude * inverse
        lower = steps.floor()
        return torch.copysign(torch.where(steps - lower > noise, lower + 1.0, lower) * step, v)

    return round_values


_LOW_32 = 0xFFFFFFFF


def _mixed(h: torch.Tensor) -> torch.Tensor:
    """32 bits (in int64) to 32 bits that look random, one to one: "lowbias32" of Wellons' hash prospector.

    The second factor is 0x846CA68B less 2**32: the same bits, and no product overflows 64 bits.
    """
    h = ((h ^ (h >> 16)) * 0x7FEB352D) & _LOW_32
    h = ((h ^ (h >> 15)) * (0x846CA68B - (1 << 32))) & _LOW_32
    return h ^ (h >> 16)


def uniform_noise(seed: torch.Tensor, shape: tuple[int, ...] | torch.Size) -> torch.Tensor:
    """Uniform noise for `round_stochastic`, a function of the seed and the element's place alone.

    Args:
        seed: int64 [1].
        shape: what to fill; the index of an element counts along the last dim first.

    Returns:
        fp32 of `shape`: odd multiples of 2**-24 in (0, 1), so that a probability is met within 2**-24.
    """
    index = torch.arange(math.prod(shape), dtype=torch.int64, device=seed.device)
    first, second = noise_keys(seed)
    # two rounds with two keys: with one, another seed would give the same numbers in another order
    bits = _mixed((_mixed((index ^ first) & _LOW_32) + second) & _LOW_32)
    return _fraction(bits).view(shape)


def noise_keys(seed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The two keys of `uniform_noise`, 32 bits in int64 [1]."""
    first = _mixed((seed + 0x9E3779B9) & _LOW_32)
    return first, _mixed(first ^ ((seed >> 32) & _LOW_32))


def noise_of(index: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """`uniform_noise` of elements by their index (int32, the low 32 bits), for compiled code: twice as fast in int32.

    Products wrap around, as the vector instructions that torch.compile emits do; a test compares every bit.
    """
    return _fraction(_mixed_int32(_mixed_int32(index ^ first.int()) + second.int()))


def _mixed_int32(h: torch.Tensor) -> torch.Tensor:
    # the shifts of int32 copy the sign: the masks clear it
    h = (h ^ ((h >> 16) & 0xFFFF)) * 0x7FEB352D
    h = (h ^ ((h >> 15) & 0x1FFFF)) * (0x846CA68B - (1 << 32))
    return h ^ ((h >> 16) & 0xFFFF)


def _fraction(bits: torch.Tensor) -> torch.Tensor:
    return (((bits >> 8) & 0xFFFFFF) | 1).float() * 2.0**-24


def pack_e2m1(codes: torch.Tensor) -> torch.Tensor:
    """E2M1 codes [R, C], uint8 0..15, two to a byte [R, ceil(C / 2)]: the even column in the low nibble."""
    low, high = codes[:, ::2], codes[:, 1::2]
    return low | (torch.nn.functional.pad(high, (0, low.shape[1] - high.shape[1])) << 4)


def unpack_e2m1(packed: torch.Tensor) -> torch.Tensor:
    """`pack_e2m1` undone: uint8 [R, B] to [R, 2 B]."""
    return torch.stack([packed & 0xF, packed >> 4], dim=2).flatten(1)


def encode_e2m1(x: torch.Tensor) -> torch.Tensor:
    """fp32 to E2M1 codes 0..15 in the low nibble of uint8, same shape; saturates, ties to even, NaN to +6.

    Source: NVIDIA `cuda_fp4.hpp`, `__nv_cvt_float_to_fp4` with round-to-nearest.
    """
    magnitude = torch.nan_to_num(x.float().abs(), nan=6.0, posinf=6.0)
    code = torch.zeros_like(magnitude, dtype=torch.uint8)
    # midpoints between neighbours; a tie goes to the even code, so a midpoint above an odd code rounds up
    for index, midpoint in enumerate((0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)):
        above = magnitude >= midpoint if index % 2 else magnitude > midpoint
        code += above.to(torch.uint8)
    return code | ((torch.signbit(x) & ~torch.isnan(x)).to(torch.uint8) << 3)


def encode_e8m0(x: torch.Tensor) -> torch.Tensor:
    """Non-negative fp32 to the E8M0 code of the next power of two upwards, uint8, same shape.

    NaN gives 255, infinity 254, 0 gives 0. Source: Transformer Engine `float_to_e8m0`, util/ptx_arch_spec.cuh.
    """
    bits = x.float().contiguous().view(torch.int32)
    exponent, mantissa = (bits >> 23) & 0xFF, bits & 0x7FFFFF
    stays = (mantissa == 0) | (exponent == 254) | ((exponent == 0) & (mantissa <= 0x400000))
    code = torch.where(stays, exponent, exponent + 1)
    code = torch.where(torch.isinf(x), 254, code)
    return torch.where(torch.isnan(x), 255, code).to(torch.uint8)


@functools.cache
def table(fmt: Format) -> torch.Tensor:
    """The value of every code of a format of at most 8 bits, fp32 [2**bits]; NaN and infinity where they are."""
    assert fmt.bits <= 8, f"{fmt.name} has 2**{fmt.bits} codes"
    codes = torch.arange(2**fmt.bits, dtype=torch.int64)
    exponent = (codes >> fmt.mantissa_bits) & (2**fmt.exponent_bits - 1)
    fraction = (codes & (2**fmt.mantissa_bits - 1)).double() / 2**fmt.mantissa_bits
    if fmt == E8M0:
        return torch.where(codes == 255, math.nan, torch.exp2((codes - fmt.bias).double())).float()
    normal = torch.exp2((exponent - fmt.bias).double()) * (1.0 + fraction)
    value = torch.where(exponent == 0, fmt.smallest_normal * fraction, normal)
    if fmt == E5M2:
        special = torch.where(fraction == 0, math.inf, math.nan)
        value = torch.where(exponent == 31, special.double(), value)
    if fmt in (E4M3, UE4M3):
        value = torch.where((codes & 0x7F) == 0x7F, math.nan, value)
    negative = codes >= 2 ** (fmt.exponent_bits + fmt.mantissa_bits)
    return torch.where(negative, -value, value).float()


def finite_values(fmt: Format) -> torch.Tensor:
    """The distinct finite values in rising order, fp32; both zeros count once."""
    values = table(fmt)
    return torch.unique(values[torch.isfinite(values)] + 0.0)


def nearest_value(value: float, fmt: Format) -> float:
    """What `value` becomes in `fmt` with scale 1."""
    x = torch.tensor([value], dtype=torch.float32)
    if fmt == E2M1:
        return float(table(fmt)[encode_e2m1(x).long()])
    if fmt == E8M0:
        return float(table(fmt)[encode_e8m0(x.abs()).long()])
    return float(cast(x, fmt).float())
