"""Hugging Face -> tp, pp ranks -> checkpoint -> Hugging Face, bit for bit: cases that converters have failed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megafp8.convert.hf import hf_groups
from megafp8.convert.source import HuggingFaceFolder, open_source
from megafp8.convert.stream import write_groups
from megafp8.core.jsonio import write_json
from megafp8.models import ModelConfig
from megafp8.models.names import hf_config
from megafp8.train.config import RunConfig
from megafp8.train.initial import begin_from
from megafp8.train.setup import assemble, make_mesh
from megafp8.train.state import save_run
from tests.distributed.ranks import run_ranks
from tests.distributed.small_run import MODEL, Tokens, run_config
from tests.unit.infer.models import masters_of, save_model

# 61 rows: padded on any tp; 4 query heads on 2 kv heads, on tp 4 each kv head lies on two ranks
SIZES = {**MODEL, "num_layers": 2, "vocab_size": 61, "num_attention_heads": 4, "num_kv_heads": 2}
BIASED = SIZES | {"attention_bias": True, "mlp_bias": True}
SLOW = ("llama, one kv head, tied, tp 2", "mistral, tp 2", "mixtral, ep 2")
CASES = {
    "llama with biases, tp 2": (BIASED, {"tp": 2}),
    "llama with biases, tp 4": (BIASED, {"tp": 4}),
    "llama, pp 2": (SIZES, {"pp": 2}),
    "llama, one kv head, tied, tp 2": (SIZES | {"num_kv_heads": 1, "tied_embeddings": True}, {"tp": 2}),
    "qwen2, tp 4": (SIZES | {"family": "qwen2", "tied_embeddings": True}, {"tp": 4}),
    "mistral, tp 2": (SIZES | {"family": "mistral"}, {"tp": 2}),
    "mixtral, ep 2": (SIZES | {"family": "mixtral", "moe": {"num_experts": 4, "top_k": 2}}, {"dp": 2, "ep": 2}),
}


def through(rank: int, world: int, config: RunConfig) -> str:
    """Begin from the folder and save, with no step between; returns the checkpoint."""
    torch.set_num_threads(1)
    mesh = make_mesh(config, world)
    parts = assemble(config, mesh, torch.device("cpu"), Tokens(config, mesh), corpus={"fingerprint": "made"})
    begin_from(parts, HuggingFaceFolder)
    return str(save_run(parts, 0, {}))


def write_folder(source_path: Path | str, folder: Path) -> dict[str, bytes]:
    """The weights in bf16; returns the bytes of every file."""
    folder.mkdir()
    with open_source(source_path) as source:
        write_json(folder / "config.json", hf_config(source.config))
        write_groups(folder, source, hf_groups(source, torch.bfloat16))
    return {path.name: path.read_bytes() for path in folder.iterdir() if not path.name.startswith(".")}


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if n in SLOW else ()) for n in CASES])
def test_every_tensor_comes_back_as_it_was(tmp_path, name):
    """R154, R156, R160: what the ranks share out is neither added up, nor padded, nor in another order."""
    model, parallel = CASES[name]
    config = ModelConfig(**model)
    before = write_folder(save_model(tmp_path / "made", config, tensors=masters_of(config)), tmp_path / "before")
    sections: dict[str, Any] = {"model": model, "precision": {"dtype": "fp32"}}
    start = {"load_from": str(tmp_path / "before"), "change_model": False}
    run = run_config(run={"dir": str(tmp_path / "run")}, parallel=parallel, checkpoint=start, **sections)
    world = 1
    for axis in ("dp", "tp", "pp"):
        world *= parallel.get(axis, 1)
    saved = run_ranks(through, world, run)[0]
    after = write_folder(saved, tmp_path / "after")
    assert after.keys() == before.keys() and {n for n in after if after[n] != before[n]} == set()
