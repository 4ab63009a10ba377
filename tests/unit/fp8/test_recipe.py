"""Recipes by name: Transformer Engine's option names and defaults, and refusals that say the way out."""

import pytest

from megafp8.core.errors import ConfigError
from megafp8.fp8 import backend, recipe
from megafp8.fp8.formats import E4M3, E5M2
from megafp8.fp8.recipe import TensorSpec, recipe_names


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


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("delayd", {}, ["delayd", "nearest: delayed"]),
        ("delayed", {"amax_history": 4}, ["amax_history", "nearest: amax_history_len"]),
        ("delayed", {"amax_history_len": 0, "margin": -1}, ["amax_history_len", "margin"]),
        ("delayed", {"fp8_format": "E5M2"}, ["fp8_format", "HYBRID"]),
        ("current", {"amax_history_len": 4}, ["amax_history_len"]),
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
