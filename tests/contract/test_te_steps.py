"""What a step asks of nn/te: split backward, recompute, evaluation, checkpoints, caches, layers in bf16, graphs.

On the stub, as test_te_runs; compared with Transformer Engine itself without the thing in question.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from megafp8.checkpoint import load, save
from megafp8.core.layout import Layout
from megafp8.models.builder import build
from megafp8.nn.precision import PrecisionConfig
from megafp8.nn.te_config import TEConfig
from megafp8.parallel.buckets import GradBuckets
from megafp8.parallel.mesh import Mesh
from tests.contract import te_kernels
from tests.contract.te_models import (
    PARTS,
    batch,
    buckets_of,
    engine,
    grads,
    live_state,
    models,
    shape_of,
    state_of,
    step,
)
from tests.contract.te_stub import transformer_engine


@pytest.fixture(scope="module", autouse=True)
def te() -> Iterator[Any]:
    with transformer_engine() as module, mock.patch("megafp8.nn.te.gpu_problem", lambda device: None):
        yield module


def test_split_backward_gives_the_gradients_of_a_whole_one() -> None:
    config = shape_of("tiny_mixtral")
    whole_pass, split_pass = engine(config, "delayed"), engine(config, "delayed", splits_backward=True)
    once, apart = buckets_of(whole_pass), buckets_of(split_pass)
    for seeds, split in (((1, 2, 3), True), ((4, 5), False)):  # a pass that is not split goes past those that wait
        assert step(whole_pass, once, seeds) == step(split_pass, apart, seeds, split=split)
        for (name, a), b in zip(grads(whole_pass).items(), grads(split_pass).values(), strict=True):
            assert torch.equal(a, b), name
    assert state_of(whole_pass).keys() == state_of(split_pass).keys()


def test_recompute_gives_the_bits_of_none() -> None:
    config = shape_of("tiny_llama")
    kept, again = engine(config, "delayed"), engine(config, "delayed", recompute="full")
    plain, recomputed = buckets_of(kept), buckets_of(again)
    for seeds in ((1, 2), (3, 4)):
        assert step(kept, plain, seeds) == step(again, recomputed, seeds)
    for (name, a), b in zip(grads(kept).items(), grads(again).values(), strict=True):
        assert torch.equal(a, b), name
    for (name, a), b in zip(state_of(kept).items(), state_of(again).values(), strict=True):
        assert torch.equal(a, b), name


def test_evaluation_leaves_no_trace() -> None:
    config = shape_of("tiny_llama")
    model, other = (engine(config, "delayed", TEConfig()) for _ in range(2))
    one, two = buckets_of(model), buckets_of(other)
    step(model, one, (1,))
    step(other, two, (1,))
    before = state_of(model)
    with torch.no_grad():
        model(*batch(config, 9))
    for name, tensor in state_of(model).items():
        assert torch.equal(tensor, before[name]), name
    assert step(model, one, (2,)) == step(other, two, (2,))


def test_a_checkpoints_state_goes_on_bit_for_bit(tmp_path: Path) -> None:
    """Through files; also into a model of our own layers: the names and shapes are theirs."""
    config = shape_of("tiny_mixtral")
    trained = engine(config, "delayed")
    buckets = buckets_of(trained)
    step(trained, buckets, (1, 2))
    saved = live_state(trained)
    layouts = {name: Layout(tuple(tensor.shape)) for name, tensor in saved.items()}
    path = save(tmp_path, 1, saved, layouts, Mesh.single(), {"step": 1})
    resumed = engine(config, "delayed")
    own, _ = models("tiny_mixtral", "delayed")
    for model in (resumed, own):
        live = live_state(model)
        assert {name: t.shape for name, t in live.items()} == {name: t.shape for name, t in saved.items()}
        with torch.no_grad():
            load(path, live, layouts, Mesh.single())
        assert all(torch.equal(live[name], saved[name]) for name in saved)
        for state in model.fp8_states.values():
            state.drop_weight_cache()
    assert step(trained, buckets, (3,)) == step(resumed, buckets_of(resumed), (3,))
    for (name, a), b in zip(state_of(trained).items(), state_of(resumed).values(), strict=True):
        assert torch.equal(a, b), name
    for (name, a), b in zip(grads(trained).items(), grads(resumed).values(), strict=True):
        assert torch.equal(a, b), name


def test_a_weight_is_quantized_once_a_step() -> None:
    config = shape_of("tiny_llama")
    model = engine(config, "delayed")
    buckets = buckets_of(model)
    extension = sys.modules["transformer_engine_torch"]
    weights = {p.data_ptr() for p in model.parameters()}
    for _ in range(2):
        with mock.patch.object(extension, "quantize", side_effect=te_kernels.quantize) as cast:
            step(model, buckets, (1, 2, 3))
        casts = [call for call in cast.call_args_list if call.args[0].data_ptr() in weights]
        assert len(casts) == 4 * config.num_layers


def test_layers_in_bf16_stay_out_of_autocast(te: Any) -> None:
    config = shape_of("tiny_llama")
    precision = PrecisionConfig(recipe="delayed", backend="te", te=TEConfig(), first_layers_bf16=1)
    model = build(config, precision=precision)
    for layer in model.layers:
        layer.attention.core.inner = None
    step(model, buckets_of(model), (1, 2))
    quantized = {name: layer.attention.qkv.part.inner.fp8 for name, layer in model.layers.named_children()}
    assert quantized == {"0": False, "1": True}
    assert {name.split(".")[1] for name in model.fp8_states} == {"1"}
    assert all(float(t) != 1 for n, t in state_of(model).items() if n.endswith("scale"))  # and all are updated


def test_quantized_weights_follow_the_parameters(te: Any) -> None:
    """`quantized_model_init`: the modules hold codes, filled from the parameters after each step."""
    config = shape_of("tiny_llama")
    plain, quantized = engine(config, "current"), engine(config, "current", replace(PARTS, quantized_model_init=True))
    pairs = [(model, buckets_of(model)) for model in (plain, quantized)]
    for seed in (1, 2):
        losses = [step(model, buckets, (seed,)) for model, buckets in pairs]
        assert losses[0] == losses[1]
        for (name, a), b in zip(grads(plain).items(), grads(quantized).values(), strict=True):
            assert torch.equal(a, b), name
        for model, _ in pairs:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.5)
    weight = quantized.layers[0].attention.out.part.inner.weight
    assert type(weight).__name__ == "Float8Tensor" and weight.shape == quantized.layers[0].attention.out.weight.shape


def test_graphs_are_captured_for_the_shapes_of_a_micro_batch(te: Any) -> None:
    config = shape_of("tiny_llama")
    model = engine(config, "delayed", replace(PARTS, cuda_graphs=True))
    buckets_of(model)
    captured = mock.create_autospec(te.make_graphed_callables, side_effect=lambda modules, samples, **more: modules)
    with mock.patch.object(te, "make_graphed_callables", captured):
        model.ready(2, 32)
    [call] = captured.call_args_list
    modules, samples = call.args
    assert len(modules) == len(samples) == 4 * config.num_layers
    for module, (sample,) in zip(modules, samples, strict=True):
        assert sample.shape == (32, 2, module.in_features)
        assert module.weight.main_grad.dtype == torch.float32
    assert call.kwargs["enabled"] == (True,) * len(modules) and call.kwargs["recipe"].delayed()
    assert step(model, GradBuckets([], Mesh.single()), (1,))  # and they are called in the modules' place
