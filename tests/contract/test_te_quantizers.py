"""Our quantizers against Transformer Engine's own Python references from its wheel: many shapes, dtypes and values.

Where a reference differs from the kernel that it stands for, ours follows the kernel, and the test says where.
"""

from __future__ import annotations

import torch

from megafp8.fp8.blocks import hadamard, quantize_blocks
from megafp8.fp8.formats import E2M1, E4M3, E5M2, UE4M3
from megafp8.fp8.quantized import quantize
from megafp8.fp8.recipe import TensorSpec
from tests.contract.te_stub import transformer_engine

SHAPES = ((16, 16), (64, 96), (48, 16), (128, 272))
KINDS = ("normal", "wide", "zeros", "all zero", "outlier", "huge", "tiny")


def made(shape: tuple[int, int], dtype: torch.dtype, kind: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * shape[0] + 10 * shape[1] + KINDS.index(kind))
    x = torch.randn(shape, generator=generator)
    if kind == "wide":
        x = x * torch.exp2(torch.randint(-30, 10, shape, generator=generator).float())
    elif kind == "zeros":
        x = x * (torch.rand(shape, generator=generator) < 0.5)
        x[:, :16] = 0
    elif kind == "all zero":
        x = torch.zeros(shape)
    elif kind == "outlier":
        x[0, 0] = 30000.0
    elif kind == "huge":
        x = x * (1e37 if dtype != torch.float16 else 1e4)
    elif kind == "tiny":
        x = x * (1e-33 if dtype != torch.float16 else 1e-6)
    x = x.to(dtype)
    # the reference drops the sign of a zero, which the kernel's cvt keeps: below, a test of its own
    return torch.where(x == 0, torch.zeros((), dtype=dtype), x)


def num_different(a: torch.Tensor, b: torch.Tensor) -> int:
    return int((a.contiguous().view(torch.uint8) != b.contiguous().view(torch.uint8)).sum())


def test_current_scaling_in_every_byte() -> None:
    with transformer_engine():
        from transformer_engine.pytorch.custom_recipes import reference_current_scaling as reference

        for shape in (*SHAPES, (130, 200), (3, 7)):
            for dtype in (torch.bfloat16, torch.float32, torch.float16):
                for kind in KINDS:
                    x = made(shape, dtype, kind)
                    for fmt in (E4M3, E5M2):
                        for power_2 in (False, True):
                            want = reference.CurrentScalingQuantizerRef(fmt.dtype, pow_2_scales=power_2).quantize(x)
                            got = quantize(x, TensorSpec(fmt, power_2_scale=power_2))
                            case = (shape, dtype, kind, fmt.name, power_2)
                            assert num_different(got.data, want.data) == 0, case
                            assert num_different(got.scale_inv, want.scale) == 0, case
                            assert num_different(got.columnwise.contiguous, want.data_t) == 0, case


def test_current_scaling_where_the_reference_is_not_the_kernel() -> None:
    """An overflowing scale becomes fp32's maximum in the kernel; the reference takes the input dtype's."""
    x = torch.full((16, 16), 1e-39, dtype=torch.bfloat16)
    with transformer_engine():
        from transformer_engine.pytorch.custom_recipes import reference_current_scaling as reference

        want = reference.CurrentScalingQuantizerRef(torch.float8_e4m3fn).quantize(x).scale
    got = quantize(x, TensorSpec(E4M3)).scale_inv
    assert torch.equal(got, 1 / torch.tensor([torch.finfo(torch.float32).max]))
    assert torch.equal(want, 1 / torch.tensor([torch.finfo(torch.bfloat16).max]))


def assert_nvfp4(x: torch.Tensor, spec: TensorSpec, reference: object, case: object) -> None:
    want = reference.quantize(x)  # type: ignore[attr-defined]
    columns = hadamard(x.t().contiguous()) if spec.hadamard else x.t()
    sides = (
        (x, want.data, want.scale, want.global_amax_row),
        (columns, want.data_t, want.scale_t, want.global_amax_col),
    )
    assert spec.block is not None
    for source, codes, scale, amax in sides:
        got = quantize_blocks(source, spec)
        assert num_different(got.codes, codes) == 0, case
        repeated = got.scale_inv.view(torch.uint8).repeat_interleave(spec.block[0], dim=0)
        assert num_different(repeated, scale) == 0, case
        assert got.tensor_amax is not None and torch.equal(got.tensor_amax, amax), case


def test_nvfp4_in_vectors_squares_and_transformed() -> None:
    with transformer_engine():
        from transformer_engine.pytorch.custom_recipes import reference_nvfp4, reference_utils

        for shape in SHAPES:
            for dtype in (torch.bfloat16, torch.float32, torch.float16):
                for kind in KINDS:
                    x = made(shape, dtype, kind)
                    for tile, rht in (((1, 16), False), ((1, 16), True), ((16, 16), False)):
                        if rht and dtype != torch.bfloat16:
                            continue  # the kernel takes bf16 alone, and fp32 sums depend on their order
                        spec = TensorSpec(E2M1, block=tile, scale_format=UE4M3, hadamard=rht)
                        theirs = reference_nvfp4.NVFP4QuantizerRef(
                            reference_utils.Fp4Formats.E2M1, quant_tile_shape=tile, with_rht=rht
                        )
                        assert_nvfp4(x, spec, theirs, (shape, dtype, kind, tile, rht))


def test_nvfp4_with_4over6() -> None:
    with transformer_engine():
        from transformer_engine.pytorch.custom_recipes import reference_nvfp4, reference_utils

        for shape in SHAPES[:3]:
            for kind in KINDS:
                x = made(shape, torch.bfloat16, kind)
                for tile in ((1, 16), (16, 16)):
                    for mode, bound in (("MAE", 256), ("MSE", 448)):
                        spec = TensorSpec(
                            E2M1, block=tile, scale_format=UE4M3, four_over_six=mode, block_scale_max=float(bound)
                        )
                        theirs = reference_nvfp4.NVFP4QuantizerRef(
                            reference_utils.Fp4Formats.E2M1,
                            quant_tile_shape=tile,
                            nvfp4_use_4over6=True,
                            nvfp4_e4m3_max=bound,
                            nvfp4_4over6_err_mode=mode,
                        )
                        assert_nvfp4(x, spec, theirs, (shape, kind, tile, mode))


def test_recipes_have_transformer_engines_names_and_defaults() -> None:
    from megafp8.fp8.recipe import recipe

    with transformer_engine():
        from transformer_engine.common.recipe import Float8BlockScaling, MXFP8BlockScaling, NVFP4BlockScaling

        for ours, theirs in (
            (recipe("blockwise"), Float8BlockScaling()),
            (recipe("mxfp8"), MXFP8BlockScaling()),
            (recipe("nvfp4"), NVFP4BlockScaling()),
        ):
            names = {name for name in vars(ours) if not name.startswith("_") and name != "amax_epsilon"}
            for name in names:
                want = getattr(theirs, name)
                assert getattr(ours, name) == getattr(want, "name", want), (ours.name, name)
