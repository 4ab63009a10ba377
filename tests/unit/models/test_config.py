"""Presets against published sizes, what a section leaves out, and what is refused."""

from __future__ import annotations

import subprocess
import sys

import pytest

from megafp8.core.config import build as build_config
from megafp8.core.config import dump_toml, load_toml
from megafp8.core.errors import ConfigError
from megafp8.models import ModelConfig, build, check_model, preset, preset_names
from megafp8.models.cost import checkpoint_bytes, flops_per_token, num_parameters
from megafp8.models.names import hf_config
from megafp8.nn.precision import PrecisionConfig

# model cards and papers; fp8_1b5 is ours: 24 layers of 50,335,744, a tied embedding of 262,144,000, a norm of 2,048
PUBLISHED = {
    "gpt2": 124_439_808, "gpt2_medium": 354_823_168, "gpt2_large": 774_030_080, "gpt2_xl": 1_557_611_200,
    "llama2_7b": 6_738_415_616, "llama3_8b": 8_030_261_248, "llama3_70b": 70_553_706_496,
    "llama3_405b": 405_853_388_800, "qwen3_0_6b": 596_049_920, "qwen3_1_7b": 1_720_574_976,
    "qwen3_4b": 4_022_468_096, "qwen3_8b": 8_190_735_360, "qwen3_14b": 14_768_307_200, "qwen3_32b": 32_762_123_264,
    "fp8_1b5": 1_470_203_904, "bench": 31_990_272,
}  # fmt: skip


def test_parameter_counts() -> None:
    assert {name: num_parameters(ModelConfig(preset=name)) for name in PUBLISHED} == PUBLISHED


@pytest.mark.parametrize("name", preset_names())
def test_count_is_that_of_the_built_model(name: str) -> None:
    model = build(ModelConfig(preset=name), device="meta")
    assert sum(p.numel() for p in model.parameters()) == num_parameters(model.config)


@pytest.mark.parametrize("name", ["llama3_405b", "tiny_qwen3", "gpt2"])
def test_config_comes_back_from_toml(name: str, tmp_path: pytest.TempPathFactory) -> None:
    config = ModelConfig(preset=name, num_layers=3)
    path = tmp_path / "model.toml"
    path.write_text(dump_toml(config))
    assert build_config(ModelConfig, load_toml(path)) == config
    assert config.num_layers == 3 and config.hidden_size == preset(name)["hidden_size"]


@pytest.mark.parametrize("values, message", [
    ({"preset": "lama3_8b"}, "nearest: llama3_8b"),
    ({"preset": "gpt2", "family": "llama"}, "preset gpt2 is not of family llama"),
    ({"num_attention_heads": 8, "num_kv_heads": 3}, "nearest: 2 or 4"),
    ({"hidden_size": 100, "num_attention_heads": 8}, "hidden_size 100 is not divisible by num_attention_heads 8"),
    ({"rope_scaling": {"type": "yarn", "factor": 2.0}}, "needs original_max_length"),
    ({"famly": "gpt"}, "nearest: family"),
    ({"num_layers": 0}, "num_layers"),
])  # fmt: skip
def test_refused(values: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_config(ModelConfig, values)


def test_tensor_parallel_rules_come_all_at_once() -> None:
    config = ModelConfig(
        preset="bench", vocab_size=8190, ffn_hidden_size=1406, num_attention_heads=24, num_kv_heads=3, head_dim=64
    )
    problems = check_model(config, tp=8, sequence_length=510)
    assert [p.split(" ")[0] for p in problems] == [
        "model.ffn_hidden_size", "model.num_kv_heads", "sequence_length",
    ]  # fmt: skip
    assert "nearest: 1400 or 1408, or tp 1 or 2" in problems[0]
    assert "nearest: num_kv_heads 2 or 4, or tp 6 or 12" in problems[1]
    assert check_model(ModelConfig(preset="bench"), tp=4, sequence_length=512) == []


@pytest.mark.parametrize("kv_heads, tp, fits", [(1, 8, True), (2, 8, True), (8, 2, True), (3, 2, False), (3, 4, False)])
def test_kv_heads_are_split_or_shared_evenly(kv_heads: int, tp: int, fits: bool) -> None:
    config = ModelConfig(num_attention_heads=24, num_kv_heads=kv_heads, head_dim=16)
    assert (check_model(config, tp=tp) == []) == fits


def test_fp8_dims_of_shared_kv_heads_are_those_of_a_rank() -> None:
    """4 query heads on 4 ranks with 1 kv head: each rank multiplies 1 + 2 heads of 8, 24 rows: not a multiple of 16."""
    config = ModelConfig(num_attention_heads=4, num_kv_heads=1, head_dim=8)
    (problem,) = check_model(config, tp=4, precision=PrecisionConfig(recipe="delayed", patterns={"out": "none"}))
    assert "attention.qkv: out dim 24 on each of 4 tp ranks" in problem

    assert "max_sequence_length 512" in check_model(ModelConfig(preset="bench"), sequence_length=1024)[0]


def test_flops() -> None:
    """performance.md's bench model: 191.9 MFLOP a token with full attention; Llama-3 8B at 8192."""
    bench = ModelConfig(preset="bench")
    assert flops_per_token(bench, 512, causal=False) == pytest.approx(191.9e6, rel=1e-3)
    # 6 x (matrices with the output layer, without the embedding) + 12 or 6 x 32 layers x 4096 x 8192
    llama = ModelConfig(preset="llama3_8b")
    matrices = num_parameters(llama) - 128256 * 4096 - 65 * 4096
    assert flops_per_token(llama, 8192, causal=False) == 6 * matrices + 12 * 32 * 4096 * 8192
    assert flops_per_token(llama, 8192, causal=True) == 6 * matrices + 6 * 32 * 4096 * 8192


def test_a_checkpoint_holds_masters_and_moments() -> None:
    llama = ModelConfig(preset="llama3_8b")
    assert checkpoint_bytes(llama) == 12 * num_parameters(llama)


def test_what_hugging_face_cannot_express_is_refused() -> None:
    with pytest.raises(ConfigError, match="model.mlp_bias = True cannot be exported"):
        hf_config(ModelConfig(preset="tiny_qwen3", mlp_bias=True))


def test_config_room_needs_no_torch() -> None:
    code = "import sys, megafp8.models, megafp8.models.memory, megafp8.nn.precision; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_vocabulary_needs_no_padding_but_every_rank_needs_a_token():
    assert check_model(ModelConfig(preset="bench", vocab_size=8191), tp=4) == []
    (problem,) = check_model(ModelConfig(preset="tiny_llama", vocab_size=9, num_kv_heads=4), tp=4)
    assert "use at least 16 tokens" in problem
