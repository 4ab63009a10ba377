"""`torch.nn.functional.scaled_mm` with block scales, written from cuBLAS's documentation of where each scale lies.

For a machine whose own does not have them: decodes every element by index arithmetic on the scales' memory and
multiplies in fp32. Slow and obvious; says what it was given by `calls`.
"""

from typing import Any

import torch
from torch.nn.functional import ScalingType, SwizzleType

from megafp8.fp8.formats import E2M1, table, unpack_e2m1


class ScaledMM:
    """Stands in for the function; `calls` are the kinds of scaling of each call."""

    def __init__(self) -> None:
        self.calls: list[tuple[list[ScalingType], list[ScalingType]]] = []

    def __call__(self, a: Any, b: Any, scale_a: Any, kinds_a: Any, scale_b: Any, kinds_b: Any, **rest: Any) -> Any:
        self.calls.append((kinds_a, kinds_b))
        assert a.stride(1) == 1 and b.stride(0) == 1, "not with the summed dim contiguous in both"
        assert rest["bias"] is None and not rest["use_fast_accum"]
        left = decoded(a, scale_a, kinds_a, rest["swizzle_a"])
        right = decoded(b.t(), scale_b, kinds_b, rest["swizzle_b"])
        return (left @ right.t()).to(rest["output_dtype"])


def decoded(codes: torch.Tensor, scales: Any, kinds: Any, swizzles: Any) -> torch.Tensor:
    """[R, C] fp32: every code times the scale that the layout assigns to its place."""
    if codes.dtype == torch.float4_e2m1fn_x2:
        values = table(E2M1)[unpack_e2m1(codes.contiguous().view(torch.uint8)).int()]
    else:
        values = codes.float()
    rows, columns = values.shape
    row, column = torch.arange(rows)[:, None], torch.arange(columns)[None, :]
    kind, factor = kinds[0], 1.0
    if kind == ScalingType.BlockWise128x128:
        padded = -(-columns // 512) * 4
        offsets = row // 128 * padded + column // 128
    elif kind == ScalingType.BlockWise1x128:
        offsets = column // 128 * rows + row
    else:
        width = {ScalingType.BlockWise1x32: 32, ScalingType.BlockWise1x16: 16}[kind]
        assert swizzles[0] == SwizzleType.SWIZZLE_32_4_4
        block, across = column // width, -(-columns // width // 4) if columns // width % 4 else columns // width // 4
        tile = row // 128 * across + block // 4
        offsets = tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + block % 4
    if kind == ScalingType.BlockWise1x16:
        assert kinds[1] == ScalingType.TensorWise and swizzles[1] == SwizzleType.NO_SWIZZLE
        factor = scales[1]
    return values * _memory(scales[0])[offsets] * factor


def _memory(scales: torch.Tensor) -> torch.Tensor:
    """The scales as they lie in memory, fp32."""
    count = scales.untyped_storage().size() // scales.itemsize
    flat = scales.new_empty(0).set_(scales.untyped_storage(), 0, (count,), (1,))
    return flat.float()
