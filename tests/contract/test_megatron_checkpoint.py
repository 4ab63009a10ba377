"""Checkpoints that megatron-core itself trained and saved are read with its logits, and it loads what we write."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megafp8.cli.main import main
from megafp8.convert.megatron_in import MegatronFolder
from megafp8.infer.weights import build_model, model_config, weights

ROOT = Path(__file__).resolve().parents[2]
LLAMA: dict[str, Any] = {
    "num_layers": 3, "hidden_size": 32, "ffn_hidden_size": 48, "num_attention_heads": 4, "num_query_groups": 2,
    "kv_channels": 8, "normalization": "RMSNorm", "add_bias_linear": False, "add_qkv_bias": False,
    "qk_layernorm": False, "swiglu": True, "position_embedding_type": "rope", "rotary_base": 20000,
    "untie_embeddings_and_output_weights": True,
}  # fmt: skip
GPT = LLAMA | {
    "num_query_groups": 4, "normalization": "LayerNorm", "add_bias_linear": True, "swiglu": False, "openai_gelu": True,
    "position_embedding_type": "learned_absolute", "untie_embeddings_and_output_weights": False,
}  # fmt: skip
SHAPES = {
    "llama": LLAMA,
    "gpt": GPT,
    "qwen2": LLAMA | {"add_qkv_bias": True, "num_query_groups": 1, "untie_embeddings_and_output_weights": False},
    "qwen3": LLAMA | {"qk_layernorm": True, "kv_channels": 16},
    "mixtral": LLAMA | {"num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 40},
}
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("gpt", "qwen2", "qwen3", "mixtral")]


def megatron(
    what: str,
    folder: Path,
    shape: dict[str, Any],
    out: Path,
    *,
    tp: int = 1,
    pp: int = 1,
    dp: int = 1,
    trainer: str = "",
) -> dict[str, torch.Tensor]:
    """Run the program on tp x pp x dp ranks; `trainer`: how the distributed optimizer lays out what it saves."""
    ranks = tp * pp * dp
    environment = {"TP": str(tp), "PP": str(pp), "WORLD_SIZE": str(ranks)} | ({"TRAINER": trainer} if trainer else {})
    (out.parent / "shape.json").write_text(json.dumps(shape))
    words = [what, str(folder), str(out.parent / "shape.json"), str(out)]
    (out.parent / "shape.json.store").unlink(missing_ok=True)
    command = [sys.executable, "-m", "tests.contract.megatron_gpt", *words]
    runs = [
        subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
            env=os.environ | environment | {"RANK": str(rank)},
        )
        for rank in range(ranks)
    ]  # fmt: skip
    for run in runs:
        _, said = run.communicate(timeout=120)
        assert run.returncode == 0, said[-3000:]
    return load_file(out)


def largest_difference(checkpoint: Path, theirs: dict[str, torch.Tensor]) -> float:
    """Between our logits and theirs, in units of the largest."""
    model = build_model(model_config(checkpoint), weights(checkpoint, torch.float32))
    with torch.no_grad():
        ours = model(theirs["tokens"])
    wanted = theirs["logits"][..., :200]
    assert ours.shape == wanted.shape
    return float((ours - wanted).abs().max() / wanted.abs().max())


@pytest.mark.parametrize("name", ["llama", *SLOW])
def test_in_and_out_again(tmp_path: Path, name: str) -> None:
    shape = SHAPES[name]
    theirs = megatron("save", tmp_path / "run/iter_0000007", shape, tmp_path / "saved.safetensors")
    assert main(["convert", "--from", "megatron", str(tmp_path / "run"), str(tmp_path / "ours")]) == 0
    checkpoint = tmp_path / "ours/step_00000000"
    assert model_config(checkpoint).vocab_size == 200
    assert model_config(checkpoint).family == name
    # two programs sum in another order: some hundred fp32 roundings of sums of 32 to 48 terms
    assert largest_difference(checkpoint, theirs) < 1e-5

    assert main(["convert", "--to", "megatron", str(checkpoint), str(tmp_path / "back"), "--dtype", "fp32"]) == 0
    again = megatron("load", tmp_path / "back/release", shape, tmp_path / "loaded.safetensors")
    assert torch.equal(again["logits"][..., :200], theirs["logits"][..., :200])  # the same weights in the same program
    with MegatronFolder(tmp_path / "run") as first, MegatronFolder(tmp_path / "back") as second:
        assert all(torch.equal(first.read(tensor), second.read(tensor)) for tensor in first.shapes)


@pytest.mark.slow
def test_two_ranks_of_tensor_parallelism(tmp_path: Path) -> None:
    """Theirs saved at tp 2 comes in; ours is loaded at tp 2: each rank has its heads, its gate and its up."""
    theirs = megatron("save", tmp_path / "run/iter_0000007", LLAMA, tmp_path / "saved.safetensors", tp=2)
    assert main(["convert", "--from", "megatron", str(tmp_path / "run"), str(tmp_path / "ours")]) == 0
    checkpoint = tmp_path / "ours/step_00000000"
    assert largest_difference(checkpoint, theirs) < 1e-5
    assert main(["convert", "--to", "megatron", str(checkpoint), str(tmp_path / "back"), "--dtype", "fp32"]) == 0
    again = megatron("load", tmp_path / "back/release", LLAMA, tmp_path / "loaded.safetensors", tp=2)
    assert torch.equal(again["logits"][..., :200], theirs["logits"][..., :200])


DEEP = {name: shape | {"num_layers": 4} for name, shape in SHAPES.items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "split", "trainer"),
    [
        ("llama", {"pp": 2}, ""),
        ("llama", {"tp": 2}, "dp_reshardable"),
        ("llama", {"pp": 2}, "dp_reshardable"),
        ("llama", {"pp": 2, "dp": 2}, "fully_reshardable"),
        ("qwen2", {"pp": 2}, "dp_reshardable"),  # tied: the last stage has a copy of the embedding
        ("gpt", {"tp": 2, "pp": 2}, "dp_reshardable"),
        ("mixtral", {"pp": 2}, "dp_reshardable"),
    ],
)
def test_split_as_the_training_script_saves(tmp_path: Path, name: str, split: dict[str, int], trainer: str) -> None:
    """Layers have their number in the whole model, whichever stage saved them; what is not the model's is left out."""
    shape = DEEP[name]
    saved = tmp_path / "saved.safetensors"
    theirs = megatron("save", tmp_path / "run/iter_0000007", shape, saved, **split, trainer=trainer)
    assert main(["convert", "--from", "megatron", str(tmp_path / "run"), str(tmp_path / "ours")]) == 0
    checkpoint = tmp_path / "ours/step_00000000"
    assert model_config(checkpoint).family == name and model_config(checkpoint).num_layers == 4
    assert largest_difference(checkpoint, theirs) < 1e-5
