"""Block, current and NVFP4 quantization bit for bit against Transformer Engine's results (tests/golden/README.md)."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megafp8.fp8.blocks import BlockCodes, hadamard, quantize_blocks
from megafp8.fp8.formats import E2M1, E4M3, E5M2, E8M0, UE4M3
from megafp8.fp8.quantized import quantize
from megafp8.fp8.recipe import TensorSpec

GOLDEN = Path(__file__).parents[1] / "golden"
FORMATS = pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda f: f.name)


def golden(name: str) -> dict[str, torch.Tensor]:
    return load_file(GOLDEN / f"te_{name}.safetensors")


def same_bits(got: torch.Tensor, want: torch.Tensor) -> bool:
    return torch.equal(got.contiguous().view(torch.uint8), want.contiguous().view(torch.uint8))


@pytest.mark.parametrize("case", ["64x96.f32", "96x128.bf16"])
@FORMATS
def test_mxfp8_codes_and_scales_in_both_directions(case, fmt):
    data = golden("mxfp8")
    x, key = data[f"{case}.x"], f"{case}.{fmt.name.lower()}"
    spec = TensorSpec(fmt, block=(1, 32), scale_format=E8M0)
    row, column = quantize_blocks(x, spec), quantize_blocks(x.t(), spec)
    assert same_bits(row.codes, data[f"{key}.q_row"])
    assert same_bits(row.scale_inv, data[f"{key}.scale_e8m0_row"])
    assert same_bits(column.codes.t(), data[f"{key}.q_col"])
    assert same_bits(column.scale_inv.t(), data[f"{key}.scale_e8m0_col"])


def test_mxfp8_of_a_weight_in_square_blocks():
    data = golden("mxfp8")
    codes, scale_inv, _ = quantize_blocks(data["w2d.x"], TensorSpec(E4M3, block=(32, 32), scale_format=E8M0))
    assert same_bits(codes, data["w2d.q"])
    scales = scale_inv.view(torch.uint8)
    assert torch.equal(scales.repeat_interleave(32, dim=0), data["w2d.scale_e8m0_row"])
    assert torch.equal(scales.repeat_interleave(32, dim=1), data["w2d.scale_e8m0_col"])


@pytest.mark.parametrize("case", ["24x200.bf16", "144x20.f32"])
@FORMATS
@pytest.mark.parametrize("power_2_scale", [False, True])
@pytest.mark.parametrize("epsilon", ["0", "1e-06"])
def test_block_scaling_of_vectors_and_squares_with_ragged_edges(case, fmt, power_2_scale, epsilon):
    """Also zero rows, a row whose scale overflows (it becomes the input dtype's maximum) and huge rows."""
    data = golden("blockwise")
    x, key = data[f"{case}.x"], f"{case}.{fmt.name.lower()}.pow2_{int(power_2_scale)}.eps_{epsilon}"
    if fmt == E5M2 and epsilon != "0":
        assert f"{key}.1x128.q" not in data  # the epsilon acts before the format does
        return
    options = {"power_2_scale": power_2_scale, "amax_epsilon": float(epsilon)}
    vectors, square = TensorSpec(fmt, block=(1, 128), **options), TensorSpec(fmt, block=(128, 128), **options)
    for made, name, t in (
        (quantize_blocks(x, vectors), "1x128", ""),
        (quantize_blocks(x.t(), vectors), "1x128", "_t"),
        (quantize_blocks(x, square), "128x128", ""),
    ):
        assert same_bits(made.codes, data[f"{key}.{name}.q{t}"]), (name, t)
        assert same_bits(made.scale_inv, data[f"{key}.{name}.scale_inv{t}"]), (name, t)


@pytest.mark.parametrize("case", ["24x40.bf16", "24x40.f32", "24x40.f16"])
@FORMATS
@pytest.mark.parametrize("power_2_scale", [False, True])
def test_current_scaling(case, fmt, power_2_scale):
    data = golden("current")
    key = f"{case}.{fmt.name.lower()}.pow2_{int(power_2_scale)}"
    made = quantize(data[f"{case}.x"], TensorSpec(fmt, power_2_scale=power_2_scale))
    assert same_bits(made.data, data[f"{key}.q"]) and same_bits(made.scale_inv, data[f"{key}.scale_inv"])
    assert same_bits(made.columnwise.contiguous, data[f"{key}.q_t"])


NVFP4_CASES = {
    "1x16": TensorSpec(E2M1, block=(1, 16), scale_format=UE4M3),
    "1x16.rht": TensorSpec(E2M1, block=(1, 16), scale_format=UE4M3, hadamard=True),
    "16x16": TensorSpec(E2M1, block=(16, 16), scale_format=UE4M3),
    "1x16.4over6_mae_256": TensorSpec(
        E2M1, block=(1, 16), scale_format=UE4M3, four_over_six="MAE", block_scale_max=256.0
    ),
    "16x16.4over6_mse_448": TensorSpec(E2M1, block=(16, 16), scale_format=UE4M3, four_over_six="MSE"),
}


def assert_nvfp4(made: BlockCodes, data: dict[str, torch.Tensor], key: str, t: str, rows: int) -> None:
    assert same_bits(made.codes, data[f"{key}.q{t}"]), (key, t)
    # Transformer Engine repeats a square's scale for each of its rows
    scales = made.scale_inv.view(torch.uint8).repeat_interleave(rows, dim=0)
    assert torch.equal(scales, data[f"{key}.scale{t}"]), (key, t)
    assert made.tensor_amax is not None and torch.equal(made.tensor_amax, data[f"{key}.amax{t}"]), (key, t)


@pytest.mark.parametrize("case", ["48x80.bf16", "32x48.f32"])
@pytest.mark.parametrize("name", NVFP4_CASES)
def test_nvfp4_codes_scales_and_amax_of_both_copies(case, name):
    data, spec = golden("nvfp4"), NVFP4_CASES[name]
    if f"{case}.{name}.q" not in data:
        assert spec.hadamard and "f32" in case  # the kernel transforms bf16 alone
        return
    x, rows = data[f"{case}.x"], spec.block[0]
    columns = hadamard(x.t().contiguous()) if spec.hadamard else x.t()
    assert_nvfp4(quantize_blocks(x, spec), data, f"{case}.{name}", "", rows)
    assert_nvfp4(quantize_blocks(columns, spec), data, f"{case}.{name}", "_t", rows)


@pytest.mark.parametrize("name", NVFP4_CASES)
def test_nvfp4_by_the_door_that_layers_use(name):
    data, spec, case = golden("nvfp4"), NVFP4_CASES[name], "48x80.bf16"
    made = quantize(data[f"{case}.x"], spec, columnwise=True)
    for operand, t in ((made.rowwise, ""), (made.columnwise, "_t")):
        codes = BlockCodes(operand.data, operand.scale_inv, operand.tensor_amax)
        assert_nvfp4(codes, data, f"{case}.{name}", t, spec.block[0])
