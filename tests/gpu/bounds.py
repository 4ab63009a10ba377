"""How far a device's FP8 GEMM may lie from fp32 arithmetic on the same codes, as a share of the result's norm.

Ada and Hopper add products inside the tensor core with 13 bits after the leading one's place: each instruction, 32
terms long, cuts what it adds to 2^-13 of the largest. Cutting is towards zero, so K / 32 instructions may pull the sum
by K / 32 * 2^-13 of its size; the precise mode moves the sum to fp32 registers after 4 of them. (Measured by others:
DeepSeek-V3, arXiv:2412.19437, 3.3.2: about 14 bits, errors near 2 % at K = 4096.) Blackwell and a CPU sum in fp32.
"""

from __future__ import annotations

TENSOR_CORE_UNIT = 2.0**-13
INSTRUCTION_TERMS = 32
PRECISE_INSTRUCTIONS = 4
FP32_UNIT = 2.0**-24
BF16_UNIT = 2.0**-8  # half a step, relative to the smallest value of a power of two
SCALE_ROUNDINGS = 6  # scale_inv of both operands, their product, its use, the order of both, in fp32
ROW_FACTOR = 4.0  # a single row's or column's share scatters; the bound for all holds for the norm of all


def sum_bound(terms: int, *, fast: bool, capability: tuple[int, int] | None) -> float:
    """Bound of ||sum - exact|| / ||exact|| for sums of `terms` products; `capability` None is a CPU."""
    fp32 = (terms + SCALE_ROUNDINGS) * FP32_UNIT
    if capability is None or capability >= (10, 0):
        return 2 * fp32  # both sides sum in fp32, in their own order
    instructions = -(-terms // INSTRUCTION_TERMS)
    cut = instructions if fast else min(instructions, PRECISE_INSTRUCTIONS)
    return 2 * fp32 + cut * TENSOR_CORE_UNIT


def result_bound(terms: int, *, fast: bool, capability: tuple[int, int] | None, bf16: bool) -> float:
    """`sum_bound` with both results rounded to bf16, if they are."""
    return sum_bound(terms, fast=fast, capability=capability) + (2 * BF16_UNIT if bf16 else 0.0)
