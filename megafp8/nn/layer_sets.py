"""Which LayerSet a precision section asks for: our own layers with their FP8 states, or Transformer Engine's."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

import torch

from megafp8.core.errors import ConfigError
from megafp8.core.log import event, get_logger
from megafp8.fp8.recipe import recipe as fp8_recipe
from megafp8.nn.layers import LayerSet, ModelShape, OwnLayers
from megafp8.nn.precision import PrecisionConfig, dim_problems, plan_gemms, reduces_amax
from megafp8.nn.recompute import RecomputePlan
from megafp8.nn.states import linear_states
from megafp8.nn.te import TELayers, maker_for
from megafp8.nn.te_config import te_problems
from megafp8.parallel.mesh import Mesh

_logger = get_logger(__name__)
Layers = Callable[[int, int], LayerSet]


def layer_sets(
    shape: ModelShape,
    linears: Mapping[str, tuple[int, int, str]],
    precision: PrecisionConfig,
    *,
    mesh: Mesh,
    dtype: torch.dtype,
    device: torch.device | str,
    compiled: bool,
    recompute: RecomputePlan,
    full_shard: bool,
    splits_backward: bool,
    tokens: int,
) -> Layers:
    """A maker of LayerSets: (first layer, one behind the last) -> the set for a stage with these layers.

    Args:
        linears: `{linear: (in_features, out_features, which of them tp splits, if any)}`, whole dims.
        splits_backward: the pipeline's schedule computes weight gradients apart.
        tokens: of a micro-batch; 0: unknown, which only user buffers mind.

    Raises:
        ConfigError: linears that cannot be quantized so, or what the layers cannot do; all problems, a line each.
    """
    if precision.backend == "te":
        return _by_engine(
            shape, linears, precision, mesh, dtype, device, compiled, recompute, full_shard, splits_backward, tokens
        )
    states = linear_states(
        precision, linears, num_layers=shape.num_layers, tp=mesh.size("tp"), device=device, compiled=compiled
    )
    if full_shard:
        for state in states.values():
            state.keeps_weight = False

    def own(start: int, stop: int) -> LayerSet:
        here = {name: state for name, state in states.items() if start <= int(name.split(".")[1]) < stop}
        return OwnLayers(shape, mesh=mesh, dtype=dtype, states=here, compiled=compiled, smooth=precision.smooth_swiglu)

    return own


def _by_engine(
    shape: ModelShape,
    linears: Mapping[str, tuple[int, int, str]],
    precision: PrecisionConfig,
    mesh: Mesh,
    dtype: torch.dtype,
    device: torch.device | str,
    compiled: bool,
    recompute: RecomputePlan,
    full_shard: bool,
    splits_backward: bool,
    tokens: int,
) -> Layers:
    """`layer_sets` by Transformer Engine."""
    tp = mesh.size("tp")
    plan, problems = plan_gemms(precision, list(linears), shape.num_layers)
    problems += dim_problems(plan, linears, tp)
    problems += te_problems(
        precision.te,
        recompute=recompute.mode,
        recompute_modules=recompute.modules,
        full_shard=full_shard,
        pipeline=mesh.size("pp") > 1,
        experts=shape.moe.num_experts > 0,
        sequence_parallel=mesh.sequence_parallel,
        reduces_amax=reduces_amax(precision),
        even_vocabulary=shape.vocab_size % tp == 0,
        tp_first=mesh.order.startswith("tp"),
    )
    if problems:
        raise ConfigError("\n".join(problems))
    if precision.warmup_steps and "delayed" in precision.recipes:
        event(
            _logger,
            "no warm-up: Transformer Engine's delayed scaling begins at scale 1",
            level=logging.WARNING,
            warmup_steps=precision.warmup_steps,
        )
    maker = maker_for(
        shape,
        options=precision.te,
        mesh=mesh,
        dtype=dtype,
        plan=plan,
        recipes={name: fp8_recipe(name, **precision.options_of(name)) for name in precision.recipes},
        amax_axes=precision.amax_axes,
        delays=splits_backward,
        tokens=tokens,
        device=device,
    )
    return lambda start, stop: TELayers(shape, maker=maker.empty(), mesh=mesh, dtype=dtype, compiled=compiled)
