"""A run that begins from a Hugging Face folder or another run's checkpoint, on other meshes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from megafp8.checkpoint import load_tensors
from megafp8.convert.source import HuggingFaceFolder
from megafp8.core.jsonio import write_json
from megafp8.infer.weights import MASTER, model_config, weights
from megafp8.models.names import hf_config, to_hf_tensors
from megafp8.parallel.mesh import Mesh
from megafp8.train.config import RunConfig
from megafp8.train.initial import begin_from
from megafp8.train.setup import assemble, make_mesh
from megafp8.train.state import save_run, tensors_of
from megafp8.train.step import train_step
from tests.distributed.ranks import run_ranks
from tests.distributed.small_run import MODEL, Tokens, run_config, whole

SIZES = {**MODEL, "num_layers": 4, "vocab_size": 61}  # nothing divides the vocabulary


def config_of(folder: Path | str, source: Path, parallel: dict[str, Any], **sections: Any) -> RunConfig:
    start = {"load_from": str(source), "change_model": False}
    sections = {"precision": {"dtype": "fp32"}, "model": SIZES, **sections}
    return run_config(run={"dir": str(folder), "seed": 3}, parallel=parallel, checkpoint=start, **sections)


def begun(rank: int, world: int, config: RunConfig) -> tuple[dict[str, np.ndarray], float]:
    """All state after `begin_from`, and the loss of a step."""
    torch.set_num_threads(1)
    mesh = make_mesh(config, world)
    parts = assemble(config, mesh, torch.device("cpu"), Tokens(config, mesh), corpus={"fingerprint": "made"})
    assert begin_from(parts, HuggingFaceFolder) is None
    state = whole(*tensors_of(parts), mesh)
    return state, train_step(parts, 1, 1e-2).loss


MESHES = [(1, {}), (2, {"tp": 2, "sequence_parallel": True}), (2, {"pp": 2, "virtual_stages": 2}),
          (2, {"dp": 2, "dp_shard": "full"})]  # fmt: skip


def write_folder(checkpoint: Path, folder: Path) -> None:
    """The checkpoint's weights in bf16 as Hugging Face has them, without a tokenizer."""
    config = model_config(checkpoint)
    folder.mkdir()
    write_json(folder / "config.json", hf_config(config))
    save_file(to_hf_tensors(config, weights(checkpoint, torch.bfloat16)), folder / "model.safetensors")


def test_a_foreign_folder_on_any_mesh(tmp_path):
    source = run_config(run={"dir": str(tmp_path / "a")}, model=SIZES, precision={"dtype": "fp32"})
    parts = assemble(source, Mesh.single(), torch.device("cpu"), Tokens(source, Mesh.single()))
    parts.corpus = {"fingerprint": "made"}
    train_step(parts, 1, 1e-2)
    saved = save_run(parts, 1, {})
    wanted = {name: tensor.bfloat16().float() for name, tensor in load_tensors(saved, MASTER).items()}
    folder = tmp_path / "hf"
    write_folder(saved, folder)
    losses = []
    for world, parallel in MESHES:
        state, loss = run_ranks(begun, world, config_of(tmp_path / "b", folder, parallel))[0]
        losses.append(loss)
        for name, tensor in state.items():
            if name.startswith(MASTER):
                assert np.array_equal(tensor, wanted[name].numpy()), f"{parallel}: {name}"
            else:
                assert not tensor.any(), f"{parallel}: {name} is not new"
    assert np.allclose(losses, losses[0], rtol=1e-6)  # fp32 sums in another order
