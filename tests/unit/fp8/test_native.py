"""The native backend without a GPU: what it hands to scaled_mm, which machine multiplies what, and what is refused."""

import sys

import pytest
import torch
from torch.nn.functional import ScalingType

from megafp8.core.errors import ConfigError
from megafp8.fp8 import backend as make_backend
from megafp8.fp8 import recipe
from megafp8.fp8.backends import fused, native
from megafp8.fp8.backends.emulated import Emulated
from megafp8.fp8.backends.hardware import Hardware, refusal
from megafp8.fp8.backends.native import Native
from megafp8.fp8.formats import E4M3, E5M2
from megafp8.fp8.quantized import Operand, QuantizedTensor, quantize
from megafp8.fp8.recipe import ROLES, TensorSpec, recipe_names
from tests.unit.fp8.scaled_mm_by_docs import ScaledMM

ADA = Hardware("NVIDIA L40S", (8, 9), (12, 9))
HOPPER = Hardware("NVIDIA H100", (9, 0), (13, 0))
OLD_CUDA = Hardware("NVIDIA H100", (9, 0), (12, 8))
BLACKWELL = Hardware("NVIDIA B200", (10, 0), (13, 0))
GEFORCE = Hardware("NVIDIA GeForce RTX 5090", (12, 0), (13, 0))
AMPERE = Hardware("NVIDIA A100", (8, 0), (13, 0))
CPU = Hardware()
TOKENS, INPUTS, OUTPUTS = 256, 640, 384  # 640: five blocks of 128, where paddings to 4 show
# recipe and options -> the kinds of scaling of the three GEMMs' two sides
CASES = {
    "blockwise": ({}, [("1x128", "128x128"), ("1x128", "128x128"), ("1x128", "1x128")]),
    "blockwise square input": ({"x_block_scaling_dim": 2, "w_block_scaling_dim": 1},
                               [("128x128", "1x128"), ("1x128", "1x128"), ("1x128", "128x128")]),
    "mxfp8": ({}, [("1x32", "1x32")] * 3),
    "mxfp8 square weight": ({"enable_2d_quantization": True}, [("1x32", "1x32")] * 3),
    "nvfp4": ({}, [("1x16", "1x16")] * 3),
    "nvfp4 plain": ({"disable_rht": True, "disable_2d_quantization": True}, [("1x16", "1x16")] * 3),
}  # fmt: skip


def uneven(rows: int, columns: int, seed: int) -> torch.Tensor:
    """Values whose 16 x 16 blocks lie at different powers of two: a scale in a wrong place shows."""
    generator = torch.Generator().manual_seed(seed)
    powers = torch.randint(-6, 7, (-(-rows // 16), -(-columns // 16)), generator=generator)
    spread = powers.repeat_interleave(16, 0).repeat_interleave(16, 1)[:rows, :columns]
    return (torch.randn(rows, columns, generator=generator) * torch.exp2(spread.float())).bfloat16()


def sides(made, tokens=TOKENS, inputs=INPUTS, outputs=OUTPUTS) -> list[tuple[Operand, Operand]]:
    """The operands of fprop, dgrad and wgrad."""
    shapes = {"input": (tokens, inputs), "weight": (outputs, inputs), "grad_output": (tokens, outputs)}
    x, w, g = (
        quantize(uneven(*shapes[role], seed), made.spec(role), columnwise=True, seed=torch.tensor([5]))
        for seed, role in enumerate(ROLES)
    )
    return [(x.rows, w.rows), (g.rows, w.columnwise), (g.columnwise, x.columnwise)]


@pytest.mark.parametrize("case", CASES)
def test_operands_and_scales_mean_what_the_definition_multiplies(case, monkeypatch):
    options, kinds = CASES[case]
    stand_in = ScaledMM()
    monkeypatch.setattr(native, "scaled_mm", stand_in)
    for (a, b), names in zip(sides(recipe(case.split()[0], **options)), kinds, strict=True):
        # as on a GPU, operands come with the summed dim contiguous
        a, b = (Operand(o.data.contiguous(), o.scale_inv, o.spec, o.tensor_amax) for o in (a, b))
        got = Native(hardware=BLACKWELL).gemm(a, b, None, torch.float32, precise=True)
        want = Emulated(fast=False).gemm(a, b, None, torch.float32, precise=True)
        # both add K fp32 products of the same decoded values, in their own order: K units of the sum of magnitudes,
        # and each value's two scales are multiplied in another order: 4 more
        magnitude = a.dequantize().abs() @ b.dequantize().abs().t()
        assert ((got - want).abs() <= 2 * (a.shape[1] + 4) * 2.0**-24 * magnitude).all()
        said = tuple(side[0].name.removeprefix("BlockWise") for side in stand_in.calls[-1])
        assert said == names


@pytest.mark.parametrize("case", [*CASES, "delayed", "current"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_torch_takes_the_operands_as_for_a_gpu(case, dtype):
    """Meta tensors go through torch's own checks of shapes, strides, types and swizzles for CUDA."""
    options = CASES[case][0] if case in CASES else {}
    for a, b in sides(recipe(case.split()[0], **options)):
        a, b = (
            Operand(o.data.to("meta"), o.scale_inv.to("meta"), o.spec, o.tensor_amax and o.tensor_amax.to("meta"))
            for o in (a, b)
        )
        y = Native(hardware=BLACKWELL).gemm(a, b, torch.empty(b.shape[0], device="meta"), dtype, precise=False)
        assert y.shape == (a.shape[0], b.shape[0]) and y.dtype == dtype


def test_fp4_rows_are_padded_to_16_bytes(monkeypatch):
    """K = 48 is three blocks, 24 bytes; cuBLAS wants rows at multiples of 16 bytes."""
    monkeypatch.setattr(native, "scaled_mm", stand_in := ScaledMM())
    spec = TensorSpec(recipe("nvfp4").spec("input").format, (1, 16), recipe("nvfp4").spec("input").scale_format)
    a, b = (quantize(uneven(32, 48, seed), spec).rows for seed in (1, 2))
    got = Native(hardware=BLACKWELL).gemm(a, b, None, torch.float32, precise=True)
    assert torch.allclose(got, a.dequantize() @ b.dequantize().t(), rtol=1e-5, atol=1e-5) and stand_in.calls
    assert native._matrix(a).shape == (32, 32), "64 elements, two a byte"


@pytest.mark.parametrize("block", [(1, 96), (1, 128), (128, 128)])
def test_a_scale_a_row_on_a_cpu(block):
    """Blocks that span the summed dim are torch's row-wise scaling, which a CPU has."""
    a = quantize(uneven(48, block[1], 1), TensorSpec(E4M3, (1, block[1]))).rows
    b = quantize(uneven(160, block[1], 2), TensorSpec(E4M3, block)).rows
    bias = torch.randn(160)
    got = Native(hardware=CPU).gemm(a, b, bias, torch.float32, precise=True)
    want = a.dequantize().double() @ b.dequantize().double().t() + bias
    # K products and K - 1 additions in fp32, a scale on each factor (two roundings a term), the bias
    magnitude = a.dequantize().abs() @ b.dequantize().abs().t() + bias.abs()
    assert ((got - want).abs() <= (block[1] + 4) * 2.0**-24 * magnitude).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_bias_is_added_before_the_one_rounding(dtype):
    x, w, bias = uneven(48, 64, 1), uneven(32, 64, 2), torch.randn(32).bfloat16()
    a, b = (quantize(t, TensorSpec(E4M3)).rows for t in (x, w))
    got = Native(hardware=CPU).gemm(a, b, bias, dtype, precise=True)
    want = a.dequantize().double() @ b.dequantize().double().t() + bias.double()
    unit = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-24
    magnitude = a.dequantize().double().abs() @ b.dequantize().double().abs().t() + bias.double().abs()
    assert ((got.double() - want).abs() <= unit * want.abs() + 70 * 2.0**-24 * magnitude).all()


# recipe -> a word of the reason for which each machine refuses it; "" where it multiplies
REFUSALS = {
    "delayed": {"CPU": "", "AMPERE": "SM 8.9", "ADA": "", "HOPPER": "", "OLD_CUDA": "", "BLACKWELL": "", "GEFORCE": ""},
    "current": {"CPU": "", "AMPERE": "SM 8.9", "ADA": "", "HOPPER": "", "OLD_CUDA": "", "BLACKWELL": "", "GEFORCE": ""},
    "blockwise": {"CPU": "not multiply blocks of 128 on a CPU", "AMPERE": "SM 8.9", "ADA": "Hopper", "HOPPER": "",
                  "OLD_CUDA": "need CUDA 12.9", "BLACKWELL": "Hopper (SM 9.0) only", "GEFORCE": "Hopper"},
    "mxfp8": {"CPU": "not multiply MXFP8", "AMPERE": "SM 8.9", "ADA": "Blackwell", "HOPPER": "need Blackwell (SM 10.0)",
              "OLD_CUDA": "Blackwell", "BLACKWELL": "", "GEFORCE": ""},
    "nvfp4": {"CPU": "not multiply NVFP4", "AMPERE": "SM 8.9", "ADA": "Blackwell", "HOPPER": "need Blackwell (SM 10.0)",
              "OLD_CUDA": "Blackwell", "BLACKWELL": "", "GEFORCE": ""},
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSALS)
def test_which_machine_multiplies_in_which_recipe(name):
    for machine, word in REFUSALS[name].items():
        reason = refusal(recipe(name), globals()[machine])
        assert (reason is None) if not word else (reason is not None and word in reason), (machine, reason)


def test_a_torch_without_a_gemm_for_a_cpu_is_said_so():
    """torch 2.11 has `scaled_mm` on CUDA only."""
    why = "torch 2.11.0 has no FP8 GEMM for a CPU"
    assert refusal(recipe("delayed"), Hardware(lacks_gemm=why)) == why


def test_every_recipe_has_a_row():
    assert set(REFUSALS) == set(recipe_names())


@pytest.mark.parametrize(("name", "machine"), [("blockwise", HOPPER), ("mxfp8", BLACKWELL)])
def test_blocks_of_e5m2_are_not_taken(name, machine):
    assert "nearest: fp8_format = 'E4M3'" in refusal(recipe(name, fp8_format="HYBRID"), machine)


def test_e5m2_times_e5m2_names_the_gemm():
    class AllWide:
        name = "wide"

        def spec(self, role):
            return TensorSpec(E5M2)

    assert refusal(AllWide(), HOPPER).startswith("forward: E5M2 times E5M2")
    assert refusal(AllWide(), CPU) is None


@pytest.fixture
def on(monkeypatch):
    """Pretend that this machine's device is another one."""

    def pretend(hardware: Hardware) -> None:
        # not by its name as text: the package re-exports a function of the module's name
        monkeypatch.setattr(sys.modules["megafp8.fp8.backend"], "hardware_of", lambda device: hardware)

    return pretend


def test_auto_picks_by_recipe_and_hardware_and_says_why(on):
    on(HOPPER)
    chosen = make_backend("auto", recipe=recipe("blockwise"))
    assert chosen.name == "native" and chosen.reason == "auto: NVIDIA H100 multiplies blockwise itself"
    chosen = make_backend("auto", recipe=recipe("mxfp8"))
    assert chosen.name == "emulated"
    assert chosen.reason == "auto: MXFP8's blocks of 32 need Blackwell (SM 10.0), NVIDIA H100 is SM 9.0"
    on(CPU)
    assert make_backend("auto", recipe=recipe("delayed")).name == "emulated"


def test_a_named_backend_is_refused_with_what_works_here(on):
    on(HOPPER)
    with pytest.raises(ConfigError) as refused:
        make_backend("native", recipe=recipe("nvfp4"))
    assert str(refused.value) == (
        "backend native: recipe nvfp4: NVFP4's blocks of 16 need Blackwell (SM 10.0), NVIDIA H100 is SM 9.0; what "
        "runs on this machine: native with blockwise, current, delayed; emulated with every recipe"
    )
    on(AMPERE)
    with pytest.raises(ConfigError, match="SM 8.0, FP8 needs SM 8.9.*native with no recipe; emulated"):
        make_backend("native")
    on(CPU)
    with pytest.raises(ConfigError, match="blocks of 128 on a CPU.*native with current, delayed; emulated"):
        make_backend("native", recipe=recipe("blockwise"))


def test_supports_names_hardware_before_dims():
    assert "Blackwell" in Native(hardware=HOPPER).supports(recipe("mxfp8"), 100, 100)
    assert "multiple of 128" in Native(hardware=HOPPER).supports(recipe("blockwise"), 128, 200)
    assert Native(hardware=HOPPER).supports(recipe("blockwise"), 128, 256) is None


def assert_same(got: QuantizedTensor, want: QuantizedTensor) -> None:
    for mine, other in ((got.rows, want.rows), (got.columnwise, want.columnwise)):
        for a, b in ((mine.data, other.data), (mine.scale_inv, other.scale_inv), (mine.tensor_amax, other.tensor_amax)):
            assert (a is None) == (b is None)
            if a is not None:
                assert a.dtype == b.dtype and a.shape == b.shape
                plain = [t.clone(memory_format=torch.contiguous_format).view(torch.uint8) for t in (a, b)]
                assert torch.equal(*plain)


def check_fused(name: str, role: str, shape: tuple[int, int]) -> None:
    spec, x = recipe(name).spec(role), uneven(*shape, 3)
    scale, seed = torch.tensor([31.7]) if spec.delayed else None, torch.tensor([9])
    got, amax = fused.fused_quantize(x, spec, scale, columnwise=True, tensor_amax=None, seed=seed)
    assert_same(got, quantize(x, spec, scale, columnwise=True, seed=seed))
    assert got.columnwise.data.is_contiguous() or spec.block is not None
    if amax is not None:
        assert amax.item() == (x.abs().max().item() if x.numel() else 0.0)


@pytest.mark.parametrize("name", ["delayed", "current"])
@pytest.mark.parametrize("shape", [(48, 80), (128, 64), (0, 64)])
def test_fused_quantization_gives_the_definitions_bytes(name, shape):
    """Here compiled for the CPU; with the options that keep a GPU's arithmetic that of eager torch."""
    check_fused(name, "grad_output", shape)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "role"), [("blockwise", "weight"), ("mxfp8", "input"), ("nvfp4", "weight"), ("nvfp4", "grad_output")]
)
def test_fused_quantization_in_blocks(name, role):
    for shape in ((256, 384), (128, 256)):
        check_fused(name, role, shape)


def test_a_compiler_that_fails_leaves_the_plain_functions(monkeypatch, caplog):
    made = fused.Fused()
    monkeypatch.setattr(fused, "_fused", lambda: made)

    def broken(function, **options):
        def call(*args):
            raise RuntimeError("no compiler\nmore")

        return call

    monkeypatch.setattr(torch, "compile", broken)
    with caplog.at_level("WARNING", logger="megafp8"):
        check_fused("current", "input", (32, 64))
        check_fused("current", "grad_output", (32, 64))
    assert [r.message for r in caplog.records] == ['native quantizes uncompiled, slower reason="no compiler"']


def test_row_wise_scaling_is_what_torch_is_asked_for(monkeypatch):
    seen = []
    real = native.scaled_mm
    monkeypatch.setattr(native, "scaled_mm", lambda *args, **kw: seen.append(args[3]) or real(*args, **kw))
    a, b = (quantize(uneven(32, 64, seed), TensorSpec(E4M3, (1, 64))).rows for seed in (1, 2))
    Native(hardware=CPU).gemm(a, b, None, torch.bfloat16, precise=True)
    assert seen == [[ScalingType.RowWise]]
