"""Transformer Engine's own Python, with nn/te around it, computes what our layers compute.

On the stub of te_stub, with te_kernels in place of what is compiled: casts, caches, amax updates, main gradients,
delayed weight gradients and checkpoints are Transformer Engine's and nn/te's, the arithmetic beneath is torch's. So
this says that data goes where it belongs; what a GPU's kernels compute is for tests/gpu.
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
from megafp8.core.config import build as make
from megafp8.core.layout import Layout
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
from tests.contract import te_kernels
from tests.contract.te_stub import transformer_engine

Tensor = torch.Tensor
PARTS = TEConfig(layernorm_mlp=False)
# a bf16 weight gradient is rounded once where ours is kept in bf16 before it is added; Transformer Engine's GEMM adds
# fp32 to fp32: at most half a bf16 ulp of each element, 2**-9
ROUNDED = 2.0**-9


@pytest.fixture(scope="module", autouse=True)
def te() -> Iterator[Any]:
    with transformer_engine() as module, mock.patch("megafp8.nn.te.gpu_problem", lambda device: None):
        yield module


def models(name: str, recipe: str, options: TEConfig = PARTS, **more: Any) -> tuple[Decoder, Decoder]:
    """Our layers in exact emulation, and Transformer Engine's with our attention core."""
    config = replace(make(ModelConfig, preset(name)), num_layers=2)
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


@pytest.mark.parametrize("normed", [False, True], ids=["Linear", "LayerNormLinear"])
def test_reference_quantizers_give_the_bits_of_our_exact_backend(normed: bool, te: Any) -> None:
    from transformer_engine.common.recipe import CustomRecipe
    from transformer_engine.pytorch.custom_recipes.reference_current_scaling import current_scaling_ref_factory

    recipe = CustomRecipe(qfactory=current_scaling_ref_factory)
    # the reference's gemm leaves `out` alone, so nothing is fused
    with mock.patch("megafp8.nn.te.library_recipe", lambda ours: recipe):
        own, theirs = models("tiny_llama", "current", replace(PARTS, fuse_wgrad_accumulation=False))
    config, generator = own.config, torch.Generator().manual_seed(1)
    x = torch.randn(128, 4, config.hidden_size, generator=generator).bfloat16()
    found = []
    for model in (own, theirs):
        layer, leaf = model.layers[0], x.clone().requires_grad_()
        with model._surround():
            if normed:
                y = layer.attention.qkv(layer.attention_norm(leaf, None)[1])
                weight = layer.attention.qkv.weight
            else:
                y, weight = layer.attention.out(leaf), layer.attention.out.weight
        y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).bfloat16())
        found.append([y, leaf.grad, weight.grad])
    for name, ours, other in zip(("y", "dx", "dw"), *found, strict=True):
        same = (ours == other).float().mean()
        # bf16 bits of one sign are ordered as their values; a difference of 1 is one ulp
        bits = [t.detach().view(torch.int16).to(torch.int32) for t in (ours, other)]
        assert same >= 0.999, f"{name}: {same:.4%} identical"
        assert ((bits[0] - bits[1]).abs() <= 1).all(), name


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("tiny_llama", PARTS),
        ("tiny_llama", TEConfig()),
        ("tiny_gpt", TEConfig()),
        ("tiny_mixtral", TEConfig()),
        ("tiny_llama", replace(PARTS, fuse_wgrad_accumulation=False)),
    ],
    ids=["parts", "LayerNormMLP", "gpt", "experts", "not fused"],
)
def test_delayed_scaling_runs_as_ours(name: str, options: TEConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps of two micro-batches: losses, forward scales and histories are those of our layers, bit for bit."""
    monkeypatch.setattr(te_kernels, "rounds_first", True)
    own, theirs = models(name, "delayed", options)
    mine, other = buckets_of(own), buckets_of(theirs)
    for seeds in ((1, 2), (3, 4)):
        assert step(own, mine, seeds) == step(theirs, other, seeds)
        ours, found = grads(own), grads(theirs)
        last = [n for n in ours if n.startswith(("layers.1.mlp", "final_norm", "output"))]
        assert len(last) >= 4
        for key in ours:  # before the last MLP the residual gradient is added after rounding, where we add before
            bound = ROUNDED if key in last else 0.1
            error = (ours[key] - found[key]).norm() / ours[key].norm()
            assert error <= bound, f"{key}: {error:.5f}"
    ours, found = state_of(own), state_of(theirs)
    assert list(ours) == list(found)
    for key, tensor in ours.items():
        assert tensor.shape == found[key].shape, key
        if "grad_output" not in key or ".1.mlp" in key:
            assert torch.equal(tensor, found[key]), key
        else:  # one bf16 ulp of an amax, after the flips of single codes that such an ulp brings about
            assert torch.allclose(tensor, found[key], rtol=0.1), key


def test_unrounded_values_are_quantized_as_on_a_gpu() -> None:
    """Without `rounds_first` codes differ from ours: the comparison above can fail."""
    own, theirs = models("tiny_llama", "delayed")
    assert step(own, buckets_of(own), (1,)) != step(theirs, buckets_of(theirs), (1,))


def test_split_backward_gives_the_gradients_of_a_whole_one() -> None:
    config = replace(make(ModelConfig, preset("tiny_mixtral")), num_layers=2)
    whole_pass, split_pass = engine(config, "delayed"), engine(config, "delayed", splits_backward=True)
    once, apart = buckets_of(whole_pass), buckets_of(split_pass)
    for seeds, split in (((1, 2, 3), True), ((4, 5), False)):  # a pass that is not split goes past those that wait
        assert step(whole_pass, once, seeds) == step(split_pass, apart, seeds, split=split)
        for (name, a), b in zip(grads(whole_pass).items(), grads(split_pass).values(), strict=True):
            assert torch.equal(a, b), name
    assert state_of(whole_pass).keys() == state_of(split_pass).keys()


def test_recompute_gives_the_bits_of_none() -> None:
    config = replace(make(ModelConfig, preset("tiny_llama")), num_layers=2)
    kept, again = engine(config, "delayed"), engine(config, "delayed", recompute="full")
    plain, recomputed = buckets_of(kept), buckets_of(again)
    for seeds in ((1, 2), (3, 4)):
        assert step(kept, plain, seeds) == step(again, recomputed, seeds)
    for (name, a), b in zip(grads(kept).items(), grads(again).values(), strict=True):
        assert torch.equal(a, b), name
    for (name, a), b in zip(state_of(kept).items(), state_of(again).values(), strict=True):
        assert torch.equal(a, b), name


def test_evaluation_leaves_no_trace() -> None:
    config = replace(make(ModelConfig, preset("tiny_llama")), num_layers=2)
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
    config = replace(make(ModelConfig, preset("tiny_mixtral")), num_layers=2)
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
    config = replace(make(ModelConfig, preset("tiny_llama")), num_layers=2)
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
    config = replace(make(ModelConfig, preset("tiny_llama")), num_layers=2)
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
    config = replace(make(ModelConfig, preset("tiny_llama")), num_layers=2)
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
    config = replace(make(ModelConfig, preset("tiny_llama")), num_layers=2)
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
