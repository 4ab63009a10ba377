"""Bit for bit what Transformer Engine computes: casts, scales, the delayed-scaling update (tests/golden/README.md)."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megafp8.fp8.formats import E4M3, E5M2, cast, encode_e2m1, encode_e8m0, round_to, table
from megafp8.fp8.linear import LinearState, update_states
from megafp8.fp8.recipe import recipe as make_recipe
from megafp8.fp8.recipe import scale_from_amax, scale_inverse
from megafp8.fp8.recipes.delayed import updated

GOLDEN = Path(__file__).parents[1] / "golden"
FORMATS = pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda f: f.name)
BF16_MAX = torch.finfo(torch.bfloat16).max


def golden(name: str) -> dict[str, torch.Tensor]:
    return load_file(GOLDEN / f"te_{name}.safetensors")


def num_different(a: torch.Tensor, b: torch.Tensor) -> int:
    """Elements whose bits differ; two NaNs are equal."""
    both_nan = a.isnan() & b.isnan()
    return int(((a.view(torch.int32) != b.view(torch.int32)) & ~both_nan).sum())


def bf16_patterns() -> torch.Tensor:
    return torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)


@FORMATS
def test_every_bf16_and_the_fp32_edges_cast_to_nvidias_bytes(fmt):
    data, name = golden("cast"), fmt.name.lower()
    for x, want in (
        (bf16_patterns(), data[f"bf16_to_{name}"]),
        (data[f"f32_in_{name}"], data[f"f32_to_{name}"]),
    ):
        got, nan = cast(x, fmt), x.isnan()
        assert torch.equal(got.view(torch.uint8)[~nan], want[~nan])
        assert got.float()[nan].isnan().all()


@FORMATS
def test_rounding_by_arithmetic_gives_the_same_values_with_sign(fmt):
    data, name = golden("cast"), fmt.name.lower()
    x = torch.cat([bf16_patterns().float(), data[f"f32_in_{name}"]])
    assert num_different(round_to(x, fmt), cast(x, fmt).float()) == 0


@FORMATS
def test_decode_tables(fmt):
    want = golden("cast")[f"{fmt.name.lower()}_decode"]
    assert num_different(table(fmt), want) == 0
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(fmt.dtype)
    assert num_different(codes.float(), want) == 0


def test_e2m1_and_e8m0_codes():
    data = golden("cast")
    assert torch.equal(encode_e2m1(data["f32_in_e2m1"]), data["f32_to_e2m1"])
    assert torch.equal(encode_e8m0(data["f32_in_e8m0"]), data["f32_to_e8m0_te"])


@FORMATS
@pytest.mark.parametrize("power_2_scale", [False, True])
@pytest.mark.parametrize("epsilon", ["0", "1e-06"])
@pytest.mark.parametrize("overflow", [("f32", torch.finfo(torch.float32).max), ("bf16", BF16_MAX)])
def test_scale_from_amax(fmt, power_2_scale, epsilon, overflow):
    data = golden("scale_from_amax")
    key = f"kernel.{fmt.name.lower()}.pow2_{int(power_2_scale)}.eps_{epsilon}.inf_{overflow[0]}"
    scale = scale_from_amax(
        data["amax"],
        fmt.max,
        power_2_scale=power_2_scale,
        amax_epsilon=float(epsilon),
        value_for_inf=overflow[1],
    )
    assert num_different(scale, data[f"{key}.scale"]) == 0
    assert num_different(scale_inverse(scale), data[f"{key}.scale_inv"]) == 0


@FORMATS
@pytest.mark.parametrize("algo", ["max", "most_recent"])
@pytest.mark.parametrize("margin", [0, 2])
def test_delayed_scaling_update(fmt, algo, margin):
    data = golden("delayed_scaling")
    key = f"fused.{algo}.margin{margin}.{fmt.name.lower()}"
    history, scale = torch.zeros(3, 5), torch.ones(3)
    limits = torch.full((3,), fmt.max)
    for step, amax in enumerate(data["step_amax"]):
        history[:, 0] = amax
        history, scale = updated(
            history, scale, history[:, 0].clone(), limits, margin=margin, most_recent=algo == "most_recent"
        )
        assert num_different(scale, data[f"{key}.scale"][step]) == 0, step
        assert num_different(history, data[f"{key}.amax_history"][step].t().contiguous()) == 0, step


@pytest.mark.parametrize("algo", ["max", "most_recent"])
def test_delayed_scaling_update_through_the_states_of_a_model(algo):
    """The same vectors by the door that training uses: E4M3 as input, E5M2 as grad_output."""
    data = golden("delayed_scaling")
    recipe = make_recipe("delayed", amax_history_len=5, amax_compute_algo=algo)
    states = [LinearState(str(i), recipe, None) for i in range(3)]
    for step, amax in enumerate(data["step_amax"]):
        for state, value in zip(states, amax, strict=True):
            for role in ("input", "grad_output"):
                state.roles[role].tensors["amax_history"][0] = value
        update_states(states)
        for role, name in (("input", "e4m3"), ("grad_output", "e5m2")):
            scale = torch.cat([s.tensors()[f"{role}.scale"] for s in states])
            assert num_different(scale, data[f"fused.{algo}.margin0.{name}.scale"][step]) == 0, (step, role)
            history = torch.stack([s.tensors()[f"{role}.amax_history"] for s in states], dim=1)
            assert num_different(history, data[f"fused.{algo}.margin0.{name}.amax_history"][step]) == 0


def test_the_two_paths_of_te_differ_and_ours_is_the_fused_one():
    data = golden("delayed_scaling")
    fused, unfused = (data[f"{path}.max.margin0.e4m3.scale"] for path in ("fused", "unfused"))
    assert num_different(fused, unfused) > 0
