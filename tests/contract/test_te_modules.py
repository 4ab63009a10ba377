"""Every module that nn/te can ask Transformer Engine for is built by its own Python, for every preset of every family.

Against the stub of te_stub: which arguments exist, what modules hold and which parameters they get is checked; nothing
here ran on a GPU.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from megafp8.core.config import build as make
from megafp8.core.layout import layout_of
from megafp8.models.builder import build
from megafp8.models.config import ModelConfig
from megafp8.models.decoder import Decoder
from megafp8.models.families import preset, preset_names
from megafp8.nn.precision import PrecisionConfig
from megafp8.nn.te_config import TEConfig
from megafp8.parallel.mesh import Mesh, build_mesh
from megafp8.parallel.mesh_config import ParallelConfig
from tests.contract.te_stub import transformer_engine

# one of each kind of layer is enough: dense ones, and the first of experts where there are any
SMALL = ["tiny_deepseek", "tiny_gpt", "tiny_llama", "tiny_mixtral", "tiny_qwen3", "tiny_qwen3_moe"]


@pytest.fixture(scope="module", autouse=True)
def te() -> Iterator[ModuleType]:
    # the stub's GPU has its tensors on the CPU
    with transformer_engine() as module, mock.patch("megafp8.nn.te.gpu_problem", lambda device: None):
        yield module


def shape_of(name: str) -> ModelConfig:
    config = make(ModelConfig, preset(name))
    layers = config.moe.first_dense_layers + 1 if config.moe.num_experts else 2
    return replace(config, num_layers=min(layers, config.num_layers))


def same_parameters(own: Decoder, other: Decoder) -> None:
    seen = [[(n, tuple(p.shape), p.dtype, layout_of(p)) for n, p in model.named_parameters()] for model in (own, other)]
    assert seen[0] == seen[1]
    assert list(own.state_dict()) == list(other.state_dict())  # above all: no _extra_state


@pytest.mark.parametrize("name", preset_names())
@pytest.mark.parametrize("recipe", ["none", "delayed"])
def test_parameters_are_our_own_layers(name: str, recipe: str) -> None:
    config = shape_of(name)
    precision = PrecisionConfig(recipe=recipe, backend="te", first_layers_bf16=1 if recipe != "none" else 0)
    same_parameters(build(config, device="meta"), build(config, device="meta", precision=precision))


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize(
    "options",
    [
        TEConfig(layernorm_mlp=False, cross_entropy=True),
        TEConfig(fuse_wgrad_accumulation=False, cache_weights=False),
        TEConfig(quantized_model_init=True),
    ],
    ids=["parts", "plain", "quantized weights"],
)
def test_options_leave_the_parameters_alone(name: str, options: TEConfig) -> None:
    config, precision = shape_of(name), PrecisionConfig(recipe="current", backend="te", te=options)
    same_parameters(build(config, device="meta"), build(config, device="meta", precision=precision))


@pytest.fixture
def mesh_of() -> Iterator[Any]:
    """Meshes of several ranks in one process: groups that talk to nobody."""

    def made(world: int, kv_heads: int, **sizes: Any) -> Mesh:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
        return build_mesh(ParallelConfig(**sizes), world, kv_heads=kv_heads)

    yield made
    dist.destroy_process_group()


@pytest.fixture
def buffers(te: Any) -> Iterator[mock.MagicMock]:
    """User buffers that were made; making them talks to the GPUs."""
    base = sys.modules["transformer_engine.pytorch.module.base"]
    made = mock.create_autospec(te.initialize_ub)
    with (
        mock.patch.object(te, "initialize_ub", made),
        mock.patch.object(te, "destroy_ub"),
        mock.patch.object(base, "_ub_initialized", True),
        mock.patch.object(base, "_ub_communicators", {}),
    ):
        yield made


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.filterwarnings("ignore:To guarantee overlapping")  # it wants an environment variable of NVIDIA's driver
def test_parameters_over_tp(name: str, overlap: bool, mesh_of: Any, buffers: mock.MagicMock) -> None:
    config = shape_of(name)
    moe = config.moe
    if moe.num_experts:
        moe = replace(moe, ffn_hidden_size=64, shared_ffn_hidden_size=64 * moe.num_shared_experts)
    config = replace(config, ffn_hidden_size=192, moe=moe)  # halves are multiples of 16
    mesh = mesh_of(2, config.num_kv_heads, tp=2, sequence_parallel=True)
    precision = PrecisionConfig(recipe="delayed", backend="te", te=TEConfig(ub_overlap=overlap))
    own = build(config, device="meta", mesh=mesh)
    same_parameters(own, build(config, device="meta", mesh=mesh, precision=precision))
    assert buffers.called == overlap


@pytest.mark.parametrize("exchange", ["ring", "all_gather", "all_to_all"])
def test_attention_over_cp_gets_the_group_and_the_exchange(exchange: str, mesh_of: Any) -> None:
    config = shape_of("tiny_llama")
    mesh = mesh_of(2, config.num_kv_heads, cp=2, cp_exchange=exchange)
    model = build(config, device="meta", mesh=mesh, precision=PrecisionConfig(backend="te"))
    core = model.layers[0].attention.core.inner
    assert core.cp_group is mesh.group("cp") and core.cp_global_ranks == [0, 1]
    assert core.cp_comm_type == {"ring": "p2p", "all_gather": "all_gather", "all_to_all": "a2a"}[exchange]


def test_functions_have_the_arguments_that_we_pass(te: Any) -> None:
    for function, names in {
        te.autocast: ("enabled", "recipe", "amax_reduction_group"),
        te.quantized_model_init: ("enabled", "recipe"),
        te.checkpoint: ("function",),
        te.parallel_cross_entropy: ("inp", "target", "dist_process_group", "ignore_idx", "overwrite_input"),
        te.initialize_ub: ("shape", "tp_size", "quantization_modes", "dtype", "bootstrap_backend"),
        te.make_graphed_callables: (
            "modules", "sample_args", "allow_unused_input", "enabled", "recipe", "amax_reduction_group",
            "cache_quantized_params",
        ),
        te.Linear.forward: ("inp", "is_first_microbatch"),
        te.LayerNormLinear.forward: ("inp", "is_first_microbatch"),
        te.LayerNormMLP.forward: ("inp", "is_first_microbatch"),
        te.GroupedLinear.forward: ("inp", "m_splits", "is_first_microbatch"),
        te.Fp8Padding.forward: ("inp", "m_splits"),
        te.DotProductAttention.forward: (
            "query_layer", "key_layer", "value_layer", "qkv_format", "attn_mask_type", "cu_seqlens_q", "cu_seqlens_kv",
            "max_seqlen_q", "max_seqlen_kv",
        ),
    }.items():  # fmt: skip
        known = inspect.signature(function).parameters
        assert not [name for name in names if name not in known], function
    assert callable(te.Linear.backward_dw) and callable(te.GroupedLinear.backward_dw)


def test_loads_in_float_shapes_of_a_preset(te: Any) -> None:
    model = build(shape_of("tiny_llama"), precision=PrecisionConfig(backend="te"))
    part = model.layers[0].attention.qkv.part
    part.prepare()
    weight = model.layers[0].attention.qkv.weight
    assert isinstance(part.inner, te.LayerNormLinear) and part.inner.weight.data_ptr() == weight.data_ptr()
    up = model.layers[0].mlp.gate_up.weight
    model.layers[0].mlp.part.prepare()
    inner = model.layers[0].mlp.part.inner
    assert inner.fc1_weight.data_ptr() == up.data_ptr() and tuple(inner.fc1_weight.shape) == (
        up.shape[0] * up.shape[1], up.shape[2],
    )  # fmt: skip
    assert torch.equal(inner.fc1_weight, up.flatten(0, 1))
