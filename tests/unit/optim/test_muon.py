"""Muon against torch.optim.Muon, which matrices it takes, and how the work is shared out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from megafp8.core.layout import Layout, stamp
from megafp8.optim.adamw import AdamW
from megafp8.optim.config import OptimizerConfig
from megafp8.optim.matrices import in_waves, is_hidden_matrix, matrices_of, share_out
from megafp8.optim.muon import Muon, orthogonalized
from megafp8.parallel.mesh import Mesh

MESH = Mesh.single()
CONFIG = OptimizerConfig(name="muon", kernel="torch", weight_decay=0.1)


def make(shapes: dict[str, tuple[int, ...]], dtype: torch.dtype = torch.float32) -> list[tuple[str, nn.Parameter]]:
    generator, named = torch.Generator().manual_seed(1), []
    for name, shape in shapes.items():
        param = nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
        stamp(param, Layout(shape))
        param.main_grad = torch.zeros(shape, dtype=torch.promote_types(dtype, torch.float32))
        named.append((name, param))
    return named


def steps(named: list[tuple[str, nn.Parameter]], optimizer: Any, count: int = 5, parts: Any = None) -> None:
    for step in range(1, count + 1):
        generator = torch.Generator().manual_seed(step)
        for _, param in named:
            param.main_grad.copy_(torch.randn(param.shape, generator=generator, dtype=torch.float64))
        optimizer.step(1e-2 / step)


@pytest.mark.parametrize("nesterov", [True, False])
def test_equals_torchs_muon(nesterov: bool) -> None:
    """bf16 iterations: an update is right to 2^-8, one bf16 rounding, and there are five steps of rate 1e-2.

    Its elements are at most about 1 before the scale 0.2 sqrt(96) = 2, so the sum of five updates is right to 4e-4,
    and in practice, the GEMMs being the same, far better.
    """
    shapes = {"layers.0.attention.out.weight": (64, 96), "layers.0.mlp.down.weight": (96, 32)}
    named = make(shapes)
    theirs = [nn.Parameter(param.detach().clone()) for _, param in named]
    config = OptimizerConfig(name="muon", kernel="torch", weight_decay=0.1, muon_nesterov=nesterov)
    optimizer = Muon(named, config, MESH, lambda name: ())
    other = torch.optim.Muon(theirs, lr=0.0, weight_decay=0.1, nesterov=nesterov, adjust_lr_fn="match_rms_adamw")
    for step in range(1, 6):
        generator = torch.Generator().manual_seed(step)
        for (_, param), twin in zip(named, theirs, strict=True):
            param.main_grad.copy_(torch.randn(param.shape, generator=generator))
            twin.grad = param.main_grad.clone()
        other.param_groups[0]["lr"] = 1e-2 / step
        optimizer.step(1e-2 / step)
        other.step()
    for (name, param), twin in zip(named, theirs, strict=True):
        assert (param - twin).abs().max() < 4e-4, name
        assert (param - twin).abs().mean() < 1e-5, name


def test_an_update_is_nearly_orthogonal_and_has_adamws_size() -> None:
    x = torch.randn(3, 40, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    made = orthogonalized(x, 5)
    values = torch.linalg.svdvals(made)
    assert values.min() > 0.6 and values.max() < 1.3  # the quintic's band around 1, Jordan et al.
    cosine = (made * x).sum() / (made.norm() * x.norm())
    assert cosine > 0.9  # singular vectors are the gradient's
    # 24 singular values of about 0.88: rms 0.2 sqrt(40) 0.88 sqrt(24 / (40 24))
    assert 0.2 * 40**0.5 * made.square().mean().sqrt() == pytest.approx(0.2, rel=0.2)


def test_who_moves_how() -> None:
    hidden = [
        "layers.0.attention.qkv.weight", "layers.3.mlp.gate_up.weight", "layers.1.mlp.experts.gate_up",
        "layers.1.mlp.shared.down.weight", "layers.0.attention.kv_down.weight",
    ]  # fmt: skip
    others = [
        "embedding.weight", "position_embedding.weight", "output.weight", "layers.1.mlp.router.weight",
        "layers.0.mlp.gate_up.bias",
    ]  # fmt: skip
    assert all(is_hidden_matrix(name, Layout((4, 4))) for name in hidden)
    assert not any(is_hidden_matrix(name, Layout((4, 4))) for name in others)
    assert not is_hidden_matrix("layers.0.mlp_norm.weight", Layout((4,)))
    named = make({hidden[0]: (8, 8), others[0]: (16, 8), "layers.0.mlp_norm.weight": (8,)})
    keys = set(Muon(named, CONFIG, MESH, lambda name: ()).tensors())
    assert {k.split(".", 2)[1] for k in keys if "qkv" in k} == {"master", "momentum"}
    assert {k.split(".", 2)[1] for k in keys if "qkv" not in k} == {"master", "exp_avg", "exp_avg_sq"}


def test_the_rest_moves_as_by_adamw() -> None:
    shapes = {"embedding.weight": (8, 4), "layers.0.mlp_norm.weight": (4,), "layers.0.mlp.router.weight": (4, 8)}
    ours, theirs = make(shapes), make(shapes)
    steps(ours, Muon(ours, CONFIG, MESH, lambda name: ()))
    steps(theirs, AdamW(theirs, CONFIG, MESH))
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(ours, theirs, strict=True))


def test_stacked_maps_move_apart() -> None:
    """Two groups of [2 query heads, key, value] of 3 rows, and experts: each map as if it were a parameter alone."""
    shapes = {"layers.0.attention.qkv.weight": (24, 8), "layers.0.mlp.experts.gate_up": (3, 2, 6, 8)}
    named = make(shapes, torch.float64)
    rows = torch.arange(24).view(2, 4, 3)
    maps = {"q": rows[:, :2].flatten(), "k": rows[:, 2].flatten(), "v": rows[:, 3].flatten()}
    apart = make({f"layers.0.{k}.weight": (len(r), 8) for k, r in maps.items()}, torch.float64)
    apart += make({f"layers.0.e{i}.weight": (6, 8) for i in range(6)}, torch.float64)
    with torch.no_grad():
        for (_, param), taken in zip(apart, maps.values(), strict=False):
            param.copy_(named[0][1][taken])
        for number, (_, param) in enumerate(apart[3:]):
            param.copy_(named[1][1][number // 2, number % 2])
    together = Muon(named, CONFIG, MESH, lambda name: (6, 3, 3) if "qkv" in name else ())
    alone = Muon(apart, CONFIG, MESH, lambda name: ())
    for step in range(3):
        grads = [torch.randn(p.shape, generator=torch.Generator().manual_seed(step), dtype=p.dtype) for _, p in named]
        for (_, param), grad in zip(named, grads, strict=True):
            param.main_grad.copy_(grad)
        for (_, param), taken in zip(apart, maps.values(), strict=False):
            param.main_grad.copy_(grads[0][taken])
        for number, (_, param) in enumerate(apart[3:]):
            param.main_grad.copy_(grads[1][number // 2, number % 2])
        together.step(1e-2, 0.5)
        alone.step(1e-2, 0.5)
    for (name, param), taken in zip(apart, maps.values(), strict=False):
        assert torch.allclose(param, named[0][1][taken], rtol=1e-12, atol=1e-12), name
    for number, (name, param) in enumerate(apart[3:]):
        assert torch.allclose(param, named[1][1][number // 2, number % 2], rtol=1e-12, atol=1e-12), name


@dataclass
class At:
    """A rank of dp 4 x tp 2."""

    dp: int
    tp: int

    def size(self, axis: str) -> int:
        return {"dp": 4, "tp": 2}.get(axis, 1)

    def coord(self, axis: str) -> int:
        return {"dp": self.dp, "tp": self.tp}.get(axis, 0)

    def place(self, axes: tuple[str, ...]) -> tuple[int, int]:
        return self.dp, 4


def test_work_is_balanced_by_cost_and_cut_into_waves() -> None:
    layouts, matrices = {}, []
    for layer in range(8):
        layouts[f"layers.{layer}.mlp.gate_up.weight"] = Layout((2, 64, 32), {1: "tp"})
        layouts[f"layers.{layer}.mlp.down.weight"] = Layout((32, 64), {1: "tp"})
        layouts[f"layers.{layer}.attention.out.weight"] = Layout((32, 32), {1: "tp"}, zero_dim=0)
    for name, layout in layouts.items():
        matrices += matrices_of(name, layout.shape)
    ranks = [At(dp, tp) for dp in range(4) for tp in range(2)]
    shares = share_out(matrices, layouts, ranks)
    load = [sum(s.matrix.cost for s in shares if s.owner == number) for number in range(8)]
    assert max(load) - min(load) <= max(m.cost for m in matrices) and sum(load) == sum(m.cost for m in matrices)
    for share in shares:
        places = [(r.dp, r.tp) for r in ranks]
        covered = [share.windows[rank] for rank in share.sources(places)]
        assert sum(held.numel for held in covered) == share.matrix.shape[0] * share.matrix.num_columns
    for largest in (1, 2 * 64 * 32, 10**9):
        waves = in_waves(shares, 8, largest)
        assert sorted(id(s) for wave in waves for s in wave) == sorted(id(s) for s in shares)
        for wave in waves:
            for number in range(8):
                sizes = [s.matrix.shape[0] * s.matrix.shape[1] for s in wave if s.owner == number]
                assert sum(sizes) <= largest or len(sizes) == 1
