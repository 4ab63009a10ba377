"""Transformer Engine's own Python over two real ranks: tensor and sequence parallel, experts apart, against our layers.

As test_te_runs; codes are gathered and amaxes joined by Transformer Engine's calls, over gloo.
"""

from __future__ import annotations

import warnings
from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from megafp8.core.config import build as make
from megafp8.fp8.linear import update_states
from megafp8.models.builder import build
from megafp8.models.config import ModelConfig
from megafp8.models.families import preset
from megafp8.nn.precision import PrecisionConfig
from megafp8.nn.te_config import TEConfig
from megafp8.parallel.buckets import GradBuckets
from megafp8.parallel.mesh import build_mesh
from megafp8.parallel.mesh_config import ParallelConfig
from megafp8.train.step import train_step
from tests.contract import te_kernels
from tests.contract.te_stub import missing, transformer_engine
from tests.distributed.ranks import run_ranks
from tests.distributed.small_run import make_parts, run_config

ROUNDED = 2.0**-9  # as in test_te_runs


def two_steps(rank: int, world: int, name: str, sizes: dict[str, Any], engine: bool) -> tuple[list[float], Any, Any]:
    """Losses, main gradients of the second step, and state, of our layers or of Transformer Engine's."""
    with ExitStack() as stack:
        if engine:
            warnings.simplefilter("ignore")  # it wants an environment variable of NVIDIA's driver
            stack.enter_context(transformer_engine())
            stack.enter_context(mock.patch("megafp8.nn.te.gpu_problem", lambda device: None))
            stack.enter_context(mock.patch.object(te_kernels, "rounds_first", True))
        return _two_steps(world, name, sizes, "te" if engine else "emulated")


def _two_steps(world: int, name: str, sizes: dict[str, Any], backend: Any) -> tuple[list[float], Any, Any]:
    config = replace(make(ModelConfig, preset(name)), num_layers=2, ffn_hidden_size=192)
    moe = config.moe
    if moe.num_experts:  # halves are multiples of 16
        moe = replace(moe, ffn_hidden_size=64, shared_ffn_hidden_size=64 * moe.num_shared_experts)
    config = replace(config, num_kv_heads=sizes.pop("kv_heads", config.num_kv_heads), moe=moe)
    mesh = build_mesh(ParallelConfig(**sizes), world, kv_heads=config.num_kv_heads)
    precision = PrecisionConfig(
        recipe="delayed", backend=backend, emulation="exact", warmup_steps=0, te=TEConfig(layernorm_mlp=False)
    )
    model = build(config, mesh=mesh, precision=precision)
    if backend == "te":
        for layer in model.layers:
            layer.attention.core.inner = None
    buckets, losses = GradBuckets(list(model.named_parameters()), mesh), []
    for seed in (1, 2):
        generator = torch.Generator().manual_seed(seed + 10 * mesh.coord("dp"))
        tokens = torch.randint(0, config.vocab_size, (2, 33), generator=generator)
        buckets.zero_(1)
        loss, _ = model(tokens[:, :-1], tokens[:, 1:].contiguous())  # type: ignore[misc]
        losses.append(float(loss.detach()))
        loss.backward()
        update_states(model.fp8_states.values(), mesh.group_of(("dp", "cp", "tp")))
        buckets.finish()
        for state in model.fp8_states.values():
            state.drop_weight_cache()
    grads = {n: p.main_grad.clone() for n, p in model.named_parameters()}  # type: ignore[attr-defined]
    tensors = {f"{n}.{k}": t.clone() for n, s in model.fp8_states.items() for k, t in s.tensors().items()}
    return losses, grads, tensors


def trained(rank: int, world: int, parallel: dict[str, Any], backend: str) -> list[tuple[float, float]]:
    """Loss and gradient norm of three whole training steps of four micro-batches."""
    with ExitStack() as stack:
        if backend == "te":
            warnings.simplefilter("ignore")
            stack.enter_context(transformer_engine())
            stack.enter_context(mock.patch("megafp8.nn.te.gpu_problem", lambda device: None))
            stack.enter_context(mock.patch.object(te_kernels, "rounds_first", True))
        precision = {"dtype": "bf16", "recipe": "delayed", "backend": backend, "emulation": "exact", "warmup_steps": 0}
        precision["te"] = {"layernorm_mlp": False}
        model = {"tied_embeddings": True, "init_std": 0.1}
        config = run_config(precision=precision, parallel=parallel, model=model, train={"compile": "off"})
        parts = make_parts(config, world)
        if backend == "te":
            for stage in parts.stages:
                for layer in stage.layers:
                    layer.attention.core.inner = None
        results = [train_step(parts, step, 1e-3) for step in (1, 2, 3)]
        return [(result.loss, result.grad_norm) for result in results]


def close(own: list[tuple[float, float]], theirs: list[tuple[float, float]]) -> None:
    """As far as noise of E4M3, 2**-4, over the many terms of a loss or a norm goes.

    Gradients differ by codes that one bf16 ulp flips (test_te_runs), and in a pipeline scales of forward tensors follow
    a forward pass at once, where ours wait for the backward pass.
    """
    for (loss, norm), (found, found_norm) in zip(own, theirs, strict=True):
        assert abs(loss - found) <= 2.0**-8 * loss and abs(norm - found_norm) <= 2.0**-4 * norm


@pytest.mark.slow
def test_pipelines_train_as_ours_and_split_backward_as_whole() -> None:
    if reason := missing():
        pytest.skip(reason)
    plain, split = {"pp": 2}, {"pp": 2, "schedule": "zb_h1"}
    own, theirs, apart = (
        run_ranks(trained, 2, parallel, backend, timeout=200)[0]
        for parallel, backend in ((plain, "emulated"), (plain, "te"), (split, "te"))
    )
    assert theirs == apart
    close(own, theirs)


@pytest.mark.slow
def test_replicas_that_gather_their_weights_train_as_ours() -> None:
    if reason := missing():
        pytest.skip(reason)
    parallel = {"dp": 2, "dp_shard": "optimizer"}
    own, theirs = (run_ranks(trained, 2, parallel, backend, timeout=200) for backend in ("emulated", "te"))
    assert theirs[0] == theirs[1]
    assert own[0][0][0] == theirs[0][0][0]  # the first loss, before any gradient
    close(own[0], theirs[0])


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("tiny_llama", {"tp": 2, "sequence_parallel": True}),
        pytest.param("tiny_llama", {"tp": 2, "sequence_parallel": False, "kv_heads": 1}, marks=pytest.mark.slow),
        ("tiny_mixtral", {"dp": 2, "ep": 2}),
        pytest.param("tiny_deepseek", {"tp": 2, "sequence_parallel": True}, marks=pytest.mark.slow),
        pytest.param("tiny_gpt", {"tp": 2, "sequence_parallel": True}, marks=pytest.mark.slow),
    ],
    ids=["tp with sequence parallel", "tp with one kv head", "experts", "latent attention", "biases"],
)
def test_ranks_compute_as_ours(name: str, sizes: dict[str, Any]) -> None:
    if reason := missing():
        pytest.skip(reason)
    own, theirs = (run_ranks(two_steps, 2, name, sizes, engine, timeout=200) for engine in (False, True))
    for (losses, grads, state), (found, found_grads, found_state) in zip(own, theirs, strict=True):
        assert losses == found
        for key in (n for n in grads if n.startswith("layers.1.mlp") or n == "output.weight"):
            assert (grads[key] - found_grads[key]).norm() <= ROUNDED * grads[key].norm(), key
        assert list(state) == list(found_state)
        for key, tensor in state.items():
            if "grad_output" not in key:
                assert torch.equal(tensor, found_state[key]), key
