"""Compiled block quantizers: every bit as the definition, for any shape, and one compilation for all of them."""

import pytest
import torch

from megafp8.core.errors import ConfigError
from megafp8.fp8 import LinearState, backend, kernels, quantized_linear, recipe
from megafp8.fp8.recipe import TensorSpec
from tests.unit.fp8.test_compiled import assert_same

SEED = torch.tensor([0x1234_5678_9ABC_DEF0])
# whole blocks, fewer than two, ragged, one row, one column, a wide one
SHAPES = ((256, 384), (16, 16), (128, 128), (48, 200), (1, 64), (32, 1), (16, 300))
SPECS = {
    "blockwise input": recipe("blockwise").spec("input"),
    "blockwise weight": recipe("blockwise").spec("weight"),
    "nvfp4 grad_output": recipe("nvfp4").spec("grad_output"),
}
SLOW_SPECS = {
    "mxfp8 input": recipe("mxfp8").spec("input"),
    "mxfp8 weight": recipe("mxfp8", enable_2d_quantization=True).spec("weight"),
    "nvfp4 input": recipe("nvfp4").spec("input"),
    "nvfp4 weight": recipe("nvfp4").spec("weight"),
    "nvfp4 grad_output, no transform": recipe("nvfp4", disable_rht=True).spec("grad_output"),
    "fp32 scales, E5M2": recipe("blockwise", use_f32_scales=True, fp8_format="HYBRID").spec("grad_output"),
    "fp32 scales, square": recipe("blockwise", use_f32_scales=True, amax_epsilon=0.01).spec("weight"),
    "mxfp8 E5M2": recipe("mxfp8", fp8_format="HYBRID").spec("grad_output"),
}


def mixed_tensor(rows: int, columns: int) -> torch.Tensor:
    """Magnitudes over 2**40, zeros of both signs, and some NaN, infinities and huge values."""
    generator = torch.Generator().manual_seed(rows * 1000 + columns)
    exponents = torch.randint(-30, 10, (rows, columns), generator=generator)
    x = torch.randn(rows, columns, generator=generator) * torch.exp2(exponents.float())
    x[torch.rand(rows, columns, generator=generator) < 0.1] *= 0.0
    for place, value in ((7, float("nan")), (130, float("inf")), (261, -float("inf")), (270, 3.3e38)):
        if place < x.numel():
            x.view(-1)[place] = value
    return x.bfloat16()


def every_pattern(rows: int, columns: int) -> torch.Tensor:
    """bf16 by its bits: subnormals beside the largest values."""
    bits = torch.arange(rows * columns, dtype=torch.int32) * 7919 % 65536
    return bits.to(torch.uint16).view(torch.bfloat16).view(rows, columns)


def tiny_blocks(rows: int, columns: int) -> torch.Tensor:
    """Rows and columns of zeros, and of values so small that scales and results leave the normal numbers."""
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(5)) * 2.0**-126
    x[::3] *= 2.0**100
    x[:, ::5] = 0.0
    return x.bfloat16()


def check(spec: TensorSpec, *, columnwise: bool) -> None:
    compiled, plain = kernels.compiled_kernels(), kernels.eager_kernels()
    compiled.quantize_blocks(torch.randn(256, 256).bfloat16(), spec, columnwise=columnwise, seed=SEED)
    amaxes = (None, torch.tensor([5000.0])) if spec.two_level else (None,)
    for shape in SHAPES:
        if columnwise and spec.hadamard and shape[0] % 16:
            continue
        for x in (mixed_tensor(*shape), every_pattern(*shape), tiny_blocks(*shape), torch.zeros(shape).bfloat16()):
            for amax in amaxes:
                arguments = {"columnwise": columnwise, "tensor_amax": amax, "seed": SEED}
                with torch.compiler.set_stance("fail_on_recompile"):
                    found = compiled.quantize_blocks(x, spec, **arguments)
                for a, b in zip(found, plain.quantize_blocks(x, spec, **arguments), strict=True):
                    assert a.shape == b.shape and a.dtype == b.dtype
                    assert_same(a.contiguous(), b.contiguous())


@pytest.mark.parametrize("columnwise", [False, True])
@pytest.mark.parametrize("name", SPECS)
def test_compiled_equals_the_definition(name, columnwise):
    check(SPECS[name], columnwise=columnwise)


@pytest.mark.slow
@pytest.mark.parametrize("columnwise", [False, True])
@pytest.mark.parametrize("name", SLOW_SPECS)
def test_compiled_equals_the_definition_for_every_recipe(name, columnwise):
    check(SLOW_SPECS[name], columnwise=columnwise)


def test_values_are_what_codes_and_scales_stand_for():
    """By hand: with a largest magnitude of 448 * 2**k the scale is 2**-k, and values are codes times 2**k."""
    x = torch.zeros(2, 128)
    x[0, :4] = torch.tensor([448.0 * 8, 224.0 * 8, 9.0, 9.25])
    x[1, :2] = torch.tensor([-448.0 * 2.0**-30, 2.0**-40])
    values, scale_inv = kernels.eager_kernels().quantize_blocks(x.bfloat16(), SPECS["blockwise input"])
    x[0, 3], x[1, 1] = 9.0, 0.0  # 9.25 lies between 1.125 and 1.25 times 8; 2**-10 is half the smallest code: even
    assert torch.equal(values, x.bfloat16())
    assert float(scale_inv) == 1.0


def test_recipes_do_not_share_the_limit_of_recompilations():
    """torch.compile gives up after 8 variants of one piece of code; recipes have more kernels than that."""
    made, x = kernels.Kernels(compiled=True), torch.randn(256, 256).bfloat16()
    with torch._dynamo.config.patch(recompile_limit=1):
        for name in ("blockwise input", "nvfp4 grad_output"):
            made.quantize_blocks(x, SPECS[name], seed=SEED)


def test_training_in_blocks_is_bit_equal_compiled_or_not():
    def run(compiled: bool) -> list[torch.Tensor]:
        state = LinearState("layer", recipe("blockwise"), backend("emulated", "fast", compiled=compiled))
        generator = torch.Generator().manual_seed(3)
        x = torch.randn(200, 128, generator=generator).bfloat16().requires_grad_()
        weight = torch.randn(256, 128, generator=generator).bfloat16().requires_grad_()
        y = quantized_linear(x, weight, None, state)
        y.backward(y.detach() * 1e-3)
        assert x.grad is not None and weight.grad is not None
        return [y.detach(), x.grad, weight.grad]

    for a, b in zip(run(True), run(False), strict=True):
        assert torch.equal(a, b)


def test_extremes_of_blocks():
    """Zeros and blocks with a NaN do not count; the same compiled, for square blocks and for rows."""
    x = torch.zeros(256, 256)
    x[0, 0], x[0, 200], x[130, 5], x[200, 200] = 3.0, 0.5, float("nan"), 7.0
    for some in (kernels.compiled_kernels(), kernels.eager_kernels()):
        assert some.block_extremes(x.bfloat16(), (128, 128)).tolist() == [0.5, 7.0]
        assert some.block_extremes(x.bfloat16(), (1, 128)).tolist() == [0.5, 7.0]
        assert some.block_extremes(x.bfloat16()[1:2], (1, 128)).tolist() == [float("inf"), 0.0]


def test_columnwise_is_a_view_of_rows():
    """No transposed copy is written: the GEMM reads it as it lies."""
    x = torch.randn(256, 384).bfloat16()
    found = kernels.compiled_kernels().quantize_blocks(x, SPECS["blockwise input"], columnwise=True)
    assert found.values.shape == (384, 256) and found.values.stride() == (1, 384)


def test_rows_that_are_no_groups_are_refused():
    for some in (kernels.compiled_kernels(), kernels.eager_kernels()):
        with pytest.raises(ConfigError, match="24 rows are not a multiple"):
            some.quantize_blocks(torch.randn(24, 32).bfloat16(), SPECS["nvfp4 grad_output"], columnwise=True, seed=SEED)
