"""Block quantization against an independent numpy one, nasty values, ragged edges, and the short cuts to avoid."""

import math

import numpy as np
import pytest
import torch

from megafp8.core.errors import ConfigError
from megafp8.fp8.blocks import block_amax, decode_blocks, hadamard, mx_scales, nvfp4_scales, quantize_blocks
from megafp8.fp8.formats import E2M1, E4M3, E5M2, E8M0, UE4M3, cast, encode_e8m0, table
from megafp8.fp8.recipe import TensorSpec, recipe
from tests.unit.fp8.reference import round_by_search

SPECS = {
    "1x128": TensorSpec(E4M3, block=(1, 128), power_2_scale=True),
    "128x128": TensorSpec(E5M2, block=(128, 128)),
    "1x32": TensorSpec(E4M3, block=(1, 32), scale_format=E8M0),
    "32x32": TensorSpec(E5M2, block=(32, 32), scale_format=E8M0),
    "1x16": TensorSpec(E2M1, block=(1, 16), scale_format=UE4M3),
    "16x16": TensorSpec(E2M1, block=(16, 16), scale_format=UE4M3),
    "1x16 4over6": TensorSpec(E2M1, block=(1, 16), scale_format=UE4M3, four_over_six="MAE", block_scale_max=256.0),
}
ALL = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
# 4over6 is a search over two scales, which the golden vectors pin
PLAIN = pytest.mark.parametrize("spec", [SPECS[n] for n in SPECS if "4over6" not in n], ids=lambda s: str(s.block))


def sample(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    spread = torch.exp2(torch.randint(-12, 12, (rows, columns), generator=generator).float())
    return (torch.randn(rows, columns, generator=generator) * spread).bfloat16()


def scale_by_hand(amax: np.float32, tensor_amax: np.float32, spec: TensorSpec) -> tuple[np.float32, float]:
    """(scale to multiply by, its inverse as stored) of one block that is not all zero, by the definitions in words."""
    one = np.float32(1)
    if spec.scale_format == E8M0:  # the least power of two at or above amax / fp8_max
        mantissa, exponent = math.frexp(float(np.float32(amax * (one / np.float32(spec.format.max)))))
        power = exponent - (mantissa == 0.5)
        return np.float32(2.0**-power), 2.0**power
    if spec.scale_format == UE4M3:
        of_tensor = np.float32(448 * 6) / tensor_amax
        stored = round_by_search(np.array([float(amax * (of_tensor * (one / np.float32(6))))]), E4M3)[0]
        with np.errstate(divide="ignore"):
            return min(one / (np.float32(stored) * (one / of_tensor)), np.float32(3.4028235e38)), float(stored)
    scale = np.float32(spec.format.max) / amax
    scale = np.float32(2.0 ** (math.frexp(float(scale))[1] - 1)) if spec.power_2_scale else scale
    return scale, float(one / scale)


@PLAIN
@pytest.mark.parametrize("shape", [(33, 70), (130, 150), (5, 16)], ids=str)
def test_every_value_equals_that_of_an_independent_quantizer(spec, shape):
    x = sample(*shape)
    codes, scale_inv, tensor_amax = quantize_blocks(x, spec)
    columns = shape[1]
    values = decode_blocks(codes, torch.ones_like(scale_inv, dtype=torch.float32), None, spec, columns=columns).numpy()
    (height, width), wide = spec.block, x.float().numpy()
    for i, j in np.ndindex(*scale_inv.shape):
        part = (slice(i * height, (i + 1) * height), slice(j * width, (j + 1) * width))
        scale, stored = scale_by_hand(np.abs(wide[part]).max(), np.abs(wide).max(), spec)
        assert float(scale_inv[i, j].float()) == stored
        want = round_by_search((wide[part] * scale).astype(np.float64), spec.format)
        assert np.array_equal(values[part], want.astype(np.float32))


@ALL
def test_a_ragged_edge_is_a_smaller_block_and_nothing_is_padded(spec):
    x = sample(40, 300, seed=1)
    amax = None if spec.scale_format != UE4M3 else x.abs().amax().float().reshape(1)
    whole = quantize_blocks(x, spec, tensor_amax=amax)
    height, width = spec.block
    assert whole.scale_inv.shape == (-(-40 // height), -(-300 // width))
    start = 300 // width * width if 300 % width else 300 - width
    alone = quantize_blocks(x[:, start:].contiguous(), spec, tensor_amax=amax)
    first = start // 2 if spec.format == E2M1 else start
    assert torch.equal(whole.codes.view(torch.uint8)[:, first:], alone.codes.view(torch.uint8))
    assert torch.equal(whole.scale_inv[:, -1:].float(), alone.scale_inv.float())


@ALL
def test_zeros_decode_to_zeros_with_finite_scales(spec):
    x = torch.zeros(128, 128).bfloat16()
    for amax in (None, torch.ones(1)):
        made = quantize_blocks(x, spec, tensor_amax=amax)
        assert made.scale_inv.float().isfinite().all()
        assert decode_blocks(*made, spec).count_nonzero() == 0
    # dead rows among live ones (experts without tokens) get no NaN and take nothing from their neighbours
    x[64:] = sample(64, 128)
    decoded = decode_blocks(*quantize_blocks(x, spec), spec)
    assert decoded.isfinite().all() and decoded[:64].count_nonzero() == 0 and decoded[64:].count_nonzero() > 0


@ALL
@pytest.mark.parametrize("shape", [(0, 64), (64, 0)], ids=str)
def test_empty_tensors(spec, shape):
    made = quantize_blocks(torch.empty(shape).bfloat16(), spec)
    assert decode_blocks(*made, spec).shape == shape


@ALL
def test_nan_and_infinity_stay_in_their_block_and_nan_moves_no_scale(spec):
    x = sample(256, 256, seed=2)
    amax = None if spec.scale_format != UE4M3 else x.abs().amax().float().reshape(1)
    clean = quantize_blocks(x, spec, tensor_amax=amax)
    x[0, 0] = 0.0
    without = quantize_blocks(x, spec, tensor_amax=amax)
    x[0, 0] = math.nan
    broken = quantize_blocks(x, spec, tensor_amax=amax)
    assert torch.equal(broken.scale_inv.float(), without.scale_inv.float())
    x[0, 0] = math.inf
    infinite = quantize_blocks(x, spec, tensor_amax=amax)
    assert infinite.scale_inv.float().isfinite().all()
    for made in (broken, infinite):
        assert torch.equal(made.scale_inv.float().flatten()[1:], clean.scale_inv.float().flatten()[1:])
        assert torch.equal(made.codes.view(torch.uint8)[128:], clean.codes.view(torch.uint8)[128:])
    if spec.format != E2M1:  # FP4 has no code for NaN: NVIDIA's conversion gives +6
        assert broken.codes[0, 0].float().isnan()
        assert infinite.codes[0, 0].float() == spec.format.max
    else:
        assert broken.codes[0, 0] & 0xF == 7 and infinite.codes[0, 0] & 0xF == 7


def test_an_infinite_amax_gives_scale_one_as_the_kernel_and_not_zero():
    x = torch.ones(1, 128)
    x[0, 0] = math.inf
    made = quantize_blocks(x, TensorSpec(E4M3, block=(1, 128), power_2_scale=True))
    assert made.scale_inv.tolist() == [[1.0]] and made.codes.float()[0, 1] == 1.0


def test_an_overflowing_scale_becomes_the_input_dtypes_maximum():
    for dtype, power_2 in ((torch.bfloat16, False), (torch.bfloat16, True), (torch.float32, False)):
        x = torch.full((1, 128), 1e-40).to(dtype)
        made = quantize_blocks(x, TensorSpec(E4M3, block=(1, 128), power_2_scale=power_2))
        # bf16's largest is (2 - 2**-7) * 2**127; as a power of two 2**127
        want = torch.tensor(2.0**127 if power_2 else torch.finfo(dtype).max)
        assert made.scale_inv.item() == (1 / want).item()
        assert decode_blocks(*made, TensorSpec(E4M3, block=(1, 128))).isfinite().all()


def test_transposed_copies_differ_for_vectors_and_agree_for_squares():
    x = sample(256, 256, seed=3)
    for name in ("1x128", "1x32", "1x16"):
        rows, columns = quantize_blocks(x, SPECS[name]), quantize_blocks(x.t(), SPECS[name])
        by_rows = decode_blocks(*rows, SPECS[name])
        assert not torch.equal(by_rows, decode_blocks(*columns, SPECS[name]).t()), name
    for name in ("128x128", "32x32", "16x16"):
        rows, columns = quantize_blocks(x, SPECS[name]), quantize_blocks(x.t(), SPECS[name])
        assert torch.equal(decode_blocks(*rows, SPECS[name]), decode_blocks(*columns, SPECS[name]).t()), name
        assert torch.equal(rows.scale_inv.float(), columns.scale_inv.float().t()), name


def test_odd_columns_leave_half_of_the_last_byte_empty():
    x = torch.tensor([[1.0, -2.0, 6.0]])
    codes, scale_inv, amax = quantize_blocks(x, SPECS["1x16"])
    assert codes.tolist() == [[2 | (0xC << 4), 7]]  # 1 is code 2, -2 is 8 + 4, 6 is 7
    assert decode_blocks(codes, scale_inv, amax, SPECS["1x16"], columns=3).tolist() == x.tolist()


def test_the_sign_of_a_zero_is_kept_in_fp4_as_by_the_conversion_instruction():
    codes = quantize_blocks(torch.tensor([[-0.0, 6.0]]), SPECS["1x16"]).codes
    assert codes.tolist() == [[8 | (7 << 4)]]


def test_the_largest_of_every_format_survives_its_own_scale():
    """A block of one magnitude decodes to itself within the rounding of the scale, in every scaling."""
    for name, spec in SPECS.items():
        x = torch.full((128, 128), -3.0)
        decoded = decode_blocks(*quantize_blocks(x, spec), spec)
        # E4M3 and E5M2 round the product within half a step of 3 or 2 mantissa bits; NVFP4's block scale is its
        # largest (448, or 256), and the two fp32 products around it err by 2**-23
        slack = 2.0 ** -(spec.format.mantissa_bits + 1) if spec.format != E2M1 else 2.0**-22
        assert (decoded / x - 1).abs().max() <= slack, name


class TestShortCuts:
    """What looks right and is not (and what is)."""

    def test_mx_scales_round_up_where_the_ocp_rule_rounds_down(self):
        """floor(log2 amax) - 8, the OCP rule, gives a smaller scale for amaxes whose mantissa is above 1.75."""
        bits = torch.arange(0x0F00, 0x7F80, dtype=torch.int32).to(torch.uint16)  # bf16 from 2**-97 up to the largest
        amax = bits.view(torch.bfloat16).float()
        _, stored = mx_scales(amax, E4M3)
        ocp = torch.floor(torch.log2(amax.double())) - 8
        differs = torch.log2(stored.double()) != ocp
        # 448 = 1.75 * 2**8: of 128 mantissas, 97..127 (in 128ths above 96) lie beyond 1.75: 31 of 128
        assert differs.sum() * 128 == 31 * len(amax)
        scaled = amax / stored.float()
        assert scaled.max() <= 448 and (amax / torch.exp2(ocp).float()).max() > 448  # theirs would clip

    def test_mx_scales_by_logarithm_agree_for_bf16(self):
        bits = torch.arange(0x0F00, 0x7F80, dtype=torch.int32).to(torch.uint16)
        amax = bits.view(torch.bfloat16).float()
        _, stored = mx_scales(amax, E4M3)
        assert torch.equal(torch.log2(stored.double()), torch.ceil(torch.log2(amax.double() / 448)))
        divided = torch.div(amax, torch.full_like(amax, 448.0))  # instead of times fp32(1 / 448)
        assert torch.equal(encode_e8m0(divided), stored.view(torch.uint8))

    def test_division_by_a_tensor_not_the_reciprocal_of_one(self):
        x = sample(500, 128, seed=4)
        spec = TensorSpec(E4M3, block=(1, 128))
        right = quantize_blocks(x, spec)
        amax = block_amax(x, spec.block)
        short = 448.0 / amax  # torch computes amax.reciprocal() * 448
        assert (1 / short != right.scale_inv).any()
        assert torch.equal(1 / torch.div(torch.full_like(amax, 448.0), amax), right.scale_inv)

    def test_scales_multiply_and_the_product_is_fp32(self):
        x = sample(500, 128, seed=5)
        spec = TensorSpec(E4M3, block=(1, 128))
        right = quantize_blocks(x, spec)
        divided = cast(x.float() / right.scale_inv, E4M3)
        by_step = cast(x.float() / (block_amax(x, spec.block) / 448), E4M3)
        in_bf16 = cast(x * (1 / right.scale_inv).bfloat16(), E4M3)
        for wrong in (divided, by_step, in_bf16):
            assert (wrong.view(torch.uint8) != right.codes.view(torch.uint8)).any()

    def test_nvfp4_scales_fold_the_sixth_into_the_tensors_scale(self):
        """amax / 6 * S, as Transformer Engine's C++ test has it, rounds some scales to another code."""
        generator = torch.Generator().manual_seed(6)
        tensor_amax = torch.tensor([3.7])
        amax = torch.rand(2_000_000, generator=generator) * 3.7
        _, stored = nvfp4_scales(amax, tensor_amax)
        of_tensor = torch.tensor([2688.0]) / tensor_amax
        other = cast(amax / 6 * of_tensor, UE4M3)
        different = (stored.view(torch.uint8) != other.view(torch.uint8)).sum()
        assert 0 < different < 2000

    def test_e5m2_saturates_under_every_scale(self):
        x = torch.full((1, 32), 1.0)
        x[0, 0] = 57344.0 * 1.1  # beyond fp16, with a scale that is the tensor's own
        spec = TensorSpec(E5M2, block=(1, 32), scale_format=E8M0)
        made = quantize_blocks(x, spec)
        assert made.codes.float().isfinite().all() and made.codes.float().max() <= 57344


class TestHadamard:
    def test_it_is_diag_signs_times_h16_over_4_and_orthogonal(self):
        matrix = hadamard(torch.eye(16))
        h = torch.ones(1, 1)
        while len(h) < 16:
            h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
        signs = [1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1]
        assert torch.equal(matrix, torch.diag(torch.tensor(signs).float()) @ h / 4)
        assert torch.equal(matrix @ matrix.t(), torch.eye(16))

    def test_a_product_over_the_transformed_dim_is_the_same(self):
        generator = torch.Generator().manual_seed(8)
        a, b = (torch.randn(24, 64, generator=generator) for _ in range(2))
        got, want = hadamard(a) @ hadamard(b).t(), a @ b.t()
        # u = 2**-24, |.| norms, which the transform keeps. A dot product of 64 terms errs by at most 64 u |a| |b|, in
        # either product. A transformed value errs by 4 u (four additions) of at most |x| of its group, 16 of them by
        # 16 u |x|, for both operands: 32 u |a| |b|.
        bound = (64 + 64 + 32) * 2.0**-24 * a.norm(dim=1)[:, None] * b.norm(dim=1)[None, :]
        assert ((got - want).abs() <= bound).all()

    def test_it_spreads_an_outlier(self):
        x = torch.zeros(1, 32).bfloat16()
        x[0, 3] = 64.0
        spread = hadamard(x)
        assert spread.dtype == torch.bfloat16 and spread[0, :16].abs().tolist() == [16.0] * 16
        assert spread[0, 16:].count_nonzero() == 0

    def test_other_lengths_are_refused_with_the_way_out(self):
        with pytest.raises(ConfigError, match=r"24 .*disable_rht"):
            hadamard(torch.ones(2, 24))


class TestStochastic:
    SPEC = TensorSpec(E2M1, block=(1, 16), scale_format=UE4M3, stochastic=True)

    def test_the_mean_of_many_draws_is_the_tensor(self):
        """Each draw is one of two neighbours a step apart: variance at most step**2 / 4."""
        generator = torch.Generator().manual_seed(9)
        x, draws = torch.randn(16, 64, generator=generator).bfloat16(), 400
        total = torch.zeros(16, 64, dtype=torch.float64)
        for seed in range(draws):
            total += decode_blocks(*quantize_blocks(x, self.SPEC, seed=torch.tensor([seed])), self.SPEC).double()
        _, scale_inv, amax = quantize_blocks(x, self.SPEC, seed=torch.tensor([0]))
        unit = (scale_inv.double() * amax / 2688).repeat_interleave(16, dim=1)  # of one in the codes' grid
        v = x.double().abs() / unit
        # a block scale rounded down to E4M3 leaves the block's largest beyond 6: those clip in any rounding
        inside = v <= 6
        assert (~inside).float().mean() < 1 / 16
        step = torch.where(v < 2, 0.5, torch.where(v < 4, 1.0, 2.0))
        off = (total / draws - x.double()) / (unit * step)
        # Hoeffding, for all 1024 elements at once with probability 1 - 1e-9: sqrt(ln(2 * 1024 / 1e-9) / (2 * draws))
        assert off[inside].abs().max() <= math.sqrt(math.log(2 * 1024 / 1e-9) / (2 * draws))
        # and in sum: 6 standard deviations of inside.sum() means, each with variance at most 1 / (4 * draws)
        count = int(inside.sum())
        assert abs(float(off[inside].sum())) <= 6 * math.sqrt(count / (4 * draws))

    def test_rounding_to_nearest_would_fail_that(self):
        """A constant of 0.3 in the codes' grid becomes 0.5 always; by chance it is 0.3 on average."""
        x = torch.full((1, 4096), 0.3)
        x[0, ::16] = 6.0
        nearest = TensorSpec(E2M1, block=(1, 16), scale_format=UE4M3)
        amax = torch.tensor([2688.0])  # block scales of 1
        at_chance = decode_blocks(*quantize_blocks(x, self.SPEC, tensor_amax=amax, seed=torch.tensor([1])), self.SPEC)
        rounded = decode_blocks(*quantize_blocks(x, nearest, tensor_amax=amax), nearest)
        small = torch.arange(4096) % 16 != 0
        assert rounded[0, small].unique().tolist() == [0.5]
        # 3840 draws of 0 or 0.5: the mean's standard deviation is at most 0.25 / sqrt(3840); six of them
        assert abs(at_chance[0, small].mean() - 0.3) <= 6 * 0.25 / math.sqrt(3840)

    def test_values_of_the_grid_stay_and_the_seed_decides(self):
        grid = table(E2M1)[[1, 2, 3, 4, 5, 6, 7, 9, 10, 11, 12, 13, 14, 15]].repeat(16).view(14, 16)
        made = quantize_blocks(grid, self.SPEC, tensor_amax=torch.tensor([2688.0]), seed=torch.tensor([3]))
        full = (grid.abs().amax(dim=1) == 6).nonzero().flatten()
        assert torch.equal(decode_blocks(*made, self.SPEC)[full], grid[full])
        x = sample(64, 64)
        first, again, other = (quantize_blocks(x, self.SPEC, seed=torch.tensor([s])).codes for s in (5, 5, 6))
        assert torch.equal(first, again) and (first != other).float().mean() > 0.1

    def test_only_gradients_are_rounded_so(self):
        made = recipe("nvfp4")
        assert [made.spec(r).stochastic for r in ("input", "weight", "grad_output")] == [False, False, True]
        assert not recipe("nvfp4", disable_stochastic_rounding=True).spec("grad_output").stochastic
