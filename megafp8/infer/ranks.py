"""The processes that judge a model together: torchrun's or srun's, all of them along tp."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from megafp8.checkpoint import find
from megafp8.infer.weights import model_config
from megafp8.parallel.launch import init_distributed
from megafp8.parallel.mesh import Mesh, build_mesh
from megafp8.parallel.mesh_config import ParallelConfig


def device_here() -> str:
    """Where to compute: the GPU of this process if it has one."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def inference_mesh(path: Path | str, env: Mapping[str, str]) -> Mesh:
    """Join the processes that `env` tells of; each holds a tp-th of the matrices of the checkpoint `path`.

    Raises:
        ConfigError: as `init_distributed`.
        CheckpointError: no checkpoint there.
    """
    info = init_distributed(device_here(), env)
    if info.world == 1:
        return Mesh.single()
    config = model_config(find(path))
    parallel = ParallelConfig(tp=info.world, dp=1, sequence_parallel=False)
    return build_mesh(parallel, info.world, kv_heads=config.num_kv_heads, tied_embeddings=config.tied_embeddings)
