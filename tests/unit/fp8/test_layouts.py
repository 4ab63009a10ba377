"""Where each block scale lies in memory, against index formulas written from cuBLAS's documentation."""

import pytest
import torch

from megafp8.fp8.backends.layouts import outer_major, spread_rows, swizzle_32_4_4, tiles_128


def at(tensor: torch.Tensor, offset: int) -> int:
    """The byte or value at a place in memory, counted in elements."""
    flat = tensor.new_empty(0).set_(tensor.untyped_storage(), 0, (tensor.untyped_storage().size() // tensor.itemsize,))
    return flat[offset].item()


@pytest.mark.parametrize(("rows", "blocks"), [(128, 4), (256, 8), (1, 1), (130, 5), (384, 3), (33, 7)])
@pytest.mark.parametrize("dtype", [torch.float8_e8m0fnu, torch.float8_e4m3fn])
def test_swizzled_scales_lie_where_cublas_reads_them(rows, blocks, dtype):
    codes = torch.randint(1, 120, (rows, blocks), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    swizzled = swizzle_32_4_4(codes.view(dtype))
    tiles_across, tiles_down = -(-blocks // 4), -(-rows // 128)
    assert swizzled.dtype == dtype and swizzled.is_contiguous()
    assert swizzled.numel() == tiles_down * 128 * tiles_across * 4
    flat, used = swizzled.view(torch.uint8), set()
    for row in range(rows):
        for block in range(blocks):
            tile = (row // 128) * tiles_across + block // 4
            offset = tile * 512 + (row % 32) * 16 + (row % 128) // 32 * 4 + block % 4
            assert flat[offset] == codes[row, block], (row, block)
            used.add(offset)
    padding = [offset for offset in range(flat.numel()) if offset not in used]
    assert not flat[padding].any(), "padding is not zero"


@pytest.mark.parametrize(("rows", "blocks"), [(256, 4), (48, 1), (1, 6), (130, 3)])
def test_scales_of_1x128_blocks_run_along_the_outer_dim(rows, blocks):
    scales = torch.randn(rows, blocks)
    laid = outer_major(scales)
    assert laid.shape == (rows, blocks) and laid.stride(0) == 1
    for row in range(rows):
        for block in range(blocks):
            assert at(laid, block * rows + row) == scales[row, block].item()


@pytest.mark.parametrize(("rows", "blocks"), [(2, 4), (3, 5), (1, 1), (6, 8), (2, 1)])
@pytest.mark.parametrize("transposed", [False, True])  # a weight's other operand comes as a view
def test_scales_of_128x128_blocks_start_each_row_at_16_bytes(rows, blocks, transposed):
    """scaled_mm wants [L4, rows], strides (1, L4), L4 = blocks rounded up to 4."""
    scales = torch.randn(blocks, rows).t() if transposed else torch.randn(rows, blocks)
    laid = tiles_128(scales)
    padded = -(-blocks // 4) * 4
    assert laid.shape == (padded, rows) and laid.stride(0) == 1
    assert laid.stride(1) == padded or rows == 1
    for row in range(rows):
        for block in range(padded):
            want = scales[row, block].item() if block < blocks else 0.0
            assert at(laid, row * padded + block) == want


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e8m0fnu, torch.float8_e4m3fn])
def test_scales_of_square_blocks_are_repeated_for_every_row(dtype):
    scales = torch.randint(1, 100, (3, 2), dtype=torch.uint8).view(torch.uint8)
    given = scales.float() if dtype == torch.float32 else scales.view(dtype)
    spread = spread_rows(given, 16, 40)
    assert spread.shape == (40, 2) and spread.dtype == dtype
    for row in range(40):
        assert torch.equal(spread[row].view(torch.uint8), given[row // 16].view(torch.uint8))
    assert spread_rows(given, 1, 3) is given
