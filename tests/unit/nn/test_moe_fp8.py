"""Experts in FP8: what is quantized, that padding and empty experts change nothing, and that a model trains."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megafp8.core.config import build as build_config
from megafp8.fp8.backend import backend
from megafp8.fp8.backends.native import Native
from megafp8.fp8.linear import LinearState, update_states
from megafp8.fp8.quantized import Operand
from megafp8.fp8.recipe import recipe
from megafp8.models import ModelConfig, build, check_model
from megafp8.models.config import quantizable_shapes
from megafp8.nn.deferred import WeightGrads, deferring
from megafp8.nn.grouped import grouped_linear
from megafp8.nn.precision import PrecisionConfig, plan_gemms, precision_rows

SMALL: dict[str, Any] = {
    "num_layers": 2, "hidden_size": 32, "ffn_hidden_size": 64, "num_attention_heads": 4, "vocab_size": 128,
    "max_sequence_length": 32, "init_std": 0.1, "moe": {"num_experts": 4, "ffn_hidden_size": 32},
}  # fmt: skip
CONFIG = build_config(ModelConfig, SMALL)


def test_plan_knows_experts() -> None:
    names = list(quantizable_shapes(CONFIG))
    assert [name.split(".", 2)[2] for name in names if name.startswith("layers.1.")] == [
        "attention.qkv", "attention.out", "mlp.experts.gate_up", "mlp.experts.down",
    ]  # fmt: skip
    kept = PrecisionConfig(recipe="delayed", patterns={"experts": "none"})
    rows = {name: (made, why) for name, made, why in precision_rows(kept, names, 2)}
    assert rows["layers.0.mlp.experts.down"] == ("bf16", "pattern 'experts'")
    assert plan_gemms(PrecisionConfig(recipe="current"), names, 2)[0]["layers.0.mlp.experts.down"] == "current"


def test_dims_of_an_experts_piece() -> None:
    assert check_model(CONFIG, tp=2, etp=1, precision=PrecisionConfig(recipe="delayed")) == []
    problems = check_model(CONFIG, tp=1, etp=4, precision=PrecisionConfig(recipe="delayed"))
    assert any("layers.*.mlp.experts.down: in dim 8 is not a multiple of 16" in problem for problem in problems)


@pytest.mark.parametrize("counts", [[5, 0, 16], [0, 0, 21], [0, 0, 0]])
@pytest.mark.parametrize("made", [("delayed", "emulated", "fast"), ("current", "emulated", "exact"),
                                  ("current", "native", "fast"), ("current", "emulated", "fast")])  # fmt: skip
def test_grouped_gemms_are_those_of_the_codes(counts: list[int], made: tuple[str, str, str]) -> None:
    name, where, mode = made
    state = LinearState("e", recipe(name), backend(where, mode, compiled=False))
    x = torch.randn(sum(counts), 32, dtype=torch.bfloat16, requires_grad=True)
    w = (torch.randn(3, 2, 16, 32) * 0.1).bfloat16().requires_grad_()
    made_y = grouped_linear(x, w, torch.tensor(counts), state=state)
    grad = torch.randn_like(made_y)
    made_y.backward(grad)

    def values(role: str, t: torch.Tensor) -> torch.Tensor:
        spec, scale = state.roles[role].spec, state.roles[role].scale
        return state.backend.quantize(t.detach(), spec, scale)[0].dequantize()

    if not sum(counts):
        assert not x.grad.numel() and not w.grad.any()
        return
    qx, qw, qg = values("input", x), values("weight", w.flatten(0, -2)).view(3, 32, 32), values("grad_output", grad)
    which = torch.arange(3).repeat_interleave(torch.tensor(counts))
    onehot = torch.nn.functional.one_hot(which, 3).float()
    # the sums are in bf16 in fast mode and rounded once more after the scale: 2 * 2^-8 of the largest terms
    close = {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(made_y.float(), torch.einsum("rk,rnk->rn", qx, qw[which]), **close)
    torch.testing.assert_close(x.grad.float(), torch.einsum("rn,rnk->rk", qg, qw[which]), **close)
    expected = torch.einsum("re,rn,rk->enk", onehot, qg, qx)
    torch.testing.assert_close(w.grad.flatten(1, 2).float(), expected, rtol=2e-2, atol=5e-2)
    assert not w.grad[torch.tensor(counts) == 0].any()


class Watched(Native):
    """Native, which on a GPU refuses to sum over rows that are no multiple of 16; a CPU would take any."""

    def gemm(
        self, a: Operand, b: Operand, bias: torch.Tensor | None, dtype: torch.dtype, *, precise: bool
    ) -> torch.Tensor:
        assert a.shape[1] % 16 == 0 and b.shape[1] % 16 == 0
        return super().gemm(a, b, bias, dtype, precise=precise)


def test_real_bytes_are_padded_to_what_a_gpu_takes() -> None:
    state = LinearState("e", recipe("current"), Watched())
    x = torch.randn(21, 32, dtype=torch.bfloat16, requires_grad=True)
    w = torch.randn(3, 16, 32, dtype=torch.bfloat16, requires_grad=True)
    grouped_linear(x, w, torch.tensor([5, 0, 16]), state=state).sum().backward()
    assert w.grad.any()


def steps(precision: PrecisionConfig, recompute: Any = "none", *, split: bool = False, count: int = 3) -> list[Any]:
    model = build(CONFIG, precision=precision, recompute=recompute, seed=3)
    start = torch.randint(0, 128, (4, 1), generator=torch.Generator().manual_seed(0))
    ids = (start + 5 * torch.arange(33)) % 128
    results: list[Any] = []
    for _ in range(count):
        loss, number = model(ids[:, :-1], ids[:, 1:], num_sequences=4)
        store = WeightGrads()
        if split:
            with deferring(store):
                (loss / 128).backward()
            store.run()
        else:
            (loss / 128).backward()
        update_states(model.fp8_states.values())
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad
                p.grad = None
        results.append(float(loss.detach()) / int(number))
    return results


@pytest.mark.parametrize("name", ["delayed", "current"])
def test_a_model_with_experts_in_fp8_follows_bf16(name: str) -> None:
    bf16 = steps(PrecisionConfig(), count=8)
    fp8 = steps(PrecisionConfig(recipe=name, backend="emulated"), count=8)  # type: ignore[arg-type]
    assert bf16[-1] < bf16[0] - 0.3
    # as in test_recipes_train: under 2 % in the first step. Later a token near a tie goes to another expert and the
    # curves part: by 0.03 here in eight steps, whichever linears are in FP8; twice that is the band
    assert fp8[0] == pytest.approx(bf16[0], rel=0.02) and fp8 != bf16
    assert max(abs(a - b) for a, b in zip(fp8, bf16, strict=True)) < 0.06


@pytest.mark.parametrize("name", ["delayed", "current"])
def test_recompute_and_split_backward_give_the_same_bits(name: str) -> None:
    precision = PrecisionConfig(recipe=name, backend="emulated")  # type: ignore[arg-type]
    expected = steps(precision)
    for recompute in ("selective", "full"):
        assert steps(precision, recompute) == expected
    assert steps(precision, split=True) == expected
