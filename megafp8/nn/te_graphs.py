"""The Transformer Engine modules of a model as CUDA graphs: launching kernels costs the CPU nothing any more."""

from __future__ import annotations

import torch

from megafp8.nn.te_maker import Maker


def capture(maker: Maker, hidden_shape: tuple[int, ...]) -> None:
    """Capture forward and backward pass of every linear, LayerNormLinear and LayerNormMLP that `maker` made.

    Comes after parameters and main gradients have their memory. What the backward passes of the capture add to main
    gradients is overwritten, for a step's first gradient finds them zeroed.

    Args:
        hidden_shape: [S/cp or S/(cp tp), B, H] of a micro-batch on this rank.
    """
    length, batch, _ = hidden_shape
    whole = length * (maker.mesh.size("tp") if maker.mesh.sequence_parallel else 1)
    parts = [(part, features, length if shard else whole) for part, features, shard in maker.parts if features]
    for part, _, _ in parts:
        part.prepare()
    samples = tuple(
        (torch.randn(rows, batch, features, dtype=maker.dtype, device="cuda", requires_grad=True),)
        for _, features, rows in parts
    )
    graphed = maker.te.make_graphed_callables(
        tuple(part.inner for part, _, _ in parts),
        samples,
        allow_unused_input=True,
        enabled=tuple(part.quantized for part, _, _ in parts) if maker.recipe is not None else False,
        recipe=maker.library_recipe,
        amax_reduction_group=maker.amax_group,
        cache_quantized_params=maker.options.cache_weights,
    )
    for (part, _, _), callable_ in zip(parts, graphed, strict=True):
        part.graphed = callable_
