"""Block quantization bit for bit against Transformer Engine's results (tests/golden/README.md)."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megafp8.fp8.blocks import quantize_blocks
from megafp8.fp8.formats import E4M3, E5M2, E8M0
from megafp8.fp8.recipe import TensorSpec

GOLDEN = Path(__file__).parents[1] / "golden"


def golden(name: str) -> dict[str, torch.Tensor]:
    return load_file(GOLDEN / f"te_{name}.safetensors")


@pytest.mark.parametrize("case", ["64x96.f32", "96x128.bf16"])
@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda f: f.name)
def test_mxfp8_codes_and_scales_in_both_directions(case, fmt):
    data = golden("mxfp8")
    x, key = data[f"{case}.x"], f"{case}.{fmt.name.lower()}"
    spec = TensorSpec(fmt, block=(1, 32), scale_format=E8M0)
    row, column = quantize_blocks(x, spec), quantize_blocks(x.t(), spec)
    assert torch.equal(row.codes.view(torch.uint8), data[f"{key}.q_row"])
    assert torch.equal(row.scale_inv.view(torch.uint8), data[f"{key}.scale_e8m0_row"])
    assert torch.equal(column.codes.view(torch.uint8).t(), data[f"{key}.q_col"])
    assert torch.equal(column.scale_inv.view(torch.uint8).t(), data[f"{key}.scale_e8m0_col"])


def test_mxfp8_of_a_weight_in_square_blocks():
    data = golden("mxfp8")
    codes, scale_inv, _ = quantize_blocks(data["w2d.x"], TensorSpec(E4M3, block=(32, 32), scale_format=E8M0))
    assert torch.equal(codes.view(torch.uint8), data["w2d.q"])
    scales = scale_inv.view(torch.uint8)
    assert torch.equal(scales.repeat_interleave(32, dim=0), data["w2d.scale_e8m0_row"])
    assert torch.equal(scales.repeat_interleave(32, dim=1), data["w2d.scale_e8m0_col"])
