"""Context parallelism by every exchange gives what one process gives: loss, logits and every gradient; and the ring's
messages are under way while it computes, with the same work on every rank.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megafp8.core.layout import layout_of
from megafp8.core.rng import fill_normal_, seed_for
from megafp8.models import ModelConfig, build
from megafp8.nn import attention_blocks, attention_context
from megafp8.nn.layers import DropoutKey
from megafp8.nn.recompute import MODULES, Recompute, RecomputePlan
from megafp8.parallel.collectives import all_gather, all_reduce_
from megafp8.parallel.context import chunks_of, ring_step
from megafp8.parallel.mesh import Mesh, build_mesh
from megafp8.parallel.mesh_config import ParallelConfig
from tests.distributed.ranks import run_ranks

Values = dict[str, Any]
LENGTH = 32
SMALL: Values = {
    "num_layers": 2, "hidden_size": 32, "ffn_hidden_size": 48, "num_attention_heads": 8, "num_kv_heads": 4,
    "vocab_size": 64, "max_sequence_length": LENGTH, "init_std": 0.3,
}  # fmt: skip
LATENT: Values = {
    "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6,
}  # fmt: skip
CONFIGS: dict[str, Values] = {
    "packed": {"family": "llama", **SMALL},
    "whole": {"family": "llama", "tied_embeddings": True, **SMALL, "num_kv_heads": 1},
    "qwen3": {"family": "qwen3", "head_dim": 8, **SMALL},
    "latent": {"family": "llama", **SMALL, "num_kv_heads": 8, "mla": LATENT},
    "gpt": {"family": "gpt", **SMALL, "num_kv_heads": 8},
    "dropout": {"family": "gpt", "hidden_dropout": 0.2, "attention_dropout": 0.2, **SMALL, "num_kv_heads": 4},
    "packed_dropout": {"family": "llama", "attention_dropout": 0.2, **SMALL},
}
EXCHANGES = ("ring", "all_gather", "all_to_all")

# fp64 sums of a few thousand terms in another order: 1e3 * 2^-53 = 1e-13 relative to the largest terms; the norm
# of a gradient can lie 10^2 below those by cancellation. A wrong or missing exchange shows at 1e-1.
TOLERANCE = 1e-10


def batch(size: int) -> dict[str, torch.Tensor]:
    """Packed documents of odd lengths: some within a chunk, some over several ranks, one of a single token."""
    tokens = torch.randint(0, 64, (size, LENGTH), generator=torch.Generator().manual_seed(5))
    targets = tokens.roll(-1, 1)
    targets[:, -1] = -100
    targets[0, 3:6] = -100
    borders = torch.tensor([[7, 8, 21], [3, 17, 30], [0, 0, 0]])[:size]
    segments = (torch.arange(LENGTH)[None, :, None] >= borders[:, None]).sum(-1)
    starts = torch.stack([(row[:, None] == row).float().argmax(-1) for row in segments])
    return {"tokens": tokens, "targets": targets, "segment_ids": segments, "positions": torch.arange(LENGTH) - starts}


def disturb(model: torch.nn.Module, mesh: Mesh) -> None:
    """Norm weights and biases off their initial 1 and 0, by global name, so that a mix-up of elements shows."""
    for name, param in model.named_parameters():
        if param.dim() == 1:
            mean = 1.0 if "norm.weight" in name else 0.0
            fill_normal_(param.data, seed=seed_for(7, name), layout=layout_of(param), mesh=mesh, std=0.3, mean=mean)


def whole(gradient: torch.Tensor, layout: Any, mesh: Mesh) -> torch.Tensor:
    gradient = all_reduce_(gradient.clone(), mesh.group_of(("cp", *layout.grad_sum)))
    for dim, axis in layout.split.items():
        gradient = all_gather(gradient, mesh.group(axis), dim)
    return gradient


def outcome(
    rank: int,
    world: int,
    sizes: dict[str, int],
    exchanges: tuple[str, ...],
    recompute: Recompute,
    micro: int,
    dtype: torch.dtype,
) -> dict[str, dict[str, Any]]:
    """Loss, targets, logits and whole gradients of every model, by exchange."""
    results: dict[str, dict[str, Any]] = {}
    for exchange in exchanges:
        results[exchange] = {}
        meshes: dict[int, Mesh] = {}
        for name, values in CONFIGS.items():
            config = ModelConfig(**values)
            shared = min(config.num_kv_heads, sizes.get("tp", 1))
            if shared not in meshes:
                parallel = ParallelConfig(**sizes, cp_exchange=exchange)
                meshes[shared] = build_mesh(parallel, world, kv_heads=config.num_kv_heads)
            mesh = meshes[shared]
            model = build(config, mesh=mesh, dtype=dtype, recompute=recompute)
            disturb(model, mesh)
            results[exchange][name] = run(model, mesh, name, micro)
    return results


def run(model: Any, mesh: Mesh, name: str, micro: int) -> tuple[float, int, Any, dict[str, Any]]:
    inputs = batch(micro)
    if "packed" not in name:
        del inputs["segment_ids"], inputs["positions"]
    key = DropoutKey(11, torch.tensor([3, 8, 5])[:micro]) if model.has_dropout else None
    loss, count = model(**inputs, loss_scale=0.5, dropout=key)
    (loss * 0.5).backward()
    total = all_reduce_(loss.detach().clone(), mesh.group("cp"))
    count = all_reduce_(count.clone(), mesh.group("cp"))
    with torch.no_grad():
        logits = model(inputs["tokens"])
    gradients = {n: whole(p.grad, layout_of(p), mesh).numpy() for n, p in model.named_parameters()}
    return total.item(), int(count), logits.numpy(), gradients


@pytest.fixture(scope="module")
def alone() -> dict[int, dict[str, Any]]:
    """One process, for micro-batches of 1 and 3."""
    return {micro: outcome(0, 1, {}, ("ring",), "none", micro, torch.float64)["ring"] for micro in (1, 3)}


@pytest.mark.parametrize("cp, tp, recompute, micro", [
    (2, 1, "none", 3), (4, 1, RecomputePlan("selective", modules=MODULES), 1), (2, 2, "full", 3),
])  # fmt: skip
def test_equals_one_process(
    alone: dict[int, dict[str, Any]], cp: int, tp: int, recompute: Recompute, micro: int
) -> None:
    for results in run_ranks(outcome, cp * tp, {"cp": cp, "tp": tp}, EXCHANGES, recompute, micro, torch.float64):
        for exchange, by_model in results.items():
            for name, result in by_model.items():
                assert_equal(result, alone[micro][name], TOLERANCE, f"{exchange} {name}")


def assert_equal(result: tuple[Any, ...], expected: tuple[Any, ...], tolerance: float, where: str) -> None:
    loss, count, logits, gradients = result
    assert count == expected[1], where
    assert loss == pytest.approx(expected[0], rel=tolerance), where
    assert relative(logits, expected[2]) < tolerance, where
    assert gradients.keys() == expected[3].keys()
    for parameter, gradient in gradients.items():
        assert gradient.shape == expected[3][parameter].shape
        assert relative(gradient, expected[3][parameter]) < tolerance, (where, parameter)


def relative(got: Any, expected: Any) -> float:
    got, expected = torch.from_numpy(got).double(), torch.from_numpy(expected).double()
    return float((got - expected).norm() / expected.norm())


def narrow(rank: int, world: int, sizes: dict[str, int], recompute: str) -> dict[str, Any]:
    """In fp32 with dropout: losses, and whether a second run has the same bits."""
    results = {}
    for exchange in EXCHANGES:
        mesh = build_mesh(ParallelConfig(**sizes, cp_exchange=exchange), world)
        model = build(ModelConfig(**CONFIGS["dropout"]), mesh=mesh, dtype=torch.float32, recompute=recompute)
        before = torch.get_rng_state()
        loss, _, _, gradients = run(model, mesh, "dropout", 3)
        assert torch.equal(before, torch.get_rng_state()), "a mask was drawn from the process's generator"
        model.zero_grad()
        again, _, _, repeated = run(model, mesh, "dropout", 3)
        same = loss == again and all((gradients[name] == repeated[name]).all() for name in gradients)
        results[exchange] = (loss, same)
    return results


@pytest.mark.parametrize(("sizes", "recompute"), [
    ({"cp": 2}, "none"), ({"cp": 2, "tp": 2, "sequence_parallel": False}, "full"),
])  # fmt: skip
def test_masks_are_those_of_one_process(sizes: dict[str, int], recompute: str) -> None:
    """The same weights and elements fall, so the loss is that of one process up to fp32 rounding; bits repeat."""
    expected = narrow(0, 1, {}, "none")["ring"][0]
    without = outcome(0, 1, {}, ("ring",), "none", 3, torch.float32)["ring"]["gpt"][0]
    for results in run_ranks(narrow, sizes["cp"] * sizes.get("tp", 1), sizes, recompute):
        for exchange, (loss, same) in results.items():
            # 90 losses of 4 in another order, each of sums of 100 terms: 100 * 2^-24 = 6e-6; another mask moves 1e-2
            assert loss == pytest.approx(expected, rel=6e-6), exchange
            assert loss != pytest.approx(without, rel=1e-3)
            assert same, f"{exchange}: two runs differ"


def second_document(rank: int, world: int) -> bool:
    """Whether logits of the second document change by a bit when the first does, by any exchange and dtype."""
    inputs = batch(1)
    other = inputs["tokens"].clone()
    other[0, :8] = 63 - other[0, :8]
    packed = {name: inputs[name] for name in ("segment_ids", "positions")}
    equal = True
    for exchange in EXCHANGES:
        mesh = build_mesh(ParallelConfig(cp=world, cp_exchange=exchange), world)
        for dtype in (torch.float64, torch.float32, torch.bfloat16):
            model = build(ModelConfig(**CONFIGS["packed"]), mesh=mesh, dtype=dtype)
            with torch.no_grad():
                first, second = (model(tokens, **packed) for tokens in (inputs["tokens"], other))
            assert not torch.equal(first[0, :8], second[0, :8])
            equal &= torch.equal(first[0, 8:], second[0, 8:])
    return equal


def test_documents_do_not_see_each_other_over_ranks() -> None:
    assert run_ranks(second_document, 2) == [True, True]


def kept(rank: int, world: int) -> dict[str, int]:
    """Bytes that the core keeps for backward, each tensor once."""
    results = {}
    for exchange in ("ring", "all_gather"):
        mesh = build_mesh(ParallelConfig(cp=world, cp_exchange=exchange), world)
        tensors: dict[int, int] = {}

        def pack(x: torch.Tensor, seen: dict[int, int] = tensors) -> torch.Tensor:
            seen[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        q = torch.randn(2, 2, 8, 3, 8).bfloat16().requires_grad_()
        k, v = (torch.randn(2, 2, 8, width).bfloat16().requires_grad_() for width in (8, 6))
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            out = attention_context.attend(q, k, v, attention_context.Call(mesh, attention_blocks, None, None))
        results[exchange] = sum(tensors.values()) - out.numel() * 2
        assert out.untyped_storage().data_ptr() in tensors, "the output is kept twice: here and as a linear's input"
    return results


def test_kept_for_backward() -> None:
    """Own q, k, v and a log-sum-exp in fp32; the output is the next linear's input."""
    groups, r, tokens = 2 * 2, 3, 8
    expected = groups * tokens * (r * 8 + 8 + 6) * 2 + groups * tokens * r * 4
    assert run_ranks(kept, 2) == [{"ring": expected, "all_gather": expected}] * 2


def recorded(rank: int, world: int) -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
    """What happens in forward and in backward of one ring: messages started and received, blocks and their work."""
    log: list[tuple[str, int]] = []

    class Shift:
        def __init__(self, *args: Any) -> None:
            self.tag, self.real = args[2], real_shift(*args)
            log.append(("start", self.tag))

        def wait(self) -> torch.Tensor:
            log.append(("received", self.tag))
            received: torch.Tensor = self.real.wait()
            return received

    class Kernel:
        @staticmethod
        def work(q: torch.Tensor, k: torch.Tensor, causal: bool) -> int:
            rows, keys = q.shape[2], k.shape[2]
            return rows * (rows + 1) // 2 if causal else rows * keys

        def forward(self, q: Any, k: Any, v: Any, sight: Any) -> Any:
            log.append(("block", self.work(q, k, sight.causal)))
            return attention_blocks.forward(q, k, v, sight)

        def backward(self, dout: Any, q: Any, k: Any, *args: Any) -> Any:
            log.append(("block", self.work(q, k, args[-1].causal)))
            return attention_blocks.backward(dout, q, k, *args)

    real_shift, attention_context.start_shift = attention_context.start_shift, Shift  # type: ignore[assignment, misc]
    mesh = build_mesh(ParallelConfig(cp=world), world)
    q, k = torch.randn(1, 1, 8, 1, 4, requires_grad=True), torch.randn(1, 1, 8, 4)
    out = attention_context.attend(q, k, k, attention_context.Call(mesh, Kernel(), None, None))
    forward = list(log)
    log.clear()
    out.sum().backward()
    return forward, list(log)


def test_messages_are_under_way_while_the_ring_computes() -> None:
    """Every block but the last is computed between start and receipt of the next keys; work is equal everywhere."""
    results = run_ranks(recorded, 4)
    chunk = 4  # 8 tokens a rank
    for forward, backward in results:
        blocks = [work for what, work in forward if what == "block"]
        own = 2 * chunk * (2 * chunk + 1) // 2
        assert blocks == [own] + 3 * [2 * chunk * chunk]  # two chunk pairs a step, on every rank
        keys, gradients = 1, 2
        step = [("start", keys), ("block",), ("received", keys)]
        assert [(w, n) if w != "block" else (w,) for w, n in forward] == step * 3 + [("block",)]
        simple = [(w, n) if w != "block" else (w,) for w, n in backward]
        # the gradient of the keys of a step travels while the next step is computed
        first = [("start", keys), ("block",), ("start", gradients), ("received", keys)]
        later = [("start", keys), ("block",), ("received", gradients), ("start", gradients), ("received", keys)]
        last = [("block",), ("received", gradients), ("start", gradients), ("received", gradients)]
        assert simple == first + later * 2 + last
        assert [work for what, work in backward if what == "block"] == blocks


@pytest.mark.parametrize("cp", [2, 3, 4, 8])
def test_ring_steps_cover_the_causal_half_once(cp: int) -> None:
    seen = torch.zeros(2 * cp, 2 * cp)  # chunk pairs, half a pair on the diagonal
    for rank in range(cp):
        for step in range(cp):
            now = ring_step(cp, rank, step)
            mine, theirs = chunks_of(cp, rank), chunks_of(cp, now.source)
            work = 0.0
            for query in mine[1:] if now.tail else mine:
                for key in theirs[:1] if now.head else theirs:
                    if now.causal and key > query:
                        continue
                    share = 0.5 if now.causal and key == query else 1.0
                    seen[query, key] += share
                    work += share
            assert work == 2
    expected = torch.ones(2 * cp, 2 * cp).tril()
    assert torch.equal(seen, expected - 0.5 * torch.eye(2 * cp))
