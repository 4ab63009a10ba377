"""Recipes by name: Transformer Engine's option names and defaults, and refusals that say the way out."""

import pytest

from megafp8.core.errors import ConfigError
from megafp8.fp8 import backend, recipe
from megafp8.fp8.formats import E2M1, E4M3, E5M2, E8M0, UE4M3
from megafp8.fp8.recipe import ROLES, TensorSpec, recipe_names


def test_the_folder_is_the_registry():
    assert {"delayed", "current"} <= set(recipe_names())
    for name in recipe_names():
        assert recipe(name).name == name


def test_delayed_defaults_are_those_of_transformer_engine():
    made = recipe("delayed")
    options = (made.margin, made.fp8_format, made.amax_history_len, made.amax_compute_algo, made.reduce_amax)
    assert options == (0, "HYBRID", 1024, "max", True)
    assert [made.spec(r).format for r in ("input", "weight", "grad_output")] == [E4M3, E4M3, E5M2]
    assert all(made.spec(r).delayed for r in ("input", "weight", "grad_output"))


def test_current_options_reach_the_spec():
    assert recipe("current").spec("grad_output") == TensorSpec(E5M2)
    made = recipe("current", use_power_2_scales=True, amax_epsilon=1e-6, fp8_format="E4M3")
    assert made.spec("grad_output") == TensorSpec(E4M3, power_2_scale=True, amax_epsilon=1e-6)


def test_block_recipes_say_what_is_quantized_how():
    """Blocks of weights are square, so that both their GEMMs see one weight; those of MXFP8 only if asked for."""
    blocks = {name: [recipe(name).spec(role) for role in ROLES] for name in ("blockwise", "mxfp8", "nvfp4")}
    vectors = TensorSpec(E4M3, block=(1, 128), power_2_scale=True)
    assert blocks["blockwise"] == [vectors, TensorSpec(E4M3, block=(128, 128), power_2_scale=True), vectors]
    assert blocks["mxfp8"] == [TensorSpec(E4M3, block=(1, 32), scale_format=E8M0)] * 3
    assert [s.block for s in blocks["nvfp4"]] == [(1, 16), (16, 16), (1, 16)]
    assert {(s.format.name, s.scale_format) for s in blocks["nvfp4"]} == {("E2M1", UE4M3)}
    assert [s.hadamard for s in blocks["nvfp4"]] == [True, False, True]
    assert all(recipe(name).new_state("cpu") == {} for name in blocks)


def test_options_of_block_recipes_reach_the_spec():
    made = recipe("blockwise", use_f32_scales=True, amax_epsilon=1e-5, w_block_scaling_dim=1, fp8_format="HYBRID")
    assert made.spec("weight") == TensorSpec(E4M3, block=(1, 128), amax_epsilon=1e-5)
    assert made.spec("grad_output").format == E5M2
    assert recipe("mxfp8", enable_2d_quantization=True).spec("weight").block == (32, 32)
    assert recipe("mxfp8", enable_2d_quantization=True).spec("input").block == (1, 32)
    plain = recipe("nvfp4", disable_rht=True, disable_stochastic_rounding=True, disable_2d_quantization=True)
    assert {plain.spec(role) for role in ROLES} == {TensorSpec(E2M1, block=(1, 16), scale_format=UE4M3)}


def test_4over6_is_for_weights_or_inputs_and_never_for_gradients():
    made = recipe("nvfp4", nvfp4_4over6="all", disable_rht=True, nvfp4_4over6_err_mode="MSE")
    assert [made.spec(role).four_over_six for role in ROLES] == ["MSE", "MSE", None]
    assert [made.spec(role).block_scale_max for role in ROLES] == [256.0, 256.0, 448.0]
    made = recipe("nvfp4", nvfp4_4over6="weights", nvfp4_4over6_e4m3_use_256="activations")
    assert [made.spec(role).four_over_six for role in ROLES] == [None, "MAE", None]
    assert made.spec("weight").block_scale_max == 448.0


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("delayd", {}, ["delayd", "nearest: delayed"]),
        ("delayed", {"amax_history": 4}, ["amax_history", "nearest: amax_history_len"]),
        ("delayed", {"amax_history_len": 0, "margin": -1}, ["amax_history_len", "margin"]),
        ("delayed", {"fp8_format": "E5M2"}, ["fp8_format", "HYBRID"]),
        ("current", {"amax_history_len": 4}, ["amax_history_len"]),
        ("blockwise", {"x_block_scaling_dim": 2}, ["x_block_scaling_dim", "w_block_scaling_dim", "128x128"]),
        ("blockwise", {"w_block_scaling_dim": 3}, ["w_block_scaling_dim", "3"]),
        ("mxfp8", {"enable_2d": True}, ["enable_2d", "nearest: enable_2d_quantization"]),
        ("nvfp4", {"nvfp4_4over6": "all"}, ["nvfp4_4over6", "'weights'", "disable_rht"]),
    ],
)
def test_wrong_names_and_values_are_refused(name, options, words):
    with pytest.raises(ConfigError) as error:
        recipe(name, **options)
    assert all(word in str(error.value) for word in words), error.value


def test_backends_by_name():
    assert backend("emulated", "exact").name == "emulated"
    chosen = backend("auto", device="cpu")
    assert (chosen.name, chosen.reason) == ("emulated", "auto: the run is on CPU")
    for name, mode, near in (("nativ", "fast", "native"), ("emulated", "exct", "exact")):
        with pytest.raises(ConfigError, match=f"nearest: {near}"):
            backend(name, mode)


@pytest.mark.parametrize("name", ["emulated", "native"])
def test_dims_that_fp8_cannot_take(name):
    chosen = backend(name, device="cpu")
    assert chosen.supports(recipe("delayed"), 512, 1408) is None
    refusal = chosen.supports(recipe("delayed"), 500, 1408)
    assert refusal is not None and "in_features 500" in refusal and "496, 512" in refusal
    assert "out_features 8 " in (chosen.supports(recipe("current"), 512, 8) or "")
