"""Statistics under Transformer Engine's names, on tensors whose answer is known."""

import math

import pytest
import torch

from megafp8.fp8 import LinearState, backend, quantized_linear, recipe, stats, update_states
from megafp8.fp8.blocks import quantize_blocks
from megafp8.fp8.formats import E4M3
from megafp8.fp8.quantized import Operand, quantize, tensor_factor
from megafp8.fp8.recipe import ROLES, TensorSpec
from megafp8.fp8.stat_kernels import measure

NAME = "layers.0.mlp.down"
RECIPES = ("delayed", "current", "blockwise", "mxfp8", "nvfp4")


def layer(name: str = "delayed", mode: str = "fast", *, compiled: bool = False, **options: object) -> LinearState:
    return LinearState(NAME, recipe(name, **options), backend("emulated", mode, compiled=compiled))


def operands(rows: int = 128, *, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Input, weight and a gradient whose magnitudes span many powers of two, with zeros among them."""
    noise = torch.Generator().manual_seed(seed)
    tensors = []
    for shape in ((rows, 256), (128, 256), (rows, 128)):
        x = torch.randn(shape, generator=noise) * torch.exp2(torch.randint(-14, 6, shape, generator=noise))
        tensors.append(torch.where(torch.rand(shape, generator=noise) < 0.1, 0.0, x).bfloat16())
    return tensors[0], tensors[1], tensors[2]


def one_pass(state: LinearState, x: torch.Tensor, weight: torch.Tensor, grad: torch.Tensor) -> None:
    quantized_linear(x.requires_grad_(), weight.requires_grad_(), None, state).backward(grad)


def test_counts_on_a_known_tensor():
    x = torch.tensor([[0.0, 1.0, -(2.0**-12), 2.0**-12, 1000.0, -500.0, 448.0, 16.5]])
    data = x.clamp(-448, 448).to(torch.float8_e4m3fn)
    found = measure(x, Operand(data, torch.ones(1), TensorSpec(E4M3)), compiled=False)
    underflows, overflows, squares, amax, least, largest = found.tolist()
    assert (underflows, overflows) == (2, 2)  # a zero that stays zero is no underflow
    assert (amax, least, largest) == (1000.0, 1.0, 1.0)
    errors = [0.0, 0.0, 2.0**-12, 2.0**-12, 552.0, 52.0, 0.0, 0.5]
    assert squares == pytest.approx(sum(e * e for e in errors), rel=1e-6)  # eight fp32 additions


def test_armed_for_one_step_only():
    state = layer()
    x = torch.randn(32, 48).bfloat16().requires_grad_()
    weight = torch.randn(64, 48).bfloat16().requires_grad_()
    assert state.observer is None
    stats.arm([state])
    y = quantized_linear(x, weight, None, state)
    y.backward(torch.full_like(y, 2.0**-20))
    values = stats.read([state])
    recorded = [name for name in stats.NAMES if name != "amax_ratio"]  # there is no history yet
    assert set(values) == {f"{NAME}.{role}.{name}" for role in ROLES for name in recorded}
    assert values[f"{NAME}.grad_output.underflows%"] == 100.0  # scale 1: below 2**-17 all is lost
    assert values[f"{NAME}.input.cur_amax"] == x.detach().float().abs().max().item()
    assert state.observer is None and stats.read([state]) == {}


@pytest.mark.parametrize("mode", ["fast", "exact"])
@pytest.mark.parametrize("name", [*RECIPES, "nvfp4 4over6"])
def test_every_recipe_against_the_codes(name: str, mode: str):
    """From the real codes and scales of the definition; the noise of NVFP4's gradients is left out of this one."""
    options: dict[str, object] = {"disable_stochastic_rounding": True} if "nvfp4" in name else {}
    if name == "nvfp4 4over6":
        name, options = "nvfp4", options | {"nvfp4_4over6": "all", "disable_rht": True}
    state, tensors = layer(name, mode, **options), operands()
    stats.arm([state])
    one_pass(state, *(tensor.clone() for tensor in tensors))
    values = stats.read([state])
    for role, x in zip(ROLES, tensors, strict=True):
        spec = state.recipe.spec(role)
        got = {key.split(".")[-1]: value for key, value in values.items() if f".{role}." in key}
        made = quantize(x, spec, torch.ones(1) if name == "delayed" else None)
        back, wide = made.dequantize().double(), x.double()
        assert got["underflows%"] == 100.0 * ((wide != 0) & (back == 0)).sum() / x.numel()
        # fp32 squares and their sums: 2**-22 each element, pairwise sums of 2**15 of them lose less than 2**-20
        assert got["mse"] == pytest.approx(float(((back - wide) ** 2).mean()), rel=2**-19)
        assert got["cur_amax"] == float(wide.abs().max())
        scales = made.scale_inv.float()
        if spec.block is not None:
            assert "overflows%" not in got and "scale" not in got
            made_blocks = quantize_blocks(x, spec)
            scales = made_blocks.scale_inv.float() * tensor_factor(made_blocks.tensor_amax, spec, x.device)
        # NVFP4's factor comes back from the operand with one rounding
        assert got["scale_inv_min"] == pytest.approx(float(scales.min()), rel=2**-22)
        assert got["scale_inv_max"] == pytest.approx(float(scales.max()), rel=2**-22)


def test_blocks_of_zeros_are_left_out_of_the_scales():
    state = layer("blockwise")
    x = torch.cat([torch.zeros(64, 256), torch.full((64, 256), 3.5)]).bfloat16()
    stats.arm([state])
    with torch.no_grad():
        quantized_linear(x, torch.ones(128, 256).bfloat16(), None, state)
    values = stats.read([state])
    assert values[f"{NAME}.input.scale_inv_min"] == values[f"{NAME}.input.scale_inv_max"] == 3.5 / 448
    assert f"{NAME}.grad_output.mse" not in values  # it did not occur


def test_compiled_is_the_same():
    for name, role in (("current", "input"), ("mxfp8", "input"), ("blockwise", "weight")):
        x, spec = operands(rows=256)[ROLES.index(role)], recipe(name).spec(role)
        operand = backend("emulated", "fast", compiled=False).quantize(x, spec, None)[0].rows
        plain, fused = (measure(x, operand, compiled=compiled).tolist() for compiled in (False, True))
        assert fused[2] == pytest.approx(plain[2], rel=2**-19)  # squares, as above
        assert fused[:2] + fused[3:] == plain[:2] + plain[3:]


def test_what_if_is_what_a_run_in_that_recipe_would_say():
    tensors = operands()
    for name in ("current", "blockwise", "mxfp8"):
        there = layer(name)
        stats.arm([there])
        one_pass(there, *(tensor.clone() for tensor in tensors))
        expected = stats.read([there])
        here = layer("delayed")
        stats.arm([here], what_if={name: recipe(name)})
        one_pass(here, *(tensor.clone() for tensor in tensors))
        found = stats.read([here])
        prefix = stats.PREFIXES[name]
        what_if = {key.replace(f".{prefix}", "."): value for key, value in found.items() if f".{prefix}" in key}
        assert what_if == expected


def test_what_if_of_random_rounding():
    state = layer("current")
    stats.arm([state], what_if={"nvfp4": recipe("nvfp4")})
    one_pass(state, *operands())
    found = stats.read([state])
    # three bits of mantissa against one
    assert found[f"{NAME}.weight.nvfp4_mse"] > 4 * found[f"{NAME}.weight.mse"]
    assert found[f"{NAME}.grad_output.nvfp4_underflows%"] > 0


def test_micro_batches_count_together_and_a_weight_once():
    parts = [operands(seed=seed) for seed in (1, 2, 3)]
    weight, state = parts[0][1], layer("current")
    state.begin_step(1, 0)
    stats.arm([state])
    for x, _, grad in parts:
        one_pass(state, x.clone(), weight.clone(), grad)
        state.drop_weight_cache()
    together = stats.read([state])
    alone = []
    for x, _, grad in parts:
        stats.arm([state])
        one_pass(state, x.clone(), weight.clone(), grad)
        alone.append(stats.read([state]))
        state.drop_weight_cache()
    for statistic, join in (("underflows%", lambda v: sum(v) / 3), ("mse", lambda v: sum(v) / 3), ("cur_amax", max)):
        key = f"{NAME}.input.{statistic}"
        assert together[key] == pytest.approx(join([values[key] for values in alone]), rel=1e-12)  # three fp64 sums
        assert together[f"{NAME}.weight.{statistic}"] == alone[0][f"{NAME}.weight.{statistic}"]
    assert together[f"{NAME}.input.scale_inv_max"] == max(v[f"{NAME}.input.scale_inv_max"] for v in alone)
    assert together[f"{NAME}.input.scale"] == min(v[f"{NAME}.input.scale"] for v in alone)


def test_only_modules_that_a_pattern_finds():
    states = [LinearState(f"layers.{i}.mlp.{n}", recipe("current"), backend("emulated")) for i in (0, 1) for n in "ab"]
    stats.arm(states, modules=r"1\.mlp")
    assert [state.observer is not None for state in states] == [False, False, True, True]
    stats.arm(states, modules="a$")
    assert [state.observer is not None for state in states] == [True, False, True, True]


def test_amax_now_over_the_largest_past_one():
    state = layer(amax_history_len=4)
    weight = torch.ones(16, 32).bfloat16().requires_grad_()
    ratios = []
    for size in (2.0, 8.0, 4.0, 16.0):
        stats.arm([state])
        quantized_linear(torch.full((16, 32), size).bfloat16(), weight, None, state).sum().backward()
        ratios.append(stats.read([state]).get(f"{NAME}.input.amax_ratio"))
        update_states([state])
    assert ratios == [None, 4.0, 0.5, 2.0]


def test_a_value_that_is_not_finite_shows_in_the_error():
    state = layer("current")
    x, weight, grad = operands()
    x[3, 5] = torch.nan
    stats.arm([state])
    one_pass(state, x, weight, grad)
    found = stats.read([state])
    assert math.isnan(found[f"{NAME}.input.mse"]) and found[f"{NAME}.input.cur_amax"] == x.nan_to_num(0.0).abs().max()


def test_a_spike_clips_once_and_then_holds_the_scale_low():
    """Delayed scaling's two sides: the spike overflows, and for L micro-batches after it small values are coarser."""
    state = LinearState("l", recipe("delayed", amax_history_len=3), backend("emulated", "fast", compiled=False))
    weight = torch.randn(16, 32).bfloat16().requires_grad_()
    seen = []
    for factor in (1.0, 1.0, 100.0, 1.0, 1.0, 1.0, 1.0):
        x = (torch.randn(64, 32, generator=torch.Generator().manual_seed(1)) * factor).bfloat16().requires_grad_()
        stats.arm([state])
        quantized_linear(x, weight, None, state).sum().backward()
        seen.append(stats.read([state]))
        update_states([state])
    overflows = [s["l.input.overflows%"] for s in seen]
    scales = [s["l.input.scale"] for s in seen]
    assert overflows[2] > 50 and overflows[:2] == [0.0, 0.0] and overflows[3:] == [0.0] * 4
    assert scales[3] == scales[4] == scales[5] == pytest.approx(scales[1] / 100, rel=2**-7)  # bf16 rounds the spike
    assert scales[6] == scales[1]


def test_current_scaling_never_overflows():
    state = layer("current")
    stats.arm([state])
    for seed in range(20):
        x = torch.randn(64, 48, generator=torch.Generator().manual_seed(seed)).bfloat16()
        with torch.no_grad():
            quantized_linear(x, torch.randn(64, 48).bfloat16(), None, state)
    assert stats.read([state])[f"{NAME}.input.overflows%"] == 0.0
