"""Models by Transformer Engine on the stub beside our own, and steps with them; used inside `transformer_engine()`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from megafp8.core.config import build as make
from megafp8.fp8.linear import update_states
from megafp8.models.builder import build, build_stages
from megafp8.models.config import ModelConfig
from megafp8.models.decoder import Decoder
from megafp8.models.families import preset
from megafp8.models.stages import whole
from megafp8.nn.deferred import WeightGrads, deferring
from megafp8.nn.precision import PrecisionConfig
from megafp8.nn.te_config import TEConfig
from megafp8.parallel.buckets import GradBuckets
from megafp8.parallel.mesh import Mesh

Tensor = torch.Tensor
PARTS = TEConfig(layernorm_mlp=False)


def shape_of(name: str) -> ModelConfig:
    """Two layers of a preset."""
    return replace(make(ModelConfig, preset(name)), num_layers=2)


def models(name: str, recipe: str, options: TEConfig = PARTS, **more: Any) -> tuple[Decoder, Decoder]:
    """Our layers in exact emulation, and Transformer Engine's with our attention core."""
    config = shape_of(name)
    ours = PrecisionConfig(recipe=recipe, backend="emulated", emulation="exact", warmup_steps=0)
    return build(config, precision=ours, **more), engine(config, recipe, options, **more)


def engine(config: ModelConfig, recipe: str, options: TEConfig = PARTS, **more: Any) -> Decoder:
    precision = PrecisionConfig(recipe=recipe, backend="te", te=options)
    [model] = build_stages(config, [whole(config)], mesh=Mesh.single(), precision=precision, **more)
    for layer in model.layers:
        layer.attention.core.inner = None
    return model


def batch(config: ModelConfig, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, config.vocab_size, (2, 33), generator=generator)
    return tokens[:, :-1], tokens[:, 1:].contiguous()


def step(model: Decoder, buckets: GradBuckets, seeds: tuple[int, ...], *, split: bool = False) -> list[float]:
    """A step of one micro-batch for each seed; losses."""
    buckets.zero_(len(seeds))
    losses, waiting = [], []
    for seed in seeds:
        loss, _ = model(*batch(model.config, seed))  # type: ignore[misc]
        losses.append(float(loss.detach()))
        if split:
            waiting.append(WeightGrads())
            with deferring(waiting[-1]):
                loss.backward()
        else:
            loss.backward()
        update_states(model.fp8_states.values())
    for store in waiting:
        store.run()
    buckets.finish()
    for state in model.fp8_states.values():
        state.drop_weight_cache()
    return losses


def grads(model: Decoder) -> dict[str, Tensor]:
    return {name: p.main_grad.clone() for name, p in model.named_parameters()}  # type: ignore[attr-defined]


def buckets_of(model: Decoder) -> GradBuckets:
    return GradBuckets(list(model.named_parameters()), Mesh.single())


def live_state(model: Decoder) -> dict[str, Tensor]:
    return {f"{n}.{k}": t for n, s in model.fp8_states.items() for k, t in s.tensors().items()}


def state_of(model: Decoder) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in live_state(model).items()}
