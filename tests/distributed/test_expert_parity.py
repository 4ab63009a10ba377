"""Experts on any mesh give what one process gives: loss, auxiliary losses, load, balance bias, every gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megafp8.core.layout import layout_of
from megafp8.fp8.linear import update_states
from megafp8.models import ModelConfig, build
from megafp8.nn.balance import BATCH_AXES, begin_step, routers_of, update_balance
from megafp8.nn.context import Context
from megafp8.nn.precision import PrecisionConfig
from megafp8.parallel import expert
from megafp8.parallel.buckets import GradBuckets
from megafp8.parallel.collectives import all_gather, all_gather_uneven, all_reduce_, all_to_all, reduce_scatter_uneven
from megafp8.parallel.expert import plan_dispatch
from megafp8.parallel.mesh import build_mesh
from megafp8.parallel.mesh_config import ParallelConfig
from tests.distributed.ranks import run_ranks

Values = dict[str, Any]
SMALL: Values = {
    "num_layers": 2, "hidden_size": 16, "ffn_hidden_size": 16, "num_attention_heads": 4, "vocab_size": 64,
    "max_sequence_length": 16, "init_std": 0.3,
}  # fmt: skip
MODELS: dict[str, Values] = {
    "switch": {
        "num_experts": 4, "top_k": 2, "num_shared_experts": 1, "first_dense_layers": 1, "aux_loss": "micro_batch",
        "aux_loss_coeff": 0.3, "z_loss_coeff": 0.1, "capacity_factor": 0.75, "drop_policy": "position",
    },
    "deepseek": {
        "num_experts": 8, "top_k": 3, "score": "sigmoid", "num_groups": 4, "top_k_groups": 2, "scaling_factor": 1.5,
        "aux_loss": "sequence", "aux_loss_coeff": 0.3, "bias_update_rate": 0.05,
    },
    "capacity": {"num_experts": 4, "top_k": 2, "capacity_factor": 0.75, "aux_loss": "sequence", "aux_loss_coeff": 0.3},
}  # fmt: skip
SEQUENCES, MICRO_BATCH = 8, 2

# fp64 sums of at most 10^3 terms in another order, 1e3 * 2^-53 = 1e-13 of the largest, which cancellation may leave
# 10^2 above the sum. A missing collective, or a factor of ep, shows at 1e-1.
TOLERANCE = 1e-10


def outcome(rank: int, world: int, parallel: Values, recompute: str = "none") -> dict[str, Any]:
    """Per model: losses of its steps, whole gradients of the last, tally and biases after it."""
    mesh = build_mesh(ParallelConfig(**parallel), world)
    tokens = torch.randint(0, 64, (SEQUENCES, 16), generator=torch.Generator().manual_seed(5))
    tokens[3, 1:] = 7  # its experts are over capacity, others idle; the first token keeps the rows from being equal
    targets = tokens.roll(-1, 1)
    targets[0, 3:6] = -100
    share = SEQUENCES // mesh.size("dp")
    mine = slice(mesh.coord("dp") * share, (mesh.coord("dp") + 1) * share)
    results = {}
    for name, moe in MODELS.items():
        model = build(ModelConfig(**SMALL, moe=moe), mesh=mesh, dtype=torch.float64, recompute=recompute)  # type: ignore[arg-type]
        buckets = GradBuckets(list(model.named_parameters()), mesh)
        routers, losses = routers_of(model), []
        for _ in range(2 if name == "deepseek" else 1):  # the bias of the first step counts in the second
            begin_step(routers)
            buckets.zero_(contributions=share // MICRO_BATCH)
            total = torch.zeros((), dtype=torch.float64)
            for ids, wanted in zip(tokens[mine].split(MICRO_BATCH), targets[mine].split(MICRO_BATCH), strict=True):
                loss, _ = model(ids, wanted, num_sequences=SEQUENCES)
                (loss / 125).backward()
                total += loss.detach()
            buckets.finish()
            losses.append(float(all_reduce_(total, mesh.group_of(("dp", "cp")))))
            update_balance(routers, mesh)
        results[name] = {
            "losses": losses,
            "gradients": {n: whole(p, mesh).numpy() for n, p in model.named_parameters()},
            "tally": torch.stack([all_reduce_(r.tally.clone(), mesh.group_of(BATCH_AXES)) for r in routers.values()]),
            "bias": [r.bias.tolist() for r in routers.values() if r.bias is not None],
        }
    return results


def whole(param: torch.nn.Parameter, mesh: Any) -> torch.Tensor:
    gradient: torch.Tensor = param.main_grad  # type: ignore[attr-defined]
    for dim, axis in layout_of(param).split.items():
        gradient = all_gather(gradient, mesh.group(axis), dim)
    return gradient


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return run_ranks(outcome, 1, {})[0]


def check(alone: dict[str, Any], everyone: list[dict[str, Any]]) -> None:
    for results in everyone:
        for name, got in results.items():
            expected = alone[name]
            assert got["losses"] == pytest.approx(expected["losses"], rel=TOLERANCE), name
            assert got["bias"] == expected["bias"], name
            torch.testing.assert_close(got["tally"], expected["tally"], rtol=TOLERANCE, atol=1e-14, msg=name)
            assert got["gradients"].keys() == expected["gradients"].keys()
            for parameter, gradient in got["gradients"].items():
                wanted = expected["gradients"][parameter]
                assert gradient.shape == wanted.shape
                difference = abs(gradient - wanted).max() / abs(wanted).max()
                assert difference < TOLERANCE, (name, parameter, difference)


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize("world, parallel", [
    (2, {"ep": 2}),
    (2, {"tp": 2, "sequence_parallel": False}),
    (4, {"tp": 2, "ep": 2}),
    (4, {"tp": 2, "ep": 4, "etp": 1}),
    slow(2, {"tp": 2}), slow(2, {"tp": 2, "ep": 2, "etp": 1}), slow(2, {"dp": 2}), slow(2, {"etp": 2}),
    slow(4, {"ep": 4}), slow(4, {"ep": 2}), slow(4, {"ep": 2, "etp": 2}),
    slow(4, {"tp": 2, "ep": 2, "etp": 1, "sequence_parallel": False}), slow(4, {"tp": 4, "ep": 2, "etp": 2}),
], ids=str)  # fmt: skip
def test_equals_one_process(alone: dict[str, Any], world: int, parallel: Values) -> None:
    check(alone, run_ranks(outcome, world, parallel))


@pytest.mark.parametrize("parallel", [
    {"cp": 2, "tp": 2, "ep": 2, "etp": 1}, slow({"cp": 2, "ep": 2}), slow({"cp": 4, "ep": 2, "etp": 2}),
], ids=str)  # fmt: skip
def test_equals_one_process_with_context_parallelism(alone: dict[str, Any], parallel: Values) -> None:
    check(alone, run_ranks(outcome, 4, parallel))


@pytest.mark.parametrize("recompute", ["full", slow("selective")])
def test_recompute_equals_one_process(alone: dict[str, Any], recompute: str) -> None:
    check(alone, run_ranks(outcome, 2, {"ep": 2}, recompute))


def test_the_data_tests_something(alone: dict[str, Any]) -> None:
    for name in ("capacity", "switch"):
        assert (alone[name]["tally"][:, 4] > 10).all()  # dropped
    assert any(abs(value) > 0.05 for bias in alone["deepseek"]["bias"] for value in bias)
    assert alone["switch"]["tally"][0, -2] > 1 and alone["switch"]["tally"][0, -1] > 0


# --- FP8 ---


def fp8_losses(rank: int, world: int, parallel: Values) -> list[float]:
    """Losses of three passes with delayed scaling, scales updated between them."""
    mesh = build_mesh(ParallelConfig(**parallel), world)
    moe = {"num_experts": 4, "ffn_hidden_size": 64, "num_shared_experts": 1}
    config = ModelConfig(**(SMALL | {"hidden_size": 64, "moe": moe}))
    precision = PrecisionConfig(recipe="delayed", emulation="exact")
    model = build(config, mesh=mesh, precision=precision, dtype=torch.float32)
    tokens = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(5))
    losses = []
    for _ in range(3):
        loss, count = model(tokens, tokens.roll(-1, 1))
        loss.backward()
        update_states(model.fp8_states.values(), mesh.group_of(BATCH_AXES))
        losses.append(float(loss.detach() / count))
        for state in model.fp8_states.values():
            state.drop_weight_cache()
    return losses


@pytest.mark.parametrize("parallel", [{"tp": 2, "ep": 2, "etp": 1}, {"tp": 2}], ids=str)
def test_fp8_experts_equal_one_process(parallel: Values) -> None:
    """As in test_tp_parity: one flip of a rounding in 10^6 elements may move the loss by 1e-3; scales of a rank's own
    experts alone move every element."""
    alone, split = run_ranks(fp8_losses, 1, {})[0], run_ranks(fp8_losses, 2, parallel)
    assert split[0] == split[1] and split[0][0] != split[0][1]
    assert split[0] == pytest.approx(alone, abs=1e-3)


def codes_or_values(rank: int, world: int, parallel: Values, recipe: str, emulation: str) -> None:
    """Rows that travel as codes give the bits of rows that are quantized where they arrive."""
    mesh = build_mesh(ParallelConfig(**parallel), world)
    config = ModelConfig(**(SMALL | {"hidden_size": 32, "moe": {"num_experts": 4, "ffn_hidden_size": 32}}))
    precision = PrecisionConfig(recipe=recipe, emulation=emulation)  # type: ignore[arg-type]
    dtype = torch.bfloat16 if emulation == "fast" else torch.float32
    moe = build(config, mesh=mesh, precision=precision, dtype=dtype).layers[0].mlp
    results, sent = [], set()

    def recorded(exchange: Any) -> Any:
        def record(rows: torch.Tensor, *rest: Any) -> torch.Tensor:
            sent.add(rows.dtype)
            return exchange(rows, *rest)

        return record

    expert.all_to_all = recorded(expert.all_to_all)
    expert.all_gather_uneven = recorded(expert.all_gather_uneven)
    for as_codes in (True, False):
        y = torch.randn(8, 2, 32, generator=torch.Generator().manual_seed(rank)).to(dtype).requires_grad_()
        state = moe.experts.states[0]
        state.alike_everywhere = lambda _, as_codes=as_codes: as_codes
        sent.clear()
        made = moe(y, Context())
        made.sum().backward()
        assert (torch.uint8 in sent) == as_codes, sent
        results.append([made, y.grad, *(p.grad for p in moe.parameters())])
        moe.zero_grad()
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("parallel, recipe, emulation", [
    ({"ep": 2}, "current", "fast"),
    ({"tp": 2, "ep": 2, "etp": 1}, "delayed", "exact"),
    slow({"etp": 2}, "current", "exact"), slow({"ep": 2}, "delayed", "fast"),
], ids=str)  # fmt: skip
def test_codes_travel_as_bytes(parallel: Values, recipe: str, emulation: str) -> None:
    run_ranks(codes_or_values, 2, parallel, recipe, emulation)


# --- exchanges ---


def exchanges(rank: int, world: int) -> None:
    """Uneven and empty pieces of bf16, fp64 and uint8."""
    mesh = build_mesh(ParallelConfig(), world)
    group, sizes = mesh.group("dp"), [2, 0, 3][:world]
    for dtype in (torch.bfloat16, torch.float64, torch.uint8):
        row = torch.arange(4).to(dtype)
        gathered = all_gather_uneven(row.add(rank).expand(sizes[rank], 4), group, sizes)
        assert gathered[:, 0].tolist() == [r for r in range(world) for _ in range(sizes[r])]
        sent, received = [rank + to for to in range(world)], [source + rank for source in range(world)]
        made = all_to_all(torch.full((sum(sent), 4), rank).to(dtype), group, sent, received)
        assert made[:, 3].tolist() == [source for source in range(world) for _ in range(source + rank)]
        if dtype is not torch.uint8:
            summed = reduce_scatter_uneven(torch.ones(sum(sizes), 4).to(dtype), group, sizes)
            assert summed.tolist() == [[world] * 4] * sizes[rank]


def test_uneven_exchanges() -> None:
    run_ranks(exchanges, 3)


def to_one_expert(rank: int, world: int) -> list[int]:
    """All tokens to the last expert: other ranks get nothing, and nobody waits for them."""
    mesh = build_mesh(ParallelConfig(ep=world), world)
    dispatch = plan_dispatch(torch.full((5, 1), 2 * world - 1), None, 2 * world, mesh)
    rows = torch.full((5, 3), float(rank), dtype=torch.float64, requires_grad=True)
    there = dispatch.send(rows)
    assert there[:, 0].tolist() == ([r for r in range(world) for _ in range(5)] if rank == world - 1 else [])
    back = dispatch.bring_back(there * 2)
    back.sum().backward()
    assert torch.equal(back, rows * 2) and torch.equal(rows.grad, torch.full_like(rows, 2))
    return dispatch.counts.tolist()


def test_all_tokens_to_one_expert() -> None:
    assert run_ranks(to_one_expert, 2) == [[0, 0], [0, 10]]
