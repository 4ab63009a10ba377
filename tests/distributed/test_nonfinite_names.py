"""Values that are not finite, planted on one rank: all ranks name the module, the tensor and that rank, alike."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megafp8.parallel.pieces import own_piece
from megafp8.train.nonfinite import Watch
from megafp8.train.setup import Parts
from megafp8.train.state import tensors_of
from megafp8.train.step import gradients, train_step
from tests.distributed.ranks import run_ranks
from tests.distributed.small_run import make_parts, run_config

EXPERTS = {"model": {"moe": {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 16}}}
FP8 = {  # all dims divide by 16 on two ranks
    "precision": {"dtype": "bf16", "recipe": "delayed", "options": {"amax_history_len": 4}},
    "model": {"ffn_hidden_size": 64},
    "train": {"compile": "off"},
}
NAN, INF = float("nan"), float("inf")


def plant(parts: Parts, what: str, name: str, value: float) -> None:
    """Break `name` (a module or a parameter) of this rank, in every step from now on."""
    if what == "weight":
        param = dict(parts.stages[-1].named_parameters())[name]
        with torch.no_grad():
            (param.to_local() if hasattr(param, "to_local") else param).view(-1)[3] = value
    elif what == "output":
        _module(parts, name).register_forward_hook(lambda m, args, output: _spoilt(output, value))
    elif what == "grad_output":

        def hook(module: torch.nn.Module, args: Any, output: torch.Tensor) -> None:
            output.register_hook(lambda gradient: _spoilt(gradient, value))

        _module(parts, name).register_forward_hook(hook)
    elif what == "grad_input":  # of a norm
        norm = _module(parts, name)
        forward = norm.forward
        norm.forward = lambda x, branch: forward(x, _Spoiler.apply(branch, value))  # type: ignore[method-assign]
    elif what == "gradient":
        dict(parts.named_parameters)[name].register_hook(lambda g: _spoilt(g, value))
    elif what == "sum":
        param, finish = dict(parts.named_parameters)[name], parts.buckets.finish

        def finished() -> None:
            finish()
            own_piece(param).grad.view(-1)[-1] = value

        parts.buckets.finish = finished  # type: ignore[method-assign]


class _Spoiler(torch.autograd.Function):
    """Identity, whose backward pass breaks the gradient: as if the module behind it had made it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, value: float) -> torch.Tensor:
        ctx.value = value
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return _spoilt(grads[0], ctx.value), None


def _module(parts: Parts, name: str) -> torch.nn.Module:
    return next(m for stage in parts.stages for n, m in stage.named_modules() if n == name)


def _spoilt(tensor: torch.Tensor, value: float) -> torch.Tensor:
    spoilt = tensor.clone()
    spoilt.view(-1)[5] = value
    return spoilt


D0, D1, QKV = "layers.0.mlp.down", "layers.1.mlp.down", "layers.0.attention.qkv"
FWD, BWD, SUMS = "forward", "backward", "after the backward passes"
Planted = tuple[str, str, float]
Case = tuple[int, Planted, tuple[Any, ...]]
# mesh, other sections; on which rank what is broken and how -> module, tensor, pass, micro-batch, NaN, infinite
GROUPS: dict[str, tuple[dict[str, Any], dict[str, Any], list[Case]]] = {
    "alone": ({}, {}, [(0, ("weight", f"{D1}.weight", NAN), (D1, "weight", FWD, 0, 1, 0))]),
    "fp8": ({}, FP8, [(0, ("output", "layers.1.mlp", INF), ("layers.1.mlp", "output", FWD, 0, 0, 1))]),
    "recompute": ({}, {"train": {"recompute": "full"}}, [(0, ("output", QKV, NAN), (QKV, "output", FWD, 0, 1, 0))]),
    "tp": ({"tp": 2}, {}, [
        (1, ("weight", f"{D1}.weight", INF), (D1, "weight", FWD, 0, 0, 1)),
        (1, ("grad_output", QKV, NAN), (QKV, "grad_output", BWD, 0, 1, 0)),
        # its input is the output of layers.1.mlp.down, handed on by a dropout of 0
        (1, ("grad_input", "final_norm", NAN), ("final_norm", "grad_input", BWD, 0, 1, 0)),
        (1, ("sum", f"{D0}.weight", NAN), (D0, "weight gradient", SUMS, -1, 1, 0)),
    ]),
    "tp fp8": ({"tp": 2}, FP8, [(1, ("output", QKV, NAN), (QKV, "output", FWD, 0, 1, 0))]),
    "dp": ({"dp": 2}, {}, [(1, ("gradient", f"{D0}.weight", INF), (D0, "weight gradient", BWD, 0, 0, 1))]),
    "cp": ({"cp": 2}, {}, [(1, ("grad_output", QKV, INF), (QKV, "grad_output", BWD, 0, 0, 1))]),
    "ep": ({"dp": 2, "ep": 2}, EXPERTS, [
        (1, ("weight", "layers.1.mlp.experts.down", NAN), ("layers.1.mlp.experts", "down", FWD, 0, 1, 0)),
    ]),
    "full": ({"dp": 2, "dp_shard": "full"}, {}, [(1, ("weight", f"{D1}.weight", NAN), (D1, "weight", FWD, 0, 1, 0))]),
    "pp": ({"pp": 2, "schedule": "zb_h1"}, {}, [
        (0, ("output", QKV, INF), (QKV, "output", FWD, 0, 0, 1)),
        (0, ("grad_output", QKV, NAN), (QKV, "grad_output", BWD, 0, 1, 0)),
    ]),
    "pp tp": ({"pp": 2, "tp": 2}, FP8, [(3, ("output", D1, NAN), (D1, "output", FWD, 0, 1, 0))]),
}  # fmt: skip


def config_of(mesh: dict[str, Any], other: dict[str, Any]) -> Any:
    return run_config(parallel=mesh, **other)


def named(rank: int, world: int, mesh: dict[str, Any], other: dict[str, Any], cases: list[Case]) -> list[Any]:
    """What a step in order, and then a broken one, say; the broken one leaves no trace in any state."""
    found = []
    for victim, planted, _ in cases:
        parts = make_parts(config_of(mesh, other), world)
        assert train_step(parts, 1, 1e-3).origin is None
        parts.optimizer.wait()
        if rank == victim:
            plant(parts, *planted)
        before = {key: tensor.clone() for key, tensor in tensors_of(parts)[0].items()}
        result = train_step(parts, 2, 1e-3)
        assert not result.finite and result.origin is not None
        for key, tensor in tensors_of(parts)[0].items():
            assert torch.allclose(tensor, before[key], rtol=0, atol=0, equal_nan=True), key
        found.append(result.origin)
    return found


@pytest.mark.parametrize("group", GROUPS)
def test_names_module_tensor_and_rank(group: str) -> None:
    mesh, other, cases = GROUPS[group]
    world = mesh.get("pp", 1) * mesh.get("dp", 1) * mesh.get("cp", 1) * mesh.get("tp", 1)
    origins = run_ranks(named, world, mesh, other, cases)
    assert all(found == origins[0] for found in origins)
    for one, (victim, _, expected) in zip(origins[0], cases, strict=True):
        found = (one.module, one.tensor, one.when, one.micro_batch, one.num_nan, one.num_inf)
        assert (one.rank, *found) == (victim, *expected), str(one)


def once(rank: int, world: int) -> tuple[bool, bool, bool]:
    """A fault that does not come back: seen, not found again, and the next step is taken."""
    parts = make_parts(config_of({}, FP8), world)
    faults = [NAN]
    _module(parts, QKV).register_forward_hook(lambda m, args, out: _spoilt(out, faults.pop()) if faults else None)
    broken = train_step(parts, 1, 1e-3)
    return broken.finite, broken.origin is None, train_step(parts, 2, 1e-3).finite


def test_a_fault_that_came_and_went_is_not_found() -> None:
    assert run_ranks(once, 1) == [(False, True, True)]


def watched(rank: int, world: int, mesh: dict[str, Any], other: dict[str, Any]) -> tuple[bool, bool]:
    """Whether a step in order shows nothing, and whether being watched leaves its loss as it is, bit for bit."""
    config = config_of(mesh, other)
    plain = gradients(make_parts(config, world), 1).loss
    parts = make_parts(config, world)
    stages = dict(zip(parts.pipeline.stages, parts.stages, strict=True))
    watch = Watch(stages, parts.named_parameters, rank)
    watch.attach()
    loss = gradients(parts, 1, watch=watch).loss
    watch.detach()
    watch.look_at_sums()
    hooks = sum(len(m._forward_hooks) for stage in parts.stages for n, m in stage.named_modules() if n)
    return watch.first is None and hooks == 0, torch.equal(loss, plain)


@pytest.mark.parametrize(
    ("mesh", "other"),
    [({}, EXPERTS), ({"tp": 2}, FP8), ({"pp": 2, "schedule": "zb_v"}, {"model": {"num_layers": 4}})],
    ids=("experts", "fp8", "zb_v"),
)
def test_a_step_in_order_shows_nothing(mesh: dict[str, Any], other: dict[str, Any]) -> None:
    world = mesh.get("pp", 1) * mesh.get("tp", 1)
    assert run_ranks(watched, world, mesh, other) == [(True, True)] * world
