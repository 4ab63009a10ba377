"""Narrow forms of Adam's moments: FP8 codes with one power-of-two scale a block, and bf16; how they are read, rounded.

Formats as Fishman et al. 2024 (arXiv 2409.12517, section 5): the mean gradient in E4M3, the mean squared gradient in
E5M2, whose 32 octaves the squares need. A moment moves by 1 - beta of itself a step, less than half the distance
between two codes, so that rounding to nearest would hold it where it is: rounding is stochastic. The random bits come
from a parameter's name, the step and the element's place in the global tensor, so that copies of an element agree on
all ranks, and any cut of a tensor rounds it alike.

Scales are powers of two: rounding then does not depend on the block, save for values far below its largest, and every
value is a bf16 number, which is what a checkpoint holds. All arithmetic is elementwise fp32 and int32 that compilers
vectorise; products in reading and rounding are exact, so that no contraction to FMAs changes them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from megafp8.fp8.formats import E4M3, E5M2, Format
from megafp8.optim.config import MOMENT_BLOCK

Tensor = torch.Tensor

_LEAST = 32
_EXPONENT = 0x7F800000  # of an fp32 number
_LARGEST = 3.3895313892515355e38  # bf16's largest: what a larger moment becomes


def block_width(columns: int) -> int:
    """Elements of a block where the last dim has so many: the most up to 128 that divide it; all where few do."""
    if columns <= MOMENT_BLOCK:
        return max(1, columns)
    return next((width for width in range(MOMENT_BLOCK, _LEAST - 1, -1) if columns % width == 0), columns)


class Form(NamedTuple):
    """How a moment is stored.

    Attributes:
        dtype: of the data, which has the moment's shape.
        read: (data [B, W], exponents uint8 [B, 1]) -> fp32 [B, W].
        write: (values fp32 [B, W], uniform fp32 in (0, 1) of 16 bits [B, W]) -> data, exponents. 1/2 rounds to nearest.
        scaled: whether blocks have exponents; else there are none, [0, 1].
    """

    dtype: torch.dtype
    read: Callable[[Tensor, Tensor], Tensor]
    write: Callable[[Tensor, Tensor], tuple[Tensor, Tensor | None]]
    scaled: bool


def random_bits(first: Tensor, width: int, seed: Tensor) -> Tensor:
    """32 random bits for each element of blocks that begin at the global indices `first` int32 [B, 1] -> int32 [B, W].

    `seed` is int32 [1]. Murmur3's finalizer (Appleby, public domain) of index times an odd number plus seed.
    """
    index = first + torch.arange(width, dtype=torch.int32, device=first.device)
    x = index * -1640531527 + seed
    x = (x ^ ((x >> 16) & 0xFFFF)) * -2048144789
    x = (x ^ ((x >> 13) & 0x7FFFF)) * -1028477387
    return x ^ ((x >> 16) & 0xFFFF)


def uniform(bits: Tensor) -> Tensor:
    """The low 16 of `bits` as the middle of one of 65536 parts of (0, 1): a value that needs no rounding stays."""
    return ((bits & 0xFFFF).float() + 0.5) * 2.0**-16


def _power(exponent: Tensor) -> Tensor:
    """2**exponent, for int32 in [-126, 127]."""
    return ((exponent + 127) << 23).view(torch.float32)


def _fp8(fmt: Format, *, signed: bool) -> Form:
    """Codes of `fmt`, as uint8. Unsigned values above 0 never become 0: a step divides by their root."""
    mantissa, smallest, bias = fmt.mantissa_bits, fmt.min_exponent, fmt.bias
    top = int(fmt.max).bit_length() - 1  # both formats' largest value is 1.75 * 2**top
    lowest = -126 - (smallest - mantissa)  # so that every value is a normal number of bf16

    def read(data: Tensor, exponents: Tensor) -> Tensor:
        code = data.to(torch.int32)
        magnitude = code & 0x7F
        exponent = (magnitude >> mantissa).clamp(min=1)
        units = (magnitude - ((exponent - 1) << mantissa)).float()
        value = units * _power(exponent - bias - mantissa) * _power(exponents.to(torch.int32) - 127)
        return torch.where(code > 0x7F, -value, value) if signed else value

    def write(x: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        magnitude = x.abs().clamp(max=_LARGEST)
        bits = magnitude.amax(dim=1, keepdim=True).view(torch.int32)
        exponent = (bits >> 23) - 127 - top + ((bits & 0x7FFFFF) > 0x600000).to(torch.int32)
        exponent = exponent.clamp(min=lowest)
        scaled = magnitude * _power(-exponent)
        octave = (scaled.view(torch.int32) & _EXPONENT).clamp(min=(smallest + 127) << 23)
        inverse = ((254 << 23) - octave).view(torch.float32)
        units = torch.floor(scaled * inverse * 2.0**mantissa + u).to(torch.int32)
        code = (((octave >> 23) - (127 + smallest)) << mantissa) + units
        code = code | ((x < 0).to(torch.int32) << 7) if signed else torch.maximum(code, (x > 0).to(torch.int32))
        return code.to(torch.uint8), (exponent + 127).to(torch.uint8)

    return Form(torch.uint8, read, write, scaled=True)


def _bf16() -> Form:
    def read(data: Tensor, exponents: Tensor) -> Tensor:
        return data.float()

    def write(x: Tensor, u: Tensor) -> tuple[Tensor, None]:
        bits = x.clamp(-_LARGEST, _LARGEST).view(torch.int32) + (u * 2.0**16).to(torch.int32)
        return (bits & -65536).view(torch.float32).to(torch.bfloat16), None

    return Form(torch.bfloat16, read, write, scaled=False)


def _wide() -> Form:
    def read(data: Tensor, exponents: Tensor) -> Tensor:
        return data

    def write(x: Tensor, u: Tensor) -> tuple[Tensor, None]:
        return x, None

    return Form(torch.float32, read, write, scaled=False)


# by option value: of the mean gradient, of the mean squared gradient
EXP_AVG = {"fp32": _wide(), "bf16": _bf16(), "fp8": _fp8(E4M3, signed=True)}
EXP_AVG_SQ = {"fp32": _wide(), "bf16": _bf16(), "fp8": _fp8(E5M2, signed=False)}


def update_kernel(exp_avg: Form, exp_avg_sq: Form) -> Callable[..., None]:
    """One AdamW step of blocks [B, W], in place: moments read, updated in fp32, the weights moved, moments rounded.

    The kernel takes masters and gradients fp32, data and exponents of both moments, `first` int32 [B, 1], `seed` int32
    [1], and `numbers` fp32 [7]: 1 - beta1, beta2, 1 - beta2, 1 - lr * decay, the mean's factor, the root's, eps.
    """

    def update(
        master: Tensor,
        grad: Tensor,
        mean_data: Tensor,
        mean_exponents: Tensor,
        square_data: Tensor,
        square_exponents: Tensor,
        first: Tensor,
        seed: Tensor,
        numbers: Tensor,
    ) -> None:
        mean = exp_avg.read(mean_data, mean_exponents)
        mean = mean + (grad - mean) * numbers[0]
        square = exp_avg_sq.read(square_data, square_exponents) * numbers[1] + grad * grad * numbers[2]
        master.copy_(master * numbers[3] - mean * numbers[4] / (square.sqrt() * numbers[5] + numbers[6]))
        bits = random_bits(first, grad.shape[1], seed)
        _store(exp_avg.write(mean, uniform(bits >> 16)), mean_data, mean_exponents)
        _store(exp_avg_sq.write(square, uniform(bits)), square_data, square_exponents)

    return update


def _store(new: tuple[Tensor, Tensor | None], data: Tensor, exponents: Tensor) -> None:
    data.copy_(new[0])
    if new[1] is not None:
        exponents.copy_(new[1])
