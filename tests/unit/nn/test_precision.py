"""Which linear runs in which recipe, and what is refused; FP8 models train."""

from __future__ import annotations

import pytest
import torch

from megafp8.core.config import build as build_config
from megafp8.core.errors import ConfigError
from megafp8.core.recipe_options import DIM_MULTIPLES, OPTIONS
from megafp8.fp8.recipe import dim_multiple, recipe_names
from megafp8.fp8.recipe import recipe as fp8_recipe
from megafp8.models import ModelConfig, build, check_model
from megafp8.models.config import gemm_shapes
from megafp8.nn.precision import RECIPES, PrecisionConfig, plan_gemms, precision_rows

TINY = ModelConfig(preset="tiny_llama", num_layers=4)
NAMES = list(gemm_shapes(TINY))


def test_first_and_last_layers_and_patterns() -> None:
    precision = PrecisionConfig(
        recipe="delayed", first_layers_bf16=1, last_layers_bf16=1, patterns={"down": "current", r"layers\.2\.": "none"}
    )
    plan, problems = plan_gemms(precision, NAMES, 4)
    assert not problems
    assert plan["layers.0.attention.qkv"] == "none" and plan["layers.3.mlp.gate_up"] == "none"
    assert plan["layers.1.attention.qkv"] == "delayed" and plan["layers.1.mlp.down"] == "current"
    assert plan["layers.2.mlp.down"] == "none"  # the last pattern wins
    assert plan["layers.0.mlp.down"] == "current"  # a pattern is stronger than the layer rule
    rows = {name: (recipe, reason) for name, recipe, reason in precision_rows(precision, NAMES, 4)}
    assert rows["layers.2.mlp.down"] == ("bf16", r"pattern 'layers\\.2\\.'")
    assert rows["layers.0.attention.qkv"] == ("bf16", "first_layers_bf16 = 1")
    assert rows["layers.0.mlp.down"] == ("current", "")


def test_refusals_name_value_rule_and_way_out() -> None:
    with pytest.raises(ConfigError, match=r"'attn' matches no linear; the linears are attention.qkv"):
        build(TINY, precision=PrecisionConfig(recipe="delayed", patterns={"attn": "none"}))
    odd = ModelConfig(preset="tiny_llama", ffn_hidden_size=168)
    problems = check_model(odd, precision=PrecisionConfig(recipe="current"))
    assert problems and "mlp.down: in dim 168 is not a multiple of 16" in problems[0]
    assert "nearest: 160 or 176" in problems[0] and '"mlp.down" = "none"' in problems[0]
    kept = PrecisionConfig(recipe="current", patterns={"mlp.down": "none"})
    assert check_model(odd, precision=kept) == []
    for patterns, said in (({"(": "none"}, "not a regular expression"), ({"down": "mxfp6"}, "nearest: mxfp8")):
        with pytest.raises(ConfigError, match=f"patterns: .*{said}"):
            build_config(PrecisionConfig, {"patterns": patterns})


@pytest.mark.parametrize(
    ("recipe", "multiple"), [("delayed", 16), ("current", 16), ("blockwise", 128), ("mxfp8", 32), ("nvfp4", 16)]
)
def test_dims_of_each_recipe_are_judged_where_a_rank_has_them(recipe: str, multiple: int) -> None:
    fits = {"hidden_size": 4 * multiple, "ffn_hidden_size": 2 * multiple, "num_attention_heads": 4}
    shape = {"num_layers": 3, "vocab_size": 256, **fits}
    precision = PrecisionConfig(recipe=recipe)
    assert check_model(ModelConfig(**shape), tp=2, precision=precision) == []
    odd = ModelConfig(**shape | {"ffn_hidden_size": 3 * multiple})
    (line,) = check_model(odd, tp=2, precision=precision)
    assert line == (
        f"layers.*.mlp.down: in dim {3 * multiple // 2} on each of 2 tp ranks is not a multiple of {multiple}, as "
        f"recipe {recipe} needs; nearest: {multiple} or {2 * multiple}, or keep the linear out of FP8: "
        'precision.patterns = { "mlp.down" = "none" }'
    )
    some = PrecisionConfig(recipe=recipe, patterns={r"layers\.1\.": "none"})
    assert check_model(odd, tp=2, precision=some)[0].startswith("layers.0, 2.mlp.down: in dim")
    out = PrecisionConfig(recipe=recipe, patterns={"mlp.down": "none"})
    assert check_model(odd, tp=2, precision=out) == []


WRONG: list[tuple[dict, str]] = [
    ({"recipe": "block_wise"}, r"recipe: 'block_wise' is refused: .*; nearest: blockwise"),
    ({"recipe": "delayed", "options": {"margn": 4}}, "options.margn: unknown key; nearest: margin"),
    ({"recipe": "delayed", "options": {"amax_history_len": 0}}, "options.amax_history_len: 0 is refused"),
    ({"recipe": "nvfp4", "options": {"margin": 1}}, "options.margin: unknown key"),
    ({"recipe": "blockwise", "options": {"x_block_scaling_dim": 2}}, "options: x_.* and w_.* are 2, but no GEMM"),
    ({"patterns": {"down": "mxfp8"}, "options": {"fp8_format": "E4M4"}}, "options.fp8_format: 'E4M4' .*nearest: E4M3"),
    ({"options": {"margin": 1}}, "options: margin: without a recipe there are none"),
    ({"patterns": {"down": "mxfp8", "out": "current"}, "options": {"fp8_format": "E4M3"}}, "of which recipe"),
    ({"recipe": "current", "options": {"mxfp8": {"fp8_format": "E4M3"}}}, "no linear is in this recipe .used: current"),
    ({"recipe": "current", "options": {"current": 3}}, "must be a table"),
    (
        {"recipe": "delayed", "patterns": {"down": "mxfp8"}, "options": {"margin": 1, "mxfp8": {"margin": 1}}},
        "options.mxfp8.margin: unknown key",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("values", "said"), WRONG)
def test_unknown_recipes_and_options_are_refused(values: dict, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        build_config(PrecisionConfig, values)


def test_all_wrong_options_come_at_once_a_line_each() -> None:
    wrong = {"margin": -1, "fp8_format": "E5M2", "algo": "max"}
    with pytest.raises(ConfigError) as refusal:
        build_config(PrecisionConfig, {"recipe": "delayed", "options": wrong})
    lines = str(refusal.value).splitlines()
    assert len(lines) == 3 and all(line.startswith("options.") for line in lines)


def test_config_knows_the_recipes_that_there_are() -> None:
    assert sorted(RECIPES) == recipe_names()
    for name, options in OPTIONS.items():
        assert isinstance(fp8_recipe(name), options) and dim_multiple(fp8_recipe(name)) == DIM_MULTIPLES[name]


def test_options_go_to_the_recipe_that_they_are_written_for() -> None:
    options = {"amax_history_len": 4, "mxfp8": {"enable_2d_quantization": True}}
    mixed = PrecisionConfig(recipe="delayed", patterns={"down": "mxfp8", "out": "none"}, options=options)
    assert mixed.recipes == ("delayed", "mxfp8")
    assert mixed.options_of("delayed") == {"amax_history_len": 4}
    assert mixed.options_of("mxfp8") == {"enable_2d_quantization": True}
    assert PrecisionConfig(patterns={"down": "delayed"}, options={"margin": 1}).options_of("delayed") == {"margin": 1}


@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_fp8_model_is_near_bf16(recipe: str) -> None:
    tokens = torch.randint(0, 256, (2, 32), generator=torch.Generator().manual_seed(0))
    losses, gradients = [], []
    for precision in (None, PrecisionConfig(recipe=recipe, last_layers_bf16=1)):
        model = build(ModelConfig(preset="tiny_llama", init_std=0.1), precision=precision)
        loss, count = model(tokens, tokens.roll(-1, 1))
        loss.backward()
        losses.append(float(loss.detach() / count))
        gradients.append(model.layers[0].mlp.gate_up.weight.grad.double())
    assert len(model.fp8_states) == 4 and "layers.0.mlp.down" in model.fp8_states
    # E4M3 has 3 mantissa bits: relative error 2^-4 at most, 0.02 on average an operand; a loss of 5.6 moves far less
    assert 0 < abs(losses[0] - losses[1]) < 0.1
    assert 0 < (gradients[0] - gradients[1]).norm() / gradients[0].norm() < 0.25


@pytest.mark.parametrize(
    "values", [{}, {"recipe": "current"}, {"recipe": "delayed", "options": {"reduce_amax": False}}]
)
def test_an_amax_group_without_amaxes_to_join_is_refused(values: dict) -> None:
    with pytest.raises(ConfigError, match="amax_group = 'tp': only delayed scaling .* nearest: 'all'"):
        build_config(PrecisionConfig, values | {"amax_group": "tp"})
    assert PrecisionConfig(recipe="delayed").amax_axes == ("dp", "cp", "tp")
    assert PrecisionConfig(recipe="current", patterns={"qkv": "delayed"}, amax_group="tp").amax_axes == ("tp",)
