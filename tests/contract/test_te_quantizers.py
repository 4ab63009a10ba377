"""Our quantizers against Transformer Engine's own Python references from its wheel: many shapes, dtypes and values.

Where a reference differs from the kernel that it stands for, ours follows the kernel, and the test says where.
"""

from __future__ import annotations

import torch

from megafp8.fp8 import backend, recipe
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


def product_bound(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """What two fp32 sums of K products in any order, with factors applied before or after, may differ by.

    Each errs by at most (K + 6) 2**-24 of the sum of magnitudes: K additions, and up to six products with scales.
    """
    magnitudes = a.double().abs() @ b.double().abs().t()
    return 2 * (a.shape[1] + 6) * 2.0**-24 * magnitudes


def test_the_gemms_of_nvfp4_agree_with_the_reference_down_to_summation() -> None:
    """fprop, and wgrad on transformed operands, each against Transformer Engine's block by block product."""
    generator = torch.Generator().manual_seed(11)
    x, g = (torch.randn(64, n, generator=generator).bfloat16() for n in (96, 48))
    weight = torch.randn(48, 96, generator=generator).bfloat16()
    emulated = backend("emulated", "exact", device="cpu")
    plain = recipe("nvfp4", disable_stochastic_rounding=True)
    ours = {
        role: quantize(t, plain.spec(role), columnwise=True)
        for role, t in (("input", x), ("weight", weight), ("grad_output", g))
    }
    with transformer_engine():
        from transformer_engine.pytorch.custom_recipes import gemm, reference_nvfp4, reference_utils

        e2m1 = reference_utils.Fp4Formats.E2M1
        vectors = reference_nvfp4.NVFP4QuantizerRef(e2m1, with_rht=True)
        squares = reference_nvfp4.NVFP4QuantizerRef(e2m1, quant_tile_shape=(16, 16))
        theirs = {"x": vectors.quantize(x), "w": squares.quantize(weight), "g": vectors.quantize(g)}
        fprop = vectors.qgemm(
            theirs["x"].data, theirs["w"].data, gemm.MMParams(), torch.float32, theirs["x"].scale, theirs["w"].scale,
            gemm_type=gemm.GEMMType.FPROP, qresult_x=theirs["x"], qresult_w=theirs["w"],
        )  # fmt: skip
        wgrad = vectors.qgemm(
            theirs["g"].data_t, theirs["x"].data_t, gemm.MMParams(), torch.float32, theirs["g"].scale_t,
            theirs["x"].scale_t, gemm_type=gemm.GEMMType.WGRAD, qresult_x=theirs["g"], qresult_w=theirs["x"],
        )  # fmt: skip
    for a, b, want in (
        (ours["input"].rowwise, ours["weight"].rowwise, fprop),
        (ours["grad_output"].columnwise, ours["input"].columnwise, wgrad),
    ):
        got = emulated.gemm(a, b, None, torch.float32, precise=True)
        assert ((got - want).abs() <= product_bound(a.dequantize(), b.dequantize())).all()


def test_the_gemm_of_current_scaling_agrees_with_the_reference_down_to_summation() -> None:
    generator = torch.Generator().manual_seed(12)
    x, weight = (torch.randn(n, 96, generator=generator).bfloat16() for n in (64, 48))
    a, b = (quantize(t, TensorSpec(E4M3)) for t in (x, weight))
    with transformer_engine():
        from transformer_engine.pytorch.custom_recipes import gemm, reference_current_scaling

        reference = reference_current_scaling.CurrentScalingQuantizerRef(torch.float8_e4m3fn)
        x_theirs, w_theirs = reference.quantize(x), reference.quantize(weight)
        want = reference.qgemm(
            x_theirs.data, w_theirs.data, gemm.MMParams(), torch.float32, x_theirs.scale, w_theirs.scale
        )
    got = backend("emulated", "exact", device="cpu").gemm(a.rows, b.rows, None, torch.float32, precise=True)
    assert ((got - want).abs() <= product_bound(a.dequantize(), b.dequantize())).all()


def test_recipes_have_transformer_engines_names_and_defaults() -> None:
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
