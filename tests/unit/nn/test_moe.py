"""The router's choices and losses, permutation, grouped GEMMs and the whole layer against plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from megafp8.core.config import build as build_config
from megafp8.models import ModelConfig, build
from megafp8.models.moe_config import MoEConfig
from megafp8.nn.balance import begin_step, routers_of, update_balance
from megafp8.nn.context import Context
from megafp8.nn.deferred import WeightGrads, deferring
from megafp8.nn.grouped import grouped_linear
from megafp8.nn.parameter import materialize
from megafp8.nn.permute import combine, spread
from megafp8.nn.router import Router
from megafp8.parallel.expert import plan_dispatch
from megafp8.parallel.mesh import Mesh

MESH = Mesh.single()
SMALL: dict[str, Any] = {
    "num_layers": 2, "hidden_size": 32, "ffn_hidden_size": 48, "num_attention_heads": 4, "vocab_size": 64,
    "max_sequence_length": 16, "init_std": 0.3,
}  # fmt: skip

# sums of at most 100 fp64 terms in another order: 100 * 2^-53 = 1e-14
TIGHT = {"rtol": 1e-12, "atol": 1e-12}


def router_of(**values: Any) -> Router:
    rules = MoEConfig(**{"num_experts": 8, "ffn_hidden_size": 48, **values})
    router = Router(32, rules, std=0.5, mesh=MESH, dtype=torch.float64)
    materialize(router, mesh=MESH, seed=3, device="cpu")
    return router


def tokens(length: int = 12, batch: int = 2) -> torch.Tensor:
    return torch.randn(length, batch, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def model_of(recompute: Any = "none", **moe: Any) -> Any:
    config = build_config(ModelConfig, {**SMALL, "moe": {"num_experts": 4, **moe}})
    return build(config, dtype=torch.float64, recompute=recompute)


# --- choice ---


def test_softmax_top_k_normalised_is_softmax_after_top_k() -> None:
    router, x = router_of(top_k=3), tokens()
    route = router(x, Context())
    logits = x.flatten(0, 1) @ router.weight.T
    values, experts = logits.topk(3)
    assert torch.equal(route.experts, experts)
    torch.testing.assert_close(route.weights, values.softmax(-1), **TIGHT)
    plain = router_of(top_k=3, normalize_top_k=False)(x, Context())
    torch.testing.assert_close(plain.weights, logits.softmax(-1).gather(1, experts), **TIGHT)


def test_sigmoid_groups_and_bias_as_deepseek_v3() -> None:
    """The steps of DeepSeek-V3's own inference code (model.py, Gate.forward), written out."""
    router, x = router_of(score="sigmoid", num_groups=4, top_k_groups=2, scaling_factor=2.5), tokens()
    router.bias.copy_(torch.linspace(-0.2, 0.2, 8))
    route = router(x, Context())
    original = (x.flatten(0, 1) @ router.weight.T).sigmoid()
    scores = (original + router.bias).view(-1, 4, 2)
    groups = scores.topk(2)[0].sum(-1).topk(2)[1]
    mask = torch.ones(len(scores), 4, dtype=torch.bool).scatter_(1, groups, False)
    experts = scores.masked_fill(mask.unsqueeze(-1), -torch.inf).flatten(1).topk(2)[1]
    weights = original.gather(1, experts)
    assert torch.equal(route.experts, experts)
    torch.testing.assert_close(route.weights, weights / weights.sum(-1, keepdim=True) * 2.5, **TIGHT)


def test_of_equal_scores_the_lower_number_is_chosen() -> None:
    router = router_of(top_k=3)
    router.weight.data.zero_()
    assert router(tokens(), Context()).experts.tolist() == [[0, 1, 2]] * 24


def test_logits_are_fp32_in_a_bf16_model() -> None:
    router, x = router_of(), tokens().bfloat16()
    router.weight.data = router.weight.data.bfloat16()
    route = router(x, Context())
    assert route.weights.dtype == torch.float32
    exact = (x.flatten(0, 1).double() @ router.weight.double().T).topk(2)[0].softmax(-1)
    # logits of magnitude 10 from 32 products: 32 * 10 * 2^-24 = 2e-5; bf16 logits would be off by 2e-2
    torch.testing.assert_close(route.weights.double(), exact, rtol=0, atol=5e-5)


# --- capacity ---


@pytest.mark.parametrize("policy", ["probs", "position"])
def test_capacity_is_a_sequences_own(policy: str) -> None:
    router, x = router_of(capacity_factor=0.75, drop_policy=policy), tokens(16)
    route = router(x, Context())
    room = 3  # ceil(0.75 * 2 * 16 / 8)
    experts, kept, weights = (t.view(16, 2, 2) for t in (route.experts, route.kept, route.weights))
    for b in range(2):
        for e in range(8):
            at = (experts[:, b] == e).nonzero().tolist()
            worth = {(t, k): (weights[t, b, k].item() if policy == "probs" else -t) for t, k in at}
            best = sorted(at, key=lambda place: -worth[tuple(place)])[:room]
            assert sorted(best) == [[t, k] for t, k in at if kept[t, b, k]]
    alone = router(x[:, 1:], Context())  # another sequence in the batch changes nothing
    assert torch.equal(alone.kept, kept[:, 1])


def test_ample_capacity_is_dropless() -> None:
    roomy, dropless = (model_of(capacity_factor=c) for c in (4.0, 0.0))
    ids = torch.arange(32).view(2, 16) % 64
    assert torch.equal(roomy(ids), dropless(ids))


# --- losses and balance ---


def losses(router: Router, x: torch.Tensor, sequences: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The tally's two losses, and the router's gradient of them alone (weights take no part)."""
    begin_step({"r": router})
    router.weight.grad = None
    (router(x, Context(num_sequences=sequences)).weights * 0).sum().backward()
    return router.tally[-2:], router.weight.grad


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_losses_are_the_papers(score: str) -> None:
    x, length = tokens(), 12
    for kind in ("sequence", "micro_batch"):
        router = router_of(score=score, aux_loss=kind, aux_loss_coeff=0.5, z_loss_coeff=0.25)
        values, gradient = losses(router, x, 4)
        weight = router.weight.detach().clone().requires_grad_()
        logits = x @ weight.T
        scores = logits.softmax(-1) if score == "softmax" else logits.sigmoid() / logits.sigmoid().sum(-1, keepdim=True)
        chosen = F.one_hot(scores.topk(2)[1], 8).sum(2).double()
        dims = (0,) if kind == "sequence" else (0, 1)
        # DeepSeek-V3 eq. 17-20: f = E / (K T) * count, P = mean of normalised scores; Switch eq. 4-6 over a micro-batch
        aux = (8 / 2 * chosen.mean(dims) * scores.mean(dims)).sum(-1)
        aux = aux.sum() / 4 if kind == "sequence" else aux * 2 / 4
        z = logits.logsumexp(-1).square().sum() / (4 * length)
        (0.5 * aux + 0.25 * z).backward()
        torch.testing.assert_close(values, torch.stack([aux, z]).detach(), **TIGHT)
        torch.testing.assert_close(gradient, weight.grad, **TIGHT)


def test_even_load_has_loss_one_and_evaluation_leaves_no_trace() -> None:
    router = router_of(aux_loss="sequence", aux_loss_coeff=1.0)
    router.weight.data.zero_()
    values, _ = losses(router, tokens(batch=4), 4)
    assert values[0] == pytest.approx(1.0)
    begin_step({"r": router})
    router(tokens(), Context())
    with torch.no_grad():
        router(tokens(), Context(num_sequences=2))
    assert not router.tally.any()


def test_bias_moves_against_load_and_evens_it() -> None:
    router = router_of(score="sigmoid", bias_update_rate=0.01)
    x = tokens(64) + 0.3
    router.weight.data[0] += 0.1  # expert 0 is liked
    spans = []
    for _ in range(100):
        losses(router, x, 2)
        load = router.tally[:8].clone()
        before = router.bias.clone()
        update_balance({"r": router}, MESH)
        assert torch.equal(torch.sign(router.bias - before), torch.sign(load.mean() - load).float())
        spans.append(float(load.max() - load.min()))
    assert spans[-1] < spans[0] / 3


# --- permutation and GEMMs ---


def test_permutation_is_a_gather_and_its_transpose() -> None:
    x = torch.randn(10, 4, dtype=torch.float64, requires_grad=True)
    experts = torch.stack([torch.randperm(5)[:2] for _ in range(10)])
    weights = torch.rand(10, 2, dtype=torch.float64, requires_grad=True)
    kept = torch.rand(10, 2) > 0.3
    dispatch = plan_dispatch(experts, kept, 5, MESH)
    assert dispatch.counts.tolist() == [int(((experts == e) & kept).sum()) for e in range(5)]

    def there_and_back(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return combine(spread(x, dispatch).sin(), weights, dispatch)

    torch.testing.assert_close(there_and_back(x, weights), x.sin() * (weights * kept).sum(1, keepdim=True), **TIGHT)
    assert torch.autograd.gradcheck(there_and_back, (x, weights))


def test_nothing_kept_is_zero() -> None:
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    weights = torch.ones(3, 2, dtype=torch.float64, requires_grad=True)
    dispatch = plan_dispatch(torch.tensor([[0, 1]] * 3), torch.zeros(3, 2, dtype=torch.bool), 2, MESH)
    y = combine(spread(x, dispatch), weights, dispatch)
    y.sum().backward()
    assert not y.any() and not x.grad.any() and not weights.grad.any()


@pytest.mark.parametrize("counts", [[3, 0, 5], [0, 0, 8], [0, 0, 0]])
def test_grouped_linear(counts: list[int]) -> None:
    rows = sum(counts)
    x = torch.randn(rows, 6, dtype=torch.float64, requires_grad=True)
    w = torch.randn(3, 2, 4, 6, dtype=torch.float64, requires_grad=True)
    sizes = torch.tensor(counts)
    which = torch.arange(3).repeat_interleave(sizes)
    expected = torch.einsum("rk,rnk->rn", x, w.flatten(1, 2)[which])
    made = grouped_linear(x, w, sizes)
    torch.testing.assert_close(made, expected, **TIGHT)
    grad = torch.randn_like(made)
    wanted = torch.autograd.grad(expected, (x, w), grad)
    torch.testing.assert_close(torch.autograd.grad(made, (x, w), grad), wanted, **TIGHT)
    store = WeightGrads()
    with deferring(store):
        grouped_linear(x, w, sizes).backward(grad)
    assert w.grad is None and len(store) == 1
    store.run()
    torch.testing.assert_close(w.grad, wanted[1], **TIGHT)


# --- the layer ---


def plain_moe(moe: Any, y: torch.Tensor) -> torch.Tensor:
    """Every expert on every token, weighted by 0 where it was not chosen."""
    route = moe.router(y, Context())
    dense = torch.zeros(len(route.experts), moe.router.rules.num_experts, dtype=y.dtype)
    kept = 1 if route.kept is None else route.kept
    dense = dense.scatter(1, route.experts, route.weights * kept)
    flat = y.flatten(0, 1)
    gate, up = torch.einsum("nh,ecfh->cenf", flat, moe.experts.gate_up)
    out = torch.einsum("enf,ehf->enh", F.silu(gate) * up, moe.experts.down)
    out = torch.einsum("enh,ne->nh", out, dense).view(y.shape)
    if moe.shared is not None:
        gate, up = (y @ moe.shared.gate_up.weight.transpose(1, 2).unsqueeze(1)).unbind(0)
        out = out + F.silu(gate) * up @ moe.shared.down.weight.T
    return out


@pytest.mark.parametrize("values", [
    {}, {"top_k": 1, "normalize_top_k": False}, {"num_shared_experts": 2}, {"capacity_factor": 0.5, "top_k": 3},
    {"score": "sigmoid", "num_groups": 2, "scaling_factor": 2.0},
])  # fmt: skip
def test_layer_is_every_expert_on_every_token(values: dict[str, Any]) -> None:
    moe = model_of(**values).layers[0].mlp
    y = tokens(16).requires_grad_()
    params = [y, *moe.parameters()]
    made, expected = moe(y, Context()), plain_moe(moe, y)
    torch.testing.assert_close(made, expected, **TIGHT)
    grad = torch.randn_like(made)
    ours, theirs = (torch.autograd.grad(out, params, grad) for out in (made, expected))
    for ours_one, theirs_one in zip(ours, theirs, strict=True):
        torch.testing.assert_close(ours_one, theirs_one, rtol=1e-10, atol=1e-10)


def gradients(model: Any) -> tuple[float, dict[str, torch.Tensor], torch.Tensor]:
    ids = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(5))
    loss, _ = model(ids, ids.roll(-1, 1), num_sequences=2)
    loss.backward()
    tally = torch.stack([router.tally for router in routers_of(model).values()])
    return loss.item(), {n: p.grad for n, p in model.named_parameters()}, tally


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recompute_gives_the_same_bits(recompute: str) -> None:
    values = {
        "num_shared_experts": 1, "capacity_factor": 1.0, "aux_loss": "sequence", "aux_loss_coeff": 0.1,
        "z_loss_coeff": 0.1,
    }  # fmt: skip
    loss, grads, tally = gradients(model_of(**values))
    again_loss, again, again_tally = gradients(model_of(recompute, **values))
    assert again_loss == loss and torch.equal(tally, again_tally)
    assert tally[:, :4].sum() == 2 * 2 * 32  # layers, choices, tokens: counted once although recomputed
    for name, grad in grads.items():
        assert torch.equal(grad, again[name]), name


def test_backward_in_two_parts_gives_the_same_bits() -> None:
    whole = gradients(model_of())[1]
    model, store = model_of(), WeightGrads()
    ids = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(5))
    loss, _ = model(ids, ids.roll(-1, 1), num_sequences=2)
    with deferring(store):
        loss.backward()
    assert model.layers[0].mlp.experts.down.grad is None
    store.run()
    for name, param in model.named_parameters():
        assert torch.equal(param.grad, whole[name]), name


def test_dense_layers_beside_layers_with_experts() -> None:
    model = model_of(first_dense_layers=1)
    assert set(routers_of(model)) == {"layers.1.mlp.router"}
    names = dict(model.named_parameters())
    assert names["layers.0.mlp.gate_up.weight"].shape == (2, 48, 32)
    assert names["layers.1.mlp.experts.gate_up"].shape == (4, 2, 48, 32)


def test_experts_without_any_row() -> None:
    experts = model_of().layers[0].mlp.experts
    y = experts(torch.zeros(0, 32, dtype=torch.float64, requires_grad=True), torch.zeros(4, dtype=torch.int64))
    y.sum().backward()
    assert y.shape == (0, 32) and not experts.gate_up.grad.any() and not experts.down.grad.any()


def test_initial_experts_differ() -> None:
    down = model_of().layers[0].mlp.experts.down
    assert len({tuple(expert.flatten()[:4].tolist()) for expert in down}) == 4


def test_bf16_model_trains() -> None:
    config = build_config(ModelConfig, {**SMALL, "moe": {"num_experts": 4}})
    model = build(config, dtype=torch.bfloat16)
    loss, grads, _ = gradients(model)
    assert all(torch.isfinite(g).all() for g in grads.values()) and loss > 0
