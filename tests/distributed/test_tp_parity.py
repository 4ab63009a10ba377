"""Tensor parallelism, with and without sequence parallelism, gives what one process gives: loss and every gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megafp8.core.layout import layout_of
from megafp8.core.rng import fill_normal_, seed_for
from megafp8.fp8.linear import update_states
from megafp8.models import ModelConfig, build
from megafp8.nn import loss as loss_module
from megafp8.nn.layers import DropoutKey
from megafp8.nn.precision import PrecisionConfig
from megafp8.parallel.collectives import all_gather, all_reduce_
from megafp8.parallel.mesh import Mesh, build_mesh
from megafp8.parallel.mesh_config import ParallelConfig
from tests.distributed.ranks import run_ranks

Values = dict[str, Any]
SMALL: Values = {
    "num_layers": 2, "hidden_size": 32, "ffn_hidden_size": 48, "num_attention_heads": 8, "num_kv_heads": 4,
    "vocab_size": 61, "max_sequence_length": 16, "init_std": 0.3,
}  # fmt: skip
MODELS: dict[str, Values] = {
    "llama": {"family": "llama", **SMALL},
    "llama_tied": {"family": "llama", "tied_embeddings": True, "attention_bias": True, "mlp_bias": True, **SMALL},
    "qwen3": {"family": "qwen3", "head_dim": 8, **SMALL},
    "latent": {
        "family": "llama", **SMALL, "num_kv_heads": 8,
        "mla": {"q_lora_rank": 12, "kv_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 3},
    },
    "gpt": {"family": "gpt", **SMALL, "num_kv_heads": 8},
    "gpt_dropout": {"family": "gpt", "hidden_dropout": 0.2, "attention_dropout": 0.2, **SMALL, "num_kv_heads": 8},
    # fewer kv heads than ranks: on 4 ranks each kv head lies on 4, and on 2
    "one_kv_head": {"family": "qwen3", "head_dim": 8, "attention_bias": True, **SMALL, "num_kv_heads": 1},
    "two_kv_heads": {"family": "llama", "attention_dropout": 0.2, **SMALL, "num_kv_heads": 2},
}

# fp64 sums of a few thousand terms in another order: 1e3 * 2^-53 = 1e-13 relative to the largest terms; the norm
# of a gradient can lie 10^2 below those by cancellation. A wrong or missing collective shows at 1e-1.
TOLERANCE = 1e-10


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(0, 61, (2, 16), generator=torch.Generator().manual_seed(5))
    targets = tokens.roll(-1, 1)
    targets[:, -1] = -100
    targets[0, 3:6] = -100
    return tokens, targets


def disturb(model: torch.nn.Module, mesh: Mesh) -> None:
    """Norm weights and biases off their initial 1 and 0, by global name, so that a mix-up of elements shows."""
    for name, param in model.named_parameters():
        if param.dim() == 1 or name.endswith("gate_up.bias"):
            mean = 1.0 if "norm.weight" in name else 0.0
            seed = seed_for(7, name)
            fill_normal_(param.data, seed=seed, layout=layout_of(param), mesh=mesh, std=0.3, mean=mean)


def whole(gradient: torch.Tensor, layout: Any, mesh: Mesh) -> torch.Tensor:
    for axis in layout.grad_sum:
        gradient = all_reduce_(gradient.clone(), mesh.group(axis))
    for dim, axis in layout.split.items():
        widest = -(-layout.shape[dim] // mesh.size(axis))  # the last piece of a vocabulary may be smaller
        padding = [0, 0] * (gradient.dim() - 1 - dim) + [0, widest - gradient.shape[dim]]
        gradient = all_gather(torch.nn.functional.pad(gradient, padding), mesh.group(axis), dim)
        gradient = gradient.narrow(dim, 0, layout.shape[dim])
    return gradient


def outcome(rank: int, world: int, sequence_parallel: bool, recompute: str) -> dict[str, Any]:
    """Loss, logits and whole gradients of every model."""
    torch.set_num_threads(1)
    tokens, targets = batch()
    results: dict[str, Any] = {}
    for name, values in MODELS.items():
        parallel = ParallelConfig(tp=world, sequence_parallel=sequence_parallel)
        mesh = build_mesh(parallel, world, kv_heads=ModelConfig(**values).num_kv_heads)
        model = build(ModelConfig(**values), mesh=mesh, dtype=torch.float64, recompute=recompute)
        disturb(model, mesh)
        # the loss in several chunks, of one length on all ranks although they hold 31 and 30 tokens of the vocabulary
        loss_module.CHUNK_ELEMENTS["cpu"] = 31 * 8 - 1 if name == "llama" else 1 << 24
        key = DropoutKey(11, torch.tensor([3, 8])) if model.has_dropout else None
        segments = torch.tensor([[0] * 7 + [1] * 9, [0] * 16]) if name == "llama" else None
        positions = torch.tensor([[*range(7), *range(9)], [*range(16)]]) if name == "llama" else None
        loss, count = model(tokens, targets, loss_scale=0.5, segment_ids=segments, positions=positions, dropout=key)
        (loss * 0.5).backward()
        with torch.no_grad():
            logits = model(tokens)
        gradients = {n: whole(p.grad, layout_of(p), mesh).numpy() for n, p in model.named_parameters()}
        results[name] = (loss.item(), int(count), logits.numpy(), gradients)
    return results


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return run_ranks(outcome, 1, False, "none")[0]


@pytest.mark.parametrize("tp, sequence_parallel, recompute", [
    (2, True, "none"), (2, False, "selective"), (4, True, "selective"), (4, False, "full"), (2, True, "full"),
])  # fmt: skip
def test_equals_one_process(alone: dict[str, Any], tp: int, sequence_parallel: bool, recompute: str) -> None:
    for results in run_ranks(outcome, tp, sequence_parallel, recompute):
        for name, (loss, count, logits, gradients) in results.items():
            expected_loss, expected_count, expected_logits, expected = alone[name]
            assert count == expected_count == 2 * 15 - 3, name
            assert loss == pytest.approx(expected_loss, rel=TOLERANCE), name
            assert relative(logits, expected_logits) < TOLERANCE, name
            assert gradients.keys() == expected.keys()
            for parameter, gradient in gradients.items():
                assert gradient.shape == expected[parameter].shape
                assert relative(gradient, expected[parameter]) < TOLERANCE, (name, parameter)


def relative(got: Any, expected: Any) -> float:
    got, expected = torch.from_numpy(got), torch.from_numpy(expected)
    return float((got - expected).norm() / expected.norm())


def test_dropout_drops(alone: dict[str, Any]) -> None:
    assert alone["gpt_dropout"][0] != alone["gpt"][0]


def fp8_losses(
    rank: int, world: int, sequence_parallel: bool, kv_heads: int, share: bool
) -> tuple[list[float], list[float]]:
    """Losses of three FP8 forward and backward passes, scales updated between them, and the last scales."""
    torch.set_num_threads(1)
    mesh = build_mesh(ParallelConfig(tp=world, sequence_parallel=sequence_parallel), world, kv_heads=kv_heads)
    sizes = {"ffn_hidden_size": 64, "hidden_size": 64, "head_dim": 16, "num_kv_heads": kv_heads}
    precision = PrecisionConfig(recipe="delayed", emulation="exact")
    model = build(ModelConfig(**(MODELS["llama"] | sizes)), mesh=mesh, precision=precision, dtype=torch.float32)
    tokens, targets = batch()
    losses = []
    for _ in range(3):
        loss, count = model(tokens, targets)
        loss.backward()
        update_states(model.fp8_states.values(), mesh.group("tp") if share else None)
        losses.append(float(loss.detach() / count))
        for state in model.fp8_states.values():
            state.drop_weight_cache()
    return losses, [float(role.tensors["scale"]) for s in model.fp8_states.values() for role in s.roles.values()]


@pytest.mark.parametrize("tp, sequence_parallel, kv_heads", [(2, True, 4), (2, False, 4), (4, True, 1)])
def test_fp8_scales_are_shared(tp: int, sequence_parallel: bool, kv_heads: int) -> None:
    """Quantization is elementwise and amaxes are shared, so FP8 on several ranks is FP8 on one.

    In fp32 the ranks' partial sums differ by 2^-24; that moves an activation over a rounding boundary of E4M3 (2^-4
    apart) once in 10^6 elements, of which there are 10^5 here. One such flip moves one of 10^3 inputs of a loss of
    6.7 by 6 %: 1e-3 leaves room for it. Scales that are not shared move all of them.
    """
    ((alone, _),) = run_ranks(fp8_losses, 1, False, kv_heads, True)
    split = run_ranks(fp8_losses, tp, sequence_parallel, kv_heads, True)
    assert all(result == split[0] for result in split)  # losses and scales, to the bit
    assert split[0][0] == pytest.approx(alone, abs=1e-3)
    if tp == 2:
        apart = run_ranks(fp8_losses, tp, sequence_parallel, kv_heads, False)
        assert apart[0][0] != pytest.approx(alone, abs=1e-3)
        assert apart[0][1] != apart[1][1]
