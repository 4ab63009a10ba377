"""Adam's moments in bf16 and FP8: codes, rounding, the fused step against one written plainly, and what a run feels."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import nn

from megafp8.core.layout import Layout, stamp
from megafp8.fp8.formats import E4M3, E5M2, Format, finite_values, table
from megafp8.optim import moments
from megafp8.optim.adamw import AdamW
from megafp8.optim.config import OptimizerConfig, moments_bytes
from megafp8.optim.moments import Moment
from megafp8.optim.narrow import EXP_AVG, EXP_AVG_SQ, block_width, random_bits, uniform, update_kernel
from megafp8.parallel.mesh import Mesh

Tensor = torch.Tensor
MESH = Mesh.single()
FORMS = {"E4M3": (E4M3, EXP_AVG["fp8"]), "E5M2": (E5M2, EXP_AVG_SQ["fp8"])}
NARROW = [pair for pair in product(("fp32", "bf16", "fp8"), repeat=2) if pair != ("fp32", "fp32")]


def spread(rows: int, width: int, seed: int = 0, *, octaves: float = 4.0) -> Tensor:
    """Values of both signs over many octaves."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.exp2(octaves * torch.randn(rows, width, generator=generator))
    return size * torch.randn(rows, width, generator=generator)


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("exponent", [20, 127, 200])
def test_every_code_is_the_formats_value_times_the_blocks_scale(name, exponent):
    fmt, form = FORMS[name]
    codes = torch.arange(256 if name == "E4M3" else 128, dtype=torch.uint8)
    expected = table(fmt)[: len(codes)].double() * 2.0 ** (exponent - 127)
    real = expected.isfinite()
    got = form.read(codes.view(1, -1), torch.tensor([[exponent]], dtype=torch.uint8)).flatten()
    assert torch.equal(got[real].double(), expected[real])


def rounded(x: Tensor, u: Tensor, fmt: Format) -> Tensor:
    """What `write` stores, by looking neighbours up: the upper one where (x - lower) / gap + u is 1 or more."""
    out = torch.zeros_like(x)
    values = finite_values(fmt)[finite_values(fmt) >= 0].double()
    for row in range(len(x)):
        scale = 1.0
        largest = float(x[row].abs().max())
        while largest / scale > fmt.max:
            scale *= 2.0
        while largest > 0 and largest * 2.0 / scale <= fmt.max:
            scale /= 2.0
        size = x[row].abs().double() / scale
        above = torch.searchsorted(values, size, right=True).clamp(max=len(values) - 1)
        low, high = values[above - 1], values[above]
        part = ((size - low) / (high - low)).clamp(max=1.0)
        found = torch.where(part + u[row].double() >= 1.0, high, low)
        if fmt is E5M2:  # a second moment: never 0
            found = torch.where((found == 0) & (size > 0), values[1], found)
        out[row] = (found * scale).float() * x[row].sign()
    return out


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("width", [128, 37])
def test_rounding_is_to_a_neighbour_by_chance(name, width):
    fmt, form = FORMS[name]
    x = spread(24, width)
    x[3] = 0.0
    x[4, 1:] = 0.0
    x[5] = fmt.max * 2.0**7 * x[5].sign()  # the largest value itself
    x = x if name == "E4M3" else x.abs()
    u = uniform(random_bits(torch.arange(24, dtype=torch.int32).view(-1, 1) * width, width, torch.tensor([7]).int()))
    assert torch.equal(form.read(*form.write(x, u)), rounded(x, u, fmt))
    # values that can be stored stay, whatever the bits, in FP8 and in the bf16 of a checkpoint
    stored = form.read(*form.write(x, u))
    assert torch.equal(form.read(*form.write(stored, 1 - u)), stored)
    assert torch.equal(stored.bfloat16().float(), stored)


def test_bf16_is_rounded_to_a_neighbour_by_chance():
    x, form = spread(50, 64), EXP_AVG["bf16"]
    bits = torch.randint(0, 1 << 16, x.shape, generator=torch.Generator().manual_seed(1))
    got = form.write(x, uniform(bits))[0].float()
    low = (x.view(torch.int32) & -65536).view(torch.float32)
    high = (low.view(torch.int32) + 65536).view(torch.float32)
    up = (x.view(torch.int32) & 0xFFFF) + bits >= 1 << 16
    assert torch.equal(got, torch.where(up, high, low))


def test_bits_depend_on_seed_and_place_alone_and_are_fair():
    seed = torch.tensor([1234], dtype=torch.int32)
    whole = random_bits(torch.tensor([[0], [4096]], dtype=torch.int32), 4096, seed).flatten()
    parts = random_bits((torch.arange(64, dtype=torch.int32) * 128).view(-1, 1), 128, seed).flatten()
    assert torch.equal(whole, parts)
    assert not torch.equal(whole, random_bits(torch.tensor([[0], [4096]], dtype=torch.int32), 4096, seed + 1).flatten())
    n = len(whole)
    for shift in range(32):  # each bit is 1 half of the time: 5 deviations of sqrt(n) / 2
        assert abs(int(((whole >> shift) & 1).sum()) - n / 2) < 5 * n**0.5 / 2, shift
    u = torch.stack([uniform(whole >> 16), uniform(whole)]).double()
    assert (u.mean(1) - 0.5).abs().max() < 5 * (1 / 12 / n) ** 0.5
    assert abs(float(torch.corrcoef(u)[0, 1])) < 5 / n**0.5 and abs(float(torch.corrcoef(u[:, 1:])[0, 1])) < 5 / n**0.5


def test_a_moment_without_gradient_decays_and_would_not_by_rounding_to_nearest():
    # E5M2's codes are at least 1/8 apart, relatively, and a step takes 1/20: nearest holds every value for ever. By
    # chance the mean over 4096 values is 0.95^20 = 0.358; one value deviates by less than 0.5 of it (a step rounds with
    # a deviation of at most half a gap, 1/8, summed over the 10 steps that the mean remembers: 0.4), so that the mean
    # stands within 5 * 0.5 / 64 of it.
    form, block = EXP_AVG_SQ["fp8"], torch.ones(32, 128)
    block[:, 0] = 57344.0  # a scale that stays
    for how in ("nearest", "by chance"):
        data, exponents = form.write(block, torch.full_like(block, 0.5))
        for step in range(20):
            square = form.read(data, exponents) * 0.95
            square[:, 0] = 57344.0
            first = (torch.arange(32, dtype=torch.int32) * 128).view(-1, 1)
            bits = random_bits(first, 128, torch.tensor([step * 7919], dtype=torch.int32))
            data, exponents = form.write(square, uniform(bits) if how == "by chance" else torch.full_like(block, 0.5))
        mean = float(form.read(data, exponents)[:, 1:].mean())
        assert mean == 1.0 if how == "nearest" else mean == pytest.approx(0.95**20, rel=5 * 0.5 / 64)


def test_a_second_moment_above_zero_never_becomes_zero():
    x = torch.tensor([[1.0, 1e-30, 0.0, 2.0**-36]])
    stored = EXP_AVG_SQ["fp8"].read(*EXP_AVG_SQ["fp8"].write(x, torch.full_like(x, 2.0**-17)))
    least = 2.0**-16 * 2.0**-15  # E5M2's smallest value under the scale of 1.0, which becomes 2^15
    assert stored.tolist() == [[1.0, least, 0.0, least]]


@pytest.mark.parametrize(
    ("columns", "width"), [(0, 1), (1, 1), (24, 24), (128, 128), (256, 128), (1376, 86), (4096, 128), (131, 131)]
)
def test_block_width(columns, width):
    assert block_width(columns) == width and columns % width == 0


def plain_step(master, grad, mean, square, config, step, lr, decay):
    """AdamW in fp32, as Loshchilov and Hutter write it, the moments before they are stored."""
    mean = mean + (1 - config.beta1) * (grad - mean)
    square = config.beta2 * square + (1 - config.beta2) * grad**2
    root = (square / (1 - config.beta2**step)).sqrt() + config.eps
    return master * (1 - lr * decay) - lr * mean / (1 - config.beta1**step) / root, mean, square


def make(columns: int, dtype: torch.dtype = torch.float32) -> list[tuple[str, nn.Parameter]]:
    named = []
    shapes = {"layers.0.mlp.down.weight": (40, columns), "final_norm.weight": (columns,)}
    for number, (name, shape) in enumerate(shapes.items()):
        value = torch.randn(shape, generator=torch.Generator().manual_seed(number))
        param = nn.Parameter(value.to(dtype))
        stamp(param, Layout(shape))
        param.main_grad = torch.zeros(shape)
        named.append((name, param))
    return named


@pytest.mark.parametrize(("exp_avg", "exp_avg_sq"), NARROW)
@pytest.mark.parametrize("columns", [256, 37])
def test_a_step_equals_one_written_plainly(exp_avg, exp_avg_sq, columns):
    config = OptimizerConfig(exp_avg_dtype=exp_avg, exp_avg_sq_dtype=exp_avg_sq)
    named = make(columns)
    optimizer = AdamW(named, config, MESH)
    generator = torch.Generator().manual_seed(3)
    for step in range(1, 4):
        before = {key: t.clone().float() for key, t in optimizer.tensors().items()}
        for _, param in named:
            param.main_grad.copy_(torch.randn(param.shape, generator=generator))
        optimizer.step(1e-2, grad_scale=0.5)
        for name, param in named:
            decay = 0.1 if name.startswith("layers") else 0.0
            old = [before[f"optimizer.{kind}.{name}"] for kind in ("master", "exp_avg", "exp_avg_sq")]
            weight, mean, square = plain_step(old[0], param.main_grad, *old[1:], config, step, 1e-2, decay)
            # a step is at most lr / (1 - beta) large; both sides round a dozen times on its way, once a weight below 4
            assert (param - weight).abs().max() < 12 * 2**-24 * 0.1 + 2**-24 * 4
            now = optimizer.tensors()
            for kind, exact, dtype in (("exp_avg", mean, exp_avg), ("exp_avg_sq", square, exp_avg_sq)):
                stored = now[f"optimizer.{kind}.{name}"].float()
                # neighbours are 1/8 apart in E4M3, 1/4 in E5M2, 1/128 in bf16, and 2^-17 (2^-31) of the block's largest
                gap = {"fp32": 2**-22, "bf16": 2**-7, "fp8": 0.125 if kind == "exp_avg" else 0.25}[dtype]
                top = exact.abs().max() * (2.0**-16 if dtype == "fp8" and kind == "exp_avg" else 2.0**-22)
                assert ((stored - exact).abs() <= gap * exact.abs() + top).all(), (kind, dtype)


@pytest.mark.parametrize(
    ("exp_avg", "exp_avg_sq"), [("fp8", "fp8"), pytest.param("bf16", "fp32", marks=pytest.mark.slow)]
)
def test_the_compiled_step_stores_the_same_bytes(exp_avg, exp_avg_sq):
    kernel = update_kernel(EXP_AVG[exp_avg], EXP_AVG_SQ[exp_avg_sq])
    numbers = torch.tensor([0.1, 0.95, 0.05, 0.999, 1e-2, 4.5, 1e-8])
    compiled = torch.compile(kernel, dynamic=True, fullgraph=True)
    for rows, width in ((64, 128), (5, 43)):
        results = []
        for function in (kernel, compiled):
            master, grad = spread(rows, width, 1), spread(rows, width, 2)
            mean, square = Moment.zeros(EXP_AVG[exp_avg], master), Moment.zeros(EXP_AVG_SQ[exp_avg_sq], master)
            first = (torch.arange(rows, dtype=torch.int32) * width).view(-1, 1)
            mean.fill(spread(rows, width, 3))
            square.fill(spread(rows, width, 4).abs())
            moments = (mean.data, mean.exponents, square.data, square.exponents)
            function(master, grad, *moments, first, torch.tensor([9], dtype=torch.int32), numbers)
            results.append((master, *moments))
        for plain, fast in zip(results[0][1:], results[1][1:], strict=True):
            assert torch.equal(plain, fast)
        # torch's own square root is an ulp off in a sixth of the cases; a step here is at most 1e-2 * 2^5 large
        assert (results[0][0] - results[1][0]).abs().max() <= 2**-22 * results[0][0].abs().max()


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_chunks_and_compiler_change_nothing_that_is_stored(compiled, monkeypatch):
    config, results = OptimizerConfig(exp_avg_dtype="fp8", exp_avg_sq_dtype="fp8"), []
    for chunk in (1 << 20, 3 * 128):
        monkeypatch.setattr(moments, "CHUNK_ELEMENTS", chunk)
        named = make(256)
        optimizer = AdamW(named, config, MESH, compiled=compiled and chunk < 1 << 20)
        for step in range(2):
            for _, param in named:
                param.main_grad.copy_(spread(1, param.numel(), step).view(param.shape))
            optimizer.step(1e-2)
        results.append(optimizer.tensors())
    for key, value in results[0].items():
        if "master" not in key:  # those differ by an ulp where torch's square root does
            assert torch.equal(value, results[1][key]), key


@pytest.mark.parametrize(("exp_avg", "exp_avg_sq"), [("fp8", "fp8"), ("bf16", "fp32"), ("fp32", "fp8")])
def test_state_moves_exactly_and_its_bytes_are_those_of_the_formula(exp_avg, exp_avg_sq):
    config = OptimizerConfig(exp_avg_dtype=exp_avg, exp_avg_sq_dtype=exp_avg_sq)
    first, second = make(256, torch.bfloat16), make(256, torch.bfloat16)
    a, b = AdamW(first, config, MESH), AdamW(second, config, MESH)
    for step in range(3):
        for _, param in first:
            param.main_grad.copy_(spread(1, param.numel(), step).view(param.shape))
        a.step(1e-2)
    saved = a.tensors()
    assert {saved[f"optimizer.{k}.final_norm.weight"].dtype for k in ("exp_avg", "exp_avg_sq")} == {
        torch.float32 if dtype == "fp32" else torch.bfloat16 for dtype in (exp_avg, exp_avg_sq)
    }
    for key, tensor in b.tensors().items():
        tensor.copy_(saved[key])
    b.step_count = a.step_count
    b.load_done()
    for optimizer, named in ((a, first), (b, second)):
        for _, param in named:
            param.main_grad.copy_(spread(1, param.numel(), 9).view(param.shape))
        optimizer.step(1e-2)
    for key, tensor in a.tensors().items():
        assert torch.equal(tensor, b.tensors()[key]), key
    count = sum(param.numel() for _, param in first)
    assert a.state_bytes == 4 * count + moments_bytes(count, (exp_avg, exp_avg_sq), 4)


def test_narrow_moments_are_a_quarter():
    # two bytes, and for each 128 elements two for the scales and four for the place
    assert moments_bytes(1 << 20, ("fp8", "fp8"), 4) / moments_bytes(1 << 20, ("fp32", "fp32"), 4) < 0.256


def learn(lr: float, steps: int = 150, **moments: str) -> list[float]:
    """Losses of a two-layer network that learns a fixed random one, on batches of its own every step."""
    generator = torch.Generator().manual_seed(0)
    target = [torch.randn(64, 64, generator=generator) / 8 for _ in range(2)]
    weights = [torch.randn(64, 64, generator=generator) / 8 for _ in range(2)]
    named = [(f"layers.{i}.mlp.down.weight", nn.Parameter(w)) for i, w in enumerate(weights)]
    for _, param in named:
        param.main_grad = torch.zeros_like(param)
    optimizer, losses = AdamW(named, OptimizerConfig(weight_decay=0.0, **moments), MESH), []
    for _ in range(steps):
        x = torch.randn(256, 64, generator=generator)
        expected = torch.tanh(x @ target[0]) @ target[1]
        loss = ((torch.tanh(x @ named[0][1]) @ named[1][1]) - expected).square().mean()
        for (_, param), grad in zip(named, torch.autograd.grad(loss, [p for _, p in named]), strict=True):
            param.main_grad.copy_(grad)
        optimizer.step(lr)
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(("exp_avg", "exp_avg_sq"), [("fp8", "fp8"), ("bf16", "bf16"), ("fp8", "fp32")])
def test_training_stays_within_a_band_of_fp32_moments(exp_avg, exp_avg_sq):
    """An update is lr * mean / sqrt(square). E5M2 by chance gives the square a deviation of at most 0.4 of itself (see
    above), its root one of 0.2; E4M3's half gap, 1/16, over the 5 steps that the mean remembers: 0.15 of the mean. Both
    are independent of the gradient, so that they add noise and lengthen a step by (3/8) 0.4^2 = 6%: as much as a rate
    6% higher would. Hence the band: at every step as far as 0.4 of the way to the loss at rates 15% lower and higher.
    """
    wide, slow, fast = (learn(3e-3 * factor) for factor in (1.0, 0.85, 1.15))
    got = learn(3e-3, exp_avg_dtype=exp_avg, exp_avg_sq_dtype=exp_avg_sq)
    assert got[0] == wide[0]
    assert all(f < w < s for f, w, s in list(zip(fast, wide, slow, strict=True))[1:])
    for loss, w, s, f in zip(got, wide, slow, fast, strict=True):
        assert w - 0.4 * (w - f) <= loss <= w + 0.4 * (s - w)


@pytest.mark.parametrize("kernel", ["te", "apex"])
def test_kernels_that_keep_moments_in_fp32_are_refused(kernel):
    with pytest.raises(ValueError, match=f'kernel {kernel!r} updates moments in fp32 only.*exp_avg_sq_dtype.*"auto"'):
        OptimizerConfig(kernel=kernel, exp_avg_sq_dtype="fp8")
