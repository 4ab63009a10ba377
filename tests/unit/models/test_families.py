"""Foreign configurations: what they say in all spellings, and what is refused because our model computes otherwise."""

from dataclasses import replace

import pytest

from megafp8.core.errors import ConfigError
from megafp8.models import ModelConfig
from megafp8.models.names import config_from_hf, hf_config, resolved_rules

LLAMA3 = {"type": "llama3", "factor": 8.0, "original_max_length": 64}


def foreign(preset, **fields):
    """The config.json of a preset with some keys set, or removed where they are Ellipsis."""
    config = hf_config(ModelConfig(preset=preset)) | fields
    return {key: value for key, value in config.items() if value is not ...}


def named(preset, **fields):
    """A preset's config that has forgotten the preset's name."""
    return replace(ModelConfig(preset=preset, **fields), preset="")


REFUSED = {
    "llama, gelu": (foreign("tiny_llama", hidden_act="gelu"), "hidden_act 'gelu'"),
    "llama, half rotated": (foreign("tiny_llama", partial_rotary_factor=0.5), "partial_rotary_factor 0.5"),
    "llama, no eps": (foreign("tiny_llama", rms_norm_eps=...), "rms_norm_eps missing"),
    "llama, two thetas": (foreign("tiny_llama", rope_theta=500.0), "rope_theta 500.0 is not 10000.0"),
    "llama, unknown scaling": (
        foreign("tiny_llama", rope_scaling={"type": "longrope", "factor": 2.0}, rope_parameters=...),
        "longrope",
    ),
    "mistral, window": (foreign("tiny_mistral", sliding_window=64), "sliding_window to null"),
    "mistral, the class's window": (
        foreign("tiny_mistral", sliding_window=..., max_position_embeddings=8192),
        "sliding_window 4096",
    ),
    "mistral, no kv heads": (foreign("tiny_mistral", num_key_value_heads=...), "num_key_value_heads missing"),
    "mixtral, window": (foreign("tiny_mixtral", sliding_window=64), "sliding_window 64"),
    "qwen2, window": (foreign("tiny_qwen2", use_sliding_window=True, sliding_window=64), "sliding_window 64"),
    "qwen3, layers with a window": (
        foreign("tiny_qwen3", layer_types=["full_attention", "sliding_attention"]),
        "our attention sees all",
    ),
    "gpt2, relu": (foreign("tiny_gpt", activation_function="relu"), "activation_function 'relu'"),
    "gpt2, cross attention": (foreign("tiny_gpt", add_cross_attention=True), "add_cross_attention True"),
    "gpt2, scaled by layer": (foreign("tiny_gpt", scale_attn_by_inverse_layer_idx=True), "scale_attn_by_inverse"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_our_model_does_not_compute_is_refused_in_one_line(name):
    config, message = REFUSED[name]
    with pytest.raises(ConfigError, match=message) as caught:
        config_from_hf(config)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("window", [None, 128, 4096])
def test_a_window_as_long_as_the_model_is_none(window):
    assert config_from_hf(foreign("tiny_mistral", sliding_window=window)) == named("tiny_mistral")
    assert config_from_hf(foreign("tiny_qwen2", sliding_window=64)) == named("tiny_qwen2")  # not used


def test_both_spellings_of_rotary_positions_say_the_same():
    config = named("tiny_llama", rope_theta=500.0, rope_scaling=LLAMA3)
    both = hf_config(config)
    old = {key: value for key, value in both.items() if key != "rope_parameters"}
    older = old | {"rope_scaling": {**old["rope_scaling"], "type": old["rope_scaling"]["rope_type"]}}
    del older["rope_scaling"]["rope_type"]
    new = {key: value for key, value in both.items() if key not in ("rope_theta", "rope_scaling")}
    assert {config_from_hf(spelling) == config for spelling in (both, old, older, new)} == {True}
    plain = foreign("tiny_llama", rope_theta=..., rope_scaling=..., rope_parameters=...)  # as Llama 2 was published
    assert config_from_hf(plain) == named("tiny_llama")


def test_qwen2_has_biases_of_q_k_and_v_alone():
    names = {name for rule in resolved_rules(ModelConfig(preset="tiny_qwen2")) for name in rule.theirs}
    assert "model.layers.1.self_attn.k_proj.bias" in names and "lm_head.weight" not in names
    assert not [n for n in names if n.endswith(".bias") and ".q_" not in n and ".k_" not in n and ".v_" not in n]


def test_a_bias_that_the_class_has_not_is_refused():
    with pytest.raises(ConfigError, match=r"model.attention_bias = True cannot be exported: .*qwen2 has False"):
        hf_config(ModelConfig(preset="tiny_qwen2", attention_bias=True))
    with pytest.raises(ConfigError, match=r"model.qkv_bias = True cannot be exported: .*mistral has False"):
        hf_config(ModelConfig(preset="tiny_mistral", qkv_bias=True))


def test_layers_come_in_model_order():
    """So that a shard holds neighbours."""
    for preset in ("tiny_llama", "tiny_gpt", "tiny_deepseek"):
        names = [rule.ours for rule in resolved_rules(ModelConfig(preset=preset))]
        layers = [int(name.split(".")[1]) for name in names if name.startswith("layers.")]
        assert layers == sorted(layers) and names[0] == "embedding.weight" and not names[-1].startswith("layers.")
