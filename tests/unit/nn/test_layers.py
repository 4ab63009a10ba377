"""Loss, rotary tables and dropout of one process."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from megafp8.core.layout import layout_of
from megafp8.models import ModelConfig, build
from megafp8.nn import loss as loss_module
from megafp8.nn.dropout import DropoutKey, hidden_dropout, weight_dropout
from megafp8.nn.kernels import Kernels
from megafp8.nn.loss import Output
from megafp8.nn.parameter import materialize
from megafp8.parallel.mesh import Mesh

MESH = Mesh.single()


def output_layer(dtype: torch.dtype) -> Output:
    layer = Output(40, 16, tied=None, std=0.5, mesh=MESH, dtype=dtype, kernels=Kernels())
    materialize(layer, mesh=MESH, seed=1, device="cpu")
    return layer


@pytest.mark.parametrize("chunk_elements", [40 * 3, 1 << 24])
@pytest.mark.parametrize("upstream", [1.0, 0.25])
def test_loss_is_cross_entropy(chunk_elements: int, upstream: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_module, "CHUNK_ELEMENTS", {"cpu": chunk_elements})
    layer = output_layer(torch.float64)
    x = torch.randn(5, 2, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    targets = torch.tensor([[1, 39, -100, 0, 7], [2, -100, -100, 5, 11]])
    loss = layer.loss(x, targets, 0.25)
    expected = F.cross_entropy(layer(x).flatten(0, 1), targets.flatten(), reduction="sum")
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    expected_grads = torch.autograd.grad(expected * upstream, [x, layer.weight])
    (loss * upstream).backward()
    torch.testing.assert_close((x.grad, layer.weight.grad), expected_grads, rtol=1e-10, atol=1e-12)


def test_loss_without_gradients_keeps_nothing() -> None:
    layer = output_layer(torch.float32)
    x = torch.randn(5, 2, 16)
    with torch.no_grad():
        loss = layer.loss(x, torch.zeros(2, 5, dtype=torch.int64), None)
    assert not loss.requires_grad and loss.dtype == torch.float32


def test_dropout_is_by_place_and_keeps_the_mean() -> None:
    key = DropoutKey(3, torch.tensor([10, 4]))
    x = torch.ones(64, 2, 32)
    dropped = hidden_dropout(x, 0.25, key, "here", mesh=MESH)
    swapped = hidden_dropout(x, 0.25, DropoutKey(3, torch.tensor([4, 10])), "here", mesh=MESH)
    assert torch.equal(dropped, swapped.flip(1))  # a mask follows its sample, wherever it is in the batch
    assert not torch.equal(dropped, hidden_dropout(x, 0.25, key, "there", mesh=MESH))
    # 4096 draws: the mean of x / 0.75 on 0.75 of them has sigma sqrt(0.25 / 0.75 / 4096) = 0.009; 5 sigma
    assert abs(float(dropped.mean()) - 1) < 0.045
    dropout = weight_dropout(key, 0.25, "here", groups=2, r=2, first=0, num_heads=4, places=torch.arange(16))
    weights = dropout.factors(slice(0, 4), slice(0, 16), slice(0, 16), torch.float32)
    assert weights.shape == (4, 16 * 2, 16)
    assert abs(float((weights == 0).float().mean()) - 0.25) < 0.05  # 2048 draws, 5 sigma of 0.0096


def test_initial_values_come_from_names() -> None:
    config = ModelConfig(preset="tiny_llama")
    first, second = build(config, seed=3), build(config, seed=3)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    other = build(config, seed=4)
    assert not torch.equal(first.embedding.weight, other.embedding.weight)
    weights = dict(build(config, dtype=torch.float32).named_parameters())
    # std of n normals is known to 1/sqrt(2n); 16384 of them: 5 sigma = 2.8 %
    assert float(weights["embedding.weight"].detach().std()) == pytest.approx(0.02, rel=0.028)
    down = float(weights["layers.0.mlp.down.weight"].detach().std())
    assert down == pytest.approx(0.02 / 2, rel=0.034)  # sqrt(2 * 2 layers)
    assert torch.equal(weights["final_norm.weight"], torch.ones(64))


def test_meta_device_has_shapes_and_no_memory() -> None:
    model = build(ModelConfig(preset="llama3_405b"), device="meta")
    assert all(p.is_meta for p in model.parameters())
    assert layout_of(model.layers[125].mlp.gate_up.weight).shape == (2, 53248, 16384)


def test_an_evaluation_leaves_dropout_on() -> None:
    """Dropout is asked for by a key at each call, not by a mode that an evaluation could leave behind."""
    tokens = torch.randint(0, 256, (2, 16), generator=torch.Generator().manual_seed(0))
    model = build(ModelConfig(preset="tiny_gpt", hidden_dropout=0.5), dtype=torch.float32)
    key = DropoutKey(3, torch.tensor([6, 7]))
    before, _ = model(tokens, tokens, dropout=key)
    with torch.no_grad():
        evaluated, _ = model.eval()(tokens, tokens)
    after, _ = model(tokens, tokens, dropout=key)
    assert torch.equal(before, after) and not torch.equal(before, evaluated)
