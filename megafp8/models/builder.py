"""Build a decoder: checked, declared on meta, then given memory and values that depend on global names only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import cast

import torch
from torch import nn

from megafp8.core.errors import ConfigError
from megafp8.models.config import ModelConfig, check_model, quantizable_shapes
from megafp8.models.decoder import Decoder
from megafp8.models.stages import Span, whole
from megafp8.nn.layer_sets import layer_sets
from megafp8.nn.layers import ModelShape
from megafp8.nn.parameter import materialize, materialize_sharded
from megafp8.nn.precision import PrecisionConfig
from megafp8.nn.recompute import Recompute, plan_of
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
    empty: bool = False,
) -> Decoder:
    """Build this rank's part of a decoder that is not cut into pipeline stages.

    Args:
        mesh: None is the mesh of one process.
        precision: which linears are quantized, and how; None: none of them. Its dtype is `dtype`'s source in a run.
        seed: of the run; initial values are the same on any mesh.
        device: "meta" leaves the parameters without memory.
        compile_layers: fuse the layers' elementwise work by torch.compile; falls back with one logged event.
        empty: parameters stay on meta, for who has their values already; FP8 state is on `device`.

    Raises:
        ConfigError: the model cannot be split or quantized so; all problems, a line each.
    """
    mesh = mesh or Mesh.single()
    assert mesh.size("pp") == 1, "build_stages makes the stages of a pipeline"
    return build_stages(
        config,
        [whole(config)],
        mesh=mesh,
        precision=precision,
        seed=seed,
        dtype=dtype,
        device=device,
        recompute=recompute,
        compile_layers=compile_layers,
        empty=empty,
    )[0]


def build_stages(
    config: ModelConfig,
    spans: Sequence[Span],
    *,
    mesh: Mesh,
    precision: PrecisionConfig | None = None,
    seed: int = 1234,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    recompute: Recompute = "none",
    compile_layers: bool = False,
    full_shard: bool = False,
    splits_backward: bool = False,
    tokens: int = 0,
    empty: bool = False,
) -> list[Decoder]:
    """Build the pipeline stages that this rank holds.

    Args:
        spans: those of this rank, in model order. Where it holds the first and the last one, tied weights are one
            parameter, which gets two gradients a micro-batch (its attribute `grad_uses`).
        full_shard: cut the parameters over their replicas (parallel/fully_shard), a layer being a unit.
        splits_backward: the pipeline's schedule computes weight gradients apart.
        tokens: of a micro-batch, for layers that make buffers in advance.
        others: as of `build`.

    Raises:
        ConfigError: as `build`.
    """
    tp = mesh.size("tp")
    _refuse(config, mesh, precision)
    layers_of = layer_sets(
        cast(ModelShape, config),
        quantizable_shapes(config, tp=tp, etp=mesh.size("etp")),
        precision or PrecisionConfig(),
        mesh=mesh,
        dtype=dtype,
        device=device,
        compiled=compile_layers,
        recompute=plan_of(recompute),
        full_shard=full_shard,
        splits_backward=splits_backward,
        tokens=tokens,
    )
    stages: list[Decoder] = []
    for span in spans:
        embedding: nn.Module | None = stages[0].embedding if stages and stages[0].span.first else None
        layers = layers_of(span.start, span.stop)
        stages.append(Decoder(config, layers, recompute=recompute, span=span, embedding=embedding))
    if full_shard:
        for stage in stages:
            materialize_sharded(stage, stage.layers, mesh=mesh, seed=seed, device=device)
    elif str(device) != "meta" and not empty:
        for stage in stages:
            materialize(stage, mesh=mesh, seed=seed, device=device)
    if config.tied_embeddings and len(stages) > 1 and stages[0].span.first and stages[-1].span.last:
        stages[0].embedding.weight.grad_uses = 2
    return stages


def _refuse(config: ModelConfig, mesh: Mesh, precision: PrecisionConfig | None) -> None:
    problems = check_model(
        config,
        tp=mesh.size("tp"),
        ep=mesh.size("ep"),
        etp=mesh.size("etp"),
        cp=mesh.size("cp"),
        cp_exchange=mesh.cp_exchange,
        sequence_parallel=mesh.sequence_parallel,
        precision=precision,
    )
    if problems:
        raise ConfigError("\n".join(problems))


def named_parameters(stages: Iterable[Decoder]) -> list[tuple[str, nn.Parameter]]:
    """Global names and parameters of all stages of a rank, in model order; a shared one once."""
    return [named for stage in stages for named in stage.named_parameters()]
