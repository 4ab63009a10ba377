"""AdamW against torch.optim.AdamW, its masters, its decay groups and its state."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from megafp8.core.layout import Layout, stamp
from megafp8.data.batch_size import BatchSize
from megafp8.optim.adamw import AdamW, decays
from megafp8.optim.clip import clip_scale, grad_norm
from megafp8.optim.config import OptimizerConfig
from megafp8.optim.lr import Schedule
from megafp8.parallel.mesh import Mesh

SHAPES = {
    "embedding.weight": (40, 24),
    "layers.0.attention_norm.weight": (24,),
    "layers.0.mlp.gate_up.weight": (2, 50, 24),
    "layers.0.attention.qkv.bias": (37,),
    "output.weight": (40, 24),
}
MESH = Mesh.single()


def make(dtype: torch.dtype) -> list[tuple[str, nn.Parameter]]:
    generator = torch.Generator().manual_seed(1)
    named = []
    for name, shape in SHAPES.items():
        param = nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype))
        stamp(param, Layout(shape))
        param.main_grad = torch.zeros(shape, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
        named.append((name, param))
    return named


def set_grads(named: list[tuple[str, nn.Parameter]], step: int) -> None:
    generator = torch.Generator().manual_seed(1000 + step)
    for _, param in named:
        param.main_grad.copy_(torch.randn(param.shape, generator=generator))


def theirs(named: list[tuple[str, nn.Parameter]], config: OptimizerConfig, **how) -> torch.optim.AdamW:
    groups = [
        {"params": [p for n, p in named if decays(n, p_layout(p), config) is flag], "weight_decay": decay}
        for flag, decay in ((True, config.weight_decay), (False, 0.0))
    ]
    return torch.optim.AdamW(groups, lr=0.0, betas=(config.beta1, config.beta2), eps=config.eps, **how)


def p_layout(param: nn.Parameter) -> Layout:
    return Layout(tuple(param.shape))


def train(config: OptimizerConfig, dtype: torch.dtype, **how) -> tuple[list, list]:
    """20 steps of ours and of torch's on the same gradients and rates; both lists of parameters."""
    ours, other = make(dtype), make(dtype)
    optimizer, reference = AdamW(ours, config, MESH), theirs(other, config, **how)
    schedule = Schedule(config, BatchSize(8), sequence_length=16, total_steps=20)
    for step in range(1, 21):
        rate = schedule(step=step, consumed_samples=8 * step)
        set_grads(ours, step)
        for (_, mine), (_, param) in zip(ours, other, strict=True):
            param.grad = mine.main_grad.clone()
        for group in reference.param_groups:
            group["lr"] = rate
        optimizer.step(rate)
        reference.step()
    return ours, other


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant", "inverse_sqrt"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_bit_for_bit_torchs_fused_adamw(schedule, dtype):
    config = OptimizerConfig(kernel="torch", lr=1e-2, min_lr=0.0, schedule=schedule, warmup_steps=4)
    for (name, mine), (_, param) in zip(*train(config, dtype, fused=True), strict=True):
        assert torch.equal(mine, param), name


def test_torchs_plain_adamw_within_rounding():
    config = OptimizerConfig(kernel="torch", lr=1e-2, warmup_steps=4)
    for (name, mine), (_, param) in zip(*train(config, torch.float64, foreach=False), strict=True):
        # 20 steps of about 10 fp64 roundings each, on values below 8
        assert (mine - param).abs().max() < 20 * 10 * 2**-53 * 8, name


def test_bf16_parameters_are_rounded_masters():
    config = OptimizerConfig(kernel="torch", lr=1e-4, min_lr=1e-4, schedule="constant")
    named, exact = make(torch.bfloat16), make(torch.bfloat16)
    optimizer = AdamW(named, config, MESH)
    wide = [(n, nn.Parameter(p.detach().float())) for n, p in exact]
    reference = theirs(wide, config, fused=True)
    for group in reference.param_groups:
        group["lr"] = 1e-4
    for step in range(20):
        set_grads(named, step)
        for (_, mine), (_, param) in zip(named, wide, strict=True):
            param.grad = mine.main_grad.clone()
        optimizer.step(1e-4)
        reference.step()
    for (name, mine), (_, param) in zip(named, wide, strict=True):
        master = optimizer.tensors()[f"optimizer.master.{name}"]
        assert master.dtype == torch.float32 and torch.equal(master, param)
        assert mine.dtype == torch.bfloat16 and torch.equal(mine, param.to(torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_grad_scale_multiplies_gradients(dtype):
    config = OptimizerConfig(kernel="torch", eps=1e-3)
    scaled, plain = make(dtype), make(dtype)
    for named, factor in ((scaled, 1.0), (plain, 0.3)):
        optimizer = AdamW(named, config, MESH)
        set_grads(named, 1)
        for _, param in named:
            param.main_grad.mul_(factor)
        optimizer.step(1e-2, 1.0 if named is plain else 0.3)
    unit = torch.finfo(dtype).eps
    for (name, a), (_, b) in zip(scaled, plain, strict=True):
        # dividing by 1/0.3 for multiplying by 0.3: two more roundings of the gradient; the step of size
        # lr moves by as many, and the sum with a weight below 8 rounds once more.
        assert (a - b).abs().max() <= 4 * unit * 1e-2 + 4 * unit, name


@pytest.mark.parametrize(
    ("name", "shape", "norms", "embeddings", "expected"),
    [
        ("layers.3.attention.qkv.weight", (6, 4), False, False, True),
        ("output.weight", (6, 4), False, False, True),
        ("embedding.weight", (6, 4), False, True, True),
        ("embedding.weight", (6, 4), False, False, False),
        ("position_embedding.weight", (6, 4), False, False, False),
        ("layers.3.attention_norm.weight", (6,), False, True, False),
        ("layers.3.attention.q_norm.weight", (6,), False, True, False),
        ("final_norm.weight", (6,), True, True, True),
        ("layers.3.mlp.gate_up.bias", (2, 6), False, True, False),
        ("layers.3.mlp.gate_up.bias", (2, 6), True, True, True),
    ],
)
def test_who_decays(name, shape, norms, embeddings, expected):
    config = OptimizerConfig(decay_norms_biases=norms, decay_embeddings=embeddings)
    assert decays(name, Layout(shape), config) is expected


def test_without_gradient_only_decaying_weights_shrink():
    config = OptimizerConfig(kernel="torch", weight_decay=0.5)
    named = make(torch.float64)
    before = {n: p.detach().clone() for n, p in named}
    AdamW(named, config, MESH).step(0.1)
    for name, param in named:
        factor = 1 - 0.1 * 0.5 if decays(name, p_layout(param), config) else 1.0
        # one product: two roundings
        assert torch.allclose(param, before[name] * factor, rtol=2 * 2**-53, atol=0), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_moves_to_another_optimizer(dtype):
    config = OptimizerConfig(kernel="torch", lr=1e-2)
    first, second = make(dtype), make(dtype)
    a = AdamW(first, config, MESH)
    for step in range(3):
        set_grads(first, step)
        a.step(1e-2)
    with torch.no_grad():
        for _, param in second:
            param.zero_()
    b = AdamW(second, config, MESH)
    assert a.tensors().keys() == b.tensors().keys() == a.layouts().keys()
    assert set(a.layouts()) == {
        f"optimizer.{k}.{n}" for k in ("master", "exp_avg", "exp_avg_sq") for n in SHAPES
    }
    for key, tensor in b.tensors().items():
        tensor.copy_(a.tensors()[key])
        assert a.layouts()[key].shape == tuple(tensor.shape)
    b.step_count = a.step_count
    b.load_done()
    for optimizer, named in ((a, first), (b, second)):
        set_grads(named, 9)
        optimizer.step(1e-2)
    assert a.step_count == b.step_count == 4
    for (name, x), (_, y) in zip(first, second, strict=True):
        assert torch.equal(x, y), name


def test_a_tied_or_frozen_parameter():
    named = make(torch.float32)
    named[-1] = ("output.weight", named[0][1])
    named[1][1].requires_grad_(False)
    keys = AdamW(named, OptimizerConfig(kernel="torch"), MESH).tensors()
    assert "optimizer.master.embedding.weight" in keys and "optimizer.master.output.weight" not in keys
    assert "optimizer.master.layers.0.attention_norm.weight" not in keys


def test_norm_and_clip_alone():
    named = make(torch.float32)
    set_grads(named, 1)
    flat = torch.cat([p.main_grad.flatten() for _, p in named]).double()
    norm = grad_norm(named, MESH)
    # each square and the sum in fp64, about 5,000 terms: 5,000 roundings at most
    assert norm.finite and norm.value == pytest.approx(flat.norm().item(), rel=5000 * 2**-53)
    assert clip_scale(norm.value, 1.0) * norm.value == pytest.approx(1.0, rel=2**-51)
    assert clip_scale(0.5, 1.0) == clip_scale(1.0, 1.0) == clip_scale(7.0, 0.0) == clip_scale(0.0, 1.0) == 1.0


def test_norm_beyond_what_fp32_squares_hold():
    named = make(torch.float32)
    for _, param in named:
        param.main_grad.fill_(1e30)
    norm = grad_norm(named, MESH)
    count = sum(p.numel() for _, p in named)
    assert norm.finite and norm.value == pytest.approx(1e30 * count**0.5, rel=1e-6)  # 1e30 as fp32


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_broken_gradient_is_seen(bad):
    named = make(torch.float32)
    named[1][1].main_grad[3] = bad
    norm = grad_norm(named, MESH)
    assert not norm.finite and not norm.value < float("inf")
