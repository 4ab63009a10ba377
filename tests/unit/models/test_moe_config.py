"""The experts' section: what it fills in, which layers it means, and what is refused with which way out."""

from __future__ import annotations

import pytest

from megafp8.core.config import build as build_config
from megafp8.core.config import dump_toml, load_toml
from megafp8.core.errors import ConfigError
from megafp8.models import ModelConfig, check_model
from megafp8.models.config import expert_shapes, gemm_shapes


def config(**moe: object) -> ModelConfig:
    return build_config(ModelConfig, {"num_layers": 4, "moe": {"num_experts": 8, **moe}})


def test_widths_are_filled_in_and_come_back_from_toml(tmp_path: object) -> None:
    made = config(num_shared_experts=2, ffn_hidden_size=96)
    assert (made.moe.ffn_hidden_size, made.moe.shared_ffn_hidden_size) == (96, 192)
    assert config().moe.ffn_hidden_size == made.ffn_hidden_size
    path = tmp_path / "m.toml"  # type: ignore[operator]
    path.write_text(dump_toml(made))
    assert build_config(ModelConfig, load_toml(path)) == made


def test_dense_layers_keep_their_mlp() -> None:
    made = config(first_dense_layers=1, layer_interval=2, num_shared_experts=1)
    assert [made.moe.is_moe_layer(i) for i in range(4)] == [False, False, True, False]
    names = set(gemm_shapes(made))
    assert {"layers.0.mlp.gate_up", "layers.2.mlp.shared.down", "layers.3.mlp.down"} <= names
    assert "layers.2.mlp.gate_up" not in names and next(iter(expert_shapes(made))) == "layers.2.mlp.experts.gate_up"


@pytest.mark.parametrize("values, message", [
    ({"top_k": 9}, "top_k 9 is above num_experts 8; nearest: 8"),
    ({"num_groups": 3}, "num_experts 8 is not divisible by num_groups 3; nearest: 2 or 4"),
    ({"num_groups": 2, "top_k_groups": 3}, "top_k_groups 3 is above num_groups 2; nearest: 2"),
    ({"num_groups": 4, "top_k": 3}, "nearest: top_k 2, or top_k_groups 2"),
    ({"aux_loss": "sequence"}, "a loss needs a coefficient"),
    ({"aux_loss_coeff": 0.1}, "none needs 0"),
    ({"shared_ffn_hidden_size": 64}, "nearest: num_shared_experts 1"),
    ({"capacity_factor": -1.0}, "capacity_factor"),
    ({"num_experts": 0, "top_k": 3}, "top_k without num_experts"),
    ({"scor": "softmax"}, "nearest: score"),
])  # fmt: skip
def test_refused(values: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config(**values)


def test_two_broken_choices_are_said_together() -> None:
    with pytest.raises(ConfigError, match="top_k 9 .*also: num_experts 8 is not divisible"):
        config(top_k=9, num_groups=5)


def test_mesh_rules_come_all_at_once() -> None:
    made = config(ffn_hidden_size=100, num_shared_experts=1, shared_ffn_hidden_size=54)
    problems = check_model(made, tp=4, ep=3, etp=8, sequence_length=510)
    text = "\n".join(problems)
    for part in (
        "parallel.ep = 3: does not divide model.moe.num_experts 8; nearest: 2 or 4",
        "parallel.etp = 8: does not divide model.moe.ffn_hidden_size 100; nearest: 5 or 10",
        "parallel.tp = 4: does not divide model.moe.shared_ffn_hidden_size 54; nearest: 2 or 3",
        "sequence_length 510 is not divisible by parallel.tp 4, as experts need; nearest: 508 or 512",
    ):
        assert part in text
    assert check_model(ModelConfig(), ep=2) == [
        "parallel.ep = 2: the model has no experts (model.moe.num_experts = 0); nearest: 1"
    ]
    assert "experts are gated" in check_model(ModelConfig(family="gpt", moe={"num_experts": 4}))[0]  # type: ignore[arg-type]
    assert "leave none of 4 layers" in check_model(config(first_dense_layers=4))[0]
