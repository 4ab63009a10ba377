"""Build a decoder: checked, declared on meta, then given memory and values that depend on global names only."""

from __future__ import annotations

from typing import cast

import torch

from megafp8.core.errors import ConfigError
from megafp8.models.config import ModelConfig, check_model, gemm_shapes
from megafp8.models.decoder import Decoder
from megafp8.nn.layers import ModelShape, OwnLayers
from megafp8.nn.parameter import materialize
from megafp8.nn.precision import PrecisionConfig
from megafp8.nn.recompute import Recompute
from megafp8.nn.states import linear_states
from megafp8.parallel.mesh import Mesh


def build(
    config: ModelConfig,
    *,
    mesh: Mesh | None = None,
    precision: PrecisionConfig | None = None,
    seed: int = 1234,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    recompute: Recompute = "none",
    compile_layers: bool = False,
) -> Decoder:
    """Build this rank's part of a decoder.

    Args:
        mesh: None is the mesh of one process.
        precision: which linears are quantized, and how; None: none of them. Its dtype is `dtype`'s source in a run.
        seed: of the run; initial values are the same on any mesh.
        device: "meta" leaves the parameters without memory.
        compile_layers: fuse the layers' elementwise work by torch.compile; falls back with one logged event.

    Raises:
        ConfigError: the model cannot be split or quantized so; all problems, a line each.
    """
    mesh = mesh or Mesh.single()
    tp = mesh.size("tp")
    problems = check_model(
        config,
        tp=tp,
        ep=mesh.size("ep"),
        etp=mesh.size("etp"),
        sequence_parallel=mesh.sequence_parallel,
        precision=precision,
    )
    if problems:
        raise ConfigError("\n".join(problems))
    states = linear_states(
        precision or PrecisionConfig(),
        gemm_shapes(config),
        num_layers=config.num_layers,
        tp=tp,
        device=device,
        compiled=compile_layers,
    )
    layers = OwnLayers(cast(ModelShape, config), mesh=mesh, dtype=dtype, states=states, compiled=compile_layers)
    model = Decoder(config, layers, recompute=recompute)
    if str(device) != "meta":
        materialize(model, mesh=mesh, seed=seed, device=device)
    return model
