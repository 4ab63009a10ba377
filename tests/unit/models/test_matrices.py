"""The maps that one parameter holds, against the separate parameters of Hugging Face's models."""

from __future__ import annotations

import pytest
import torch

from megafp8.models.builder import build
from megafp8.models.config import ModelConfig
from megafp8.models.matrices import row_parts
from megafp8.models.names import to_hf_tensors
from megafp8.optim.matrices import matrices_of

SMALL = {
    "num_layers": 1, "hidden_size": 32, "ffn_hidden_size": 48, "num_attention_heads": 8, "num_kv_heads": 2,
    "vocab_size": 64, "max_sequence_length": 16,
}  # fmt: skip


def numbered(config: ModelConfig) -> dict[str, torch.Tensor]:
    """Every weight, its elements numbered, by our name."""
    model = build(config, dtype=torch.float64, device="meta")
    return {n: torch.arange(p.numel(), dtype=torch.float64).view(p.shape) for n, p in model.named_parameters()}


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_queries_keys_and_values_are_theirs(family: str) -> None:
    config = ModelConfig(family=family, **SMALL)
    ours = numbered(config)
    theirs = to_hf_tensors(config, ours)
    for name in ("layers.0.attention.qkv.weight", "layers.0.mlp.gate_up.weight", "layers.0.attention.out.weight"):
        found = {
            tuple(ours[name][matrix.lead][list(matrix.rows)].flatten().tolist())
            for matrix in matrices_of(name, tuple(ours[name].shape), row_parts(config, name))
        }
        parts = {"qkv": ("q_proj", "k_proj", "v_proj"), "gate_up": ("gate_proj", "up_proj"), "out": ("o_proj",)}
        expected = {
            tuple(tensor.flatten().tolist())
            for key, tensor in theirs.items()
            if key.split(".")[-2] in parts[name.split(".")[-2]]
        }
        assert found == expected, name


def test_latent_attention() -> None:
    mla = {"kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}
    config = ModelConfig(**(SMALL | {"num_kv_heads": 8, "mla": mla}))
    shapes = {name: tuple(values.shape) for name, values in numbered(config).items()}
    name = "layers.0.attention.kv_up.weight"
    keys, values = matrices_of(name, shapes[name], row_parts(config, name))
    assert (keys.shape, values.shape) == ((64, 16), (48, 16))
    assert list(keys.rows[:9]) == [*range(8), 14] and list(values.rows[:7]) == [*range(8, 14), 22]
    name = "layers.0.attention.kv_down.weight"
    assert [m.shape for m in matrices_of(name, shapes[name], row_parts(config, name))] == [(16, 32), (4, 32)]
