"""FLOPs: the formula against torch's own counter, and parameters and FLOPs against published figures."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megafp8.models import ModelConfig, build
from megafp8.models.cost import active_parameters, flops_per_token, hardware_flops_per_token, num_parameters
from megafp8.nn.recompute import RecomputePlan

S = 128  # one block of the blocked attention kernel: all of S x S is computed
SIZE: dict[str, Any] = {
    "num_layers": 3, "hidden_size": 64, "ffn_hidden_size": 160, "num_attention_heads": 8, "vocab_size": 96,
    "max_sequence_length": S,
}  # fmt: skip
MLA = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
MOE = {"num_experts": 8, "top_k": 2, "ffn_hidden_size": 48}
MODELS: dict[str, dict[str, Any]] = {
    **{
        f"{kind}_{activation}_{'tied' if tied else 'untied'}": SIZE
        | {"num_kv_heads": kv, "activation": activation, "tied_embeddings": tied}
        for kind, kv in (("mha", 8), ("gqa", 2), ("mqa", 1))
        for activation in ("gelu", "swiglu")
        for tied in (True, False)
    },
    "gpt": SIZE | {"family": "gpt", "hidden_dropout": 0.0, "attention_dropout": 0.0},
    "mixtral": SIZE | {"family": "mixtral", "num_kv_heads": 2, "moe": {"num_experts": 4, "top_k": 2}},
    "qwen3_moe": SIZE | {"family": "qwen3_moe", "num_kv_heads": 2, "head_dim": 16, "moe": MOE},
    "latent": SIZE | {"mla": MLA},
    "deepseek": SIZE
    | {
        "family": "deepseek", "mla": MLA,
        "moe": MOE | {"num_groups": 4, "num_shared_experts": 2, "first_dense_layers": 1},
    },
}  # fmt: skip


def counted(values: dict[str, Any], recompute: Any = "none") -> float:
    """What a forward and backward pass multiplies, for one token.

    The kernel makes the attention weights again in backward: 7 products of S x S for the 6 of the convention; nobody
    counts the seventh.
    """
    config = ModelConfig(**values)
    model = build(config, recompute=recompute)
    tokens = torch.randint(0, 96, (2, S), generator=torch.Generator().manual_seed(0))
    with FlopCounterMode(display=False) as counter:
        loss, _ = model(tokens, tokens)
        loss.backward()
    core = flops_per_token(config, S, causal=False) - flops_per_token(config, 0, causal=False)
    keys = config.q_size
    weights = config.num_layers * 2 * S * keys  # the product that is repeated: q k^T
    assert weights < core
    return counter.get_total_flops() / tokens.numel() - weights


@pytest.mark.parametrize("name", MODELS)
def test_the_formula_counts_what_torch_counts(name: str) -> None:
    config = ModelConfig(**MODELS[name])
    assert counted(MODELS[name]) == pytest.approx(flops_per_token(config, S, causal=False), rel=0.01)


@pytest.mark.parametrize("layers", [0, 1])
def test_recompute_costs_hardware_flops_and_no_model_flops(layers: int) -> None:
    values = MODELS["gqa_swiglu_untied"]
    config = ModelConfig(**values)
    expected = hardware_flops_per_token(config, S, causal=False, recompute="full", recomputed_layers=layers)
    assert counted(values, RecomputePlan("full", layers)) == pytest.approx(expected, rel=0.01)
    for recompute in ("none", "selective"):
        same = hardware_flops_per_token(config, S, causal=False, recompute=recompute)
        assert same == flops_per_token(config, S, causal=False)
    assert counted(values, "selective") == pytest.approx(counted(values), rel=1e-6)


# preset, parameters and those a token passes, in billions as published (Mixtral paper; DeepSeek-V3 report: "671B total,
# 37B activated"; Qwen3 report), and GFLOP a token of 4096 without and with causal halving (performance.md's table)
PUBLISHED = [
    ("mixtral_8x7b", 46.7, 12.9, None),
    ("mixtral_8x22b", 141, 39, None),
    ("deepseek_v3", 671, 37, (281.152, 250.45)),
    ("qwen3_30b_a3b", 30.5, 3.3, (27.914, 23.082)),
    ("qwen3_235b_a22b", 235, 22, (167.255, 148.331)),
    ("llama3_405b", 405, 405, None),
]


@pytest.mark.parametrize("preset, total, active, gflop", PUBLISHED)
def test_published_sizes(preset: str, total: float, active: float, gflop: Any) -> None:
    config = ModelConfig(preset=preset)
    # as precise as they are printed; DeepSeek's 37B does not count the embedding (0.93B)
    assert num_parameters(config) / 1e9 == pytest.approx(total, rel=0.005)
    embedding = config.vocab_size * config.hidden_size if preset == "deepseek_v3" else 0
    assert (active_parameters(config) - embedding) / 1e9 == pytest.approx(active, rel=0.02)
    if gflop:
        full, causal = (flops_per_token(config, 4096, causal=c) / 1e9 for c in (False, True))
        assert (full, causal) == (pytest.approx(gflop[0], abs=6e-4), pytest.approx(gflop[1], abs=6e-4))
