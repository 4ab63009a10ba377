"""Block scales as cuBLAS reads them: pure rearrangements of `scale_inv`, no arithmetic.

A scale tensor of ours is [rows of blocks, blocks along the summed dim], row-major. The hardware wants

- 1x128 (Hopper): the same shape, outer dim fastest;
- 128x128 (Hopper): transposed, the summed dim's count padded to 4 so that each column starts at 16 bytes;
- 1x32 and 1x16 (Blackwell): tiles of 128 x 4 scales, 512 bytes each, in which scale (r, c) lies at
  (r % 32) * 16 + (r // 32) * 4 + c; tiles one after the other along the summed dim first.

Source: the cuBLAS documentation, "1D Block Scaling Factors Layout" and "Scaling factors layouts" of 128-element blocks;
torch's checks of `scaled_mm` (ScaledBlas.cpp, `_check_scaled_mm_sizes_v2`).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

TILE_ROWS, TILE_COLUMNS, TILE_LANES = 128, 4, 32


def outer_major(scale_inv: torch.Tensor) -> torch.Tensor:
    """Scales of 1x128 blocks, [R, C / 128] fp32 -> the same values and shape with strides (1, R)."""
    # clone, for contiguous() keeps the strides of a tensor of one row
    return scale_inv.t().clone(memory_format=torch.contiguous_format).t()


def tiles_128(scale_inv: torch.Tensor) -> torch.Tensor:
    """Scales of 128x128 blocks, [R / 128, C / 128] fp32 -> [roundup(C / 128, 4), R / 128], strides (1, that)."""
    # contiguous, for the scales of a transpose come as a view, and where nothing is missing pad copies nothing
    return F.pad(scale_inv, (0, -scale_inv.shape[1] % TILE_COLUMNS)).contiguous().t()


def swizzle_32_4_4(scale_inv: torch.Tensor) -> torch.Tensor:
    """One-byte scales of 1x32 or 1x16 blocks, [R, B] -> flat, padded by zero bytes to whole 128 x 4 tiles."""
    rows, columns = scale_inv.shape
    codes = F.pad(scale_inv.view(torch.uint8), (0, -columns % TILE_COLUMNS, 0, -rows % TILE_ROWS)).contiguous()
    across = codes.shape[1] // TILE_COLUMNS
    tiles = codes.view(-1, TILE_ROWS // TILE_LANES, TILE_LANES, across, TILE_COLUMNS)
    # (tile row, r // 32, r % 32, tile column, c) -> (tile row, tile column, r % 32, r // 32, c)
    return tiles.permute(0, 3, 2, 1, 4).flatten().view(scale_inv.dtype)


def spread_rows(scale_inv: torch.Tensor, block_rows: int, rows: int) -> torch.Tensor:
    """Scales of blocks of several rows as those of blocks of one: [ceil(R / block_rows), B] -> [R, B]."""
    if block_rows == 1:
        return scale_inv
    one_byte = scale_inv.element_size() == 1
    codes = scale_inv.view(torch.uint8) if one_byte else scale_inv
    spread = codes[:, None].expand(-1, block_rows, -1).reshape(-1, codes.shape[1])[:rows]
    return spread.view(scale_inv.dtype) if one_byte else spread
