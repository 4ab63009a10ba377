"""A linear over tp: what is hidden behind which GEMM, what is kept, what goes over the wire, and FP8 with one scale."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megafp8.core.layout import layout_of
from megafp8.fp8 import LinearState, QuantizedTensor, backend, recipe, update_states
from megafp8.nn import gemm
from megafp8.nn import loss as loss_module
from megafp8.nn.deferred import WeightGrads, deferring
from megafp8.nn.kernels import Kernels
from megafp8.nn.linear import ColumnLinear, RowLinear
from megafp8.nn.loss import Output
from megafp8.nn.precision import PrecisionConfig
from megafp8.parallel.collectives import all_gather
from megafp8.parallel.mesh import Mesh, build_mesh
from megafp8.parallel.mesh_config import ParallelConfig
from tests.distributed.ranks import run_ranks

S, B, H, N = 8, 2, 32, 64
COMMUNICATION = {"start_all_gather": "gather", "start_reduce_scatter": "scatter", "start_all_reduce": "reduce"}


def values(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def fill(layer: torch.nn.Module, mesh: Mesh) -> None:
    """Weights of global values; in FP8 the largest magnitude of every shard is the same, so shards scale alike."""
    for number, (name, param) in enumerate(layer.named_parameters()):
        layout = layout_of(param)
        whole = values(layout.shape, number).clamp(-2, 2)
        if whole.dim() > 1:
            whole[:: whole.shape[0] // 4, :: whole.shape[1] // 4] = 2.5
        memory = torch.nn.Parameter(whole[layout.local_slices(mesh)].to(param.dtype))
        memory.shard_layout = layout  # type: ignore[attr-defined]
        layer._parameters[name] = memory


def made(kind: type, mesh: Mesh, state: LinearState | None = None, dtype: torch.dtype = torch.float64) -> Any:
    sizes: tuple[Any, Any] = (H, (N,)) if kind is ColumnLinear else (N, H)
    layer = kind(*sizes, bias=True, std=1.0, state=state, mesh=mesh, dtype=dtype)
    fill(layer, mesh)
    return layer


def my_part(kind: type, which: str, whole: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    """This rank's part of a linear's input or output: its columns, or its rows under sequence parallelism."""
    by_columns = (kind is ColumnLinear) == (which == "output")
    if not by_columns and not mesh.sequence_parallel:
        return whole
    return whole.chunk(mesh.size("tp"), -1 if by_columns else 0)[mesh.coord("tp")]


def watch(log: list[str], wire: list[torch.Tensor]) -> None:
    """Log when communication starts and when it is waited for, and the GEMMs of the backward pass."""

    def logged(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def start(tensor: torch.Tensor, *args: Any) -> Any:
            log.append(name)
            wire.append(tensor)
            return function(tensor, *args).then(lambda result: log.append(f"wait {name}") or result)

        return start

    def logged_gemm(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def multiply(*args: Any) -> Any:
            log.append(name)
            return function(*args)

        return multiply

    for function, name in COMMUNICATION.items():
        setattr(gemm, function, logged(name, getattr(gemm, function)))
    for name in ("dgrad", "wgrad"):
        setattr(gemm, name, logged_gemm(name, getattr(gemm, name)))


def orders(rank: int, world: int, sequence_parallel: bool) -> dict[str, list[str]]:
    mesh = build_mesh(ParallelConfig(tp=world, sequence_parallel=sequence_parallel), world)
    log: list[str] = []
    watch(log, [])
    result = {}
    for kind, inputs, outputs in ((ColumnLinear, H, N), (RowLinear, N, H)):
        layer = made(kind, mesh)
        x = my_part(kind, "input", values((S, B, inputs), 5), mesh).contiguous().requires_grad_()
        y = layer(x)
        log.clear()
        y.backward(my_part(kind, "output", values((S, B, outputs), 6), mesh))
        result[kind.__name__] = list(log)
        whole = [x.grad, *(p.grad for p in layer.parameters())]
        x.grad, layer.weight.grad, layer.bias.grad = None, None, None
        store = WeightGrads()
        y = layer(x)
        log.clear()
        with deferring(store):
            y.backward(my_part(kind, "output", values((S, B, outputs), 6), mesh))
        result[f"{kind.__name__} I"] = list(log)
        log.clear()
        assert layer.weight.grad is None
        store.run()
        result[f"{kind.__name__} W"] = list(log)
        assert all(torch.equal(a, p) for a, p in zip(whole, [x.grad, layer.weight.grad, layer.bias.grad], strict=True))
    return result




def test_communication_starts_before_the_gemm_that_hides_it() -> None:
    with_sp, without = run_ranks(orders, 2, True)[0], run_ranks(orders, 2, False)[0]
    assert with_sp["ColumnLinear"] == [
        "gather", "dgrad", "scatter", "wait gather", "wgrad", "wait scatter",
    ]  # fmt: skip
    assert without["ColumnLinear"] == ["dgrad", "reduce", "wgrad", "wait reduce"]
    assert with_sp["RowLinear"] == ["dgrad", "wgrad"]  # its gradient was gathered before, for both
    assert without["RowLinear"] == ["dgrad", "wgrad"]
    assert with_sp["ColumnLinear I"] == ["dgrad", "scatter", "wait scatter"]
    assert with_sp["ColumnLinear W"] == ["gather", "wait gather", "wgrad"]
    assert without["ColumnLinear I"] == ["dgrad", "reduce", "wait reduce"]
    assert without["ColumnLinear W"] == with_sp["RowLinear W"] == ["wgrad"]


def kept_bytes(rank: int, world: int, name: str) -> int:
    """Bytes that a column linear keeps for backward besides its parameters."""
    mesh = build_mesh(ParallelConfig(tp=world), world) if world > 1 else Mesh.single()
    state = None if name == "none" else LinearState("x", recipe(name), backend("native"))
    layer = made(ColumnLinear, mesh, state, torch.bfloat16)
    x = my_part(ColumnLinear, "input", values((S, B, H), 5).bfloat16(), mesh).contiguous().requires_grad_()
    seen: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.data_ptr() != layer.weight.data_ptr() and tensor.numel() > 1:
            seen[tensor.data_ptr()] = tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        layer(x)
    return sum(seen.values())


@pytest.mark.parametrize("name, size", [("none", 2), ("delayed", 1), ("current", 1)])
def test_a_shard_of_the_input_is_kept(name: str, size: int) -> None:
    assert kept_bytes(0, 1, name) == S * B * H * size
    assert run_ranks(kept_bytes, 2, name) == [S * B * H * size // 2] * 2


def quantized(rank: int, world: int, name: str, emulation: str, options: dict[str, Any]) -> dict[str, Any]:
    """Two micro-batches through both linears in FP8; the scales in use, what went over the wire, and the results."""
    mesh = build_mesh(ParallelConfig(tp=world), world) if world > 1 else Mesh.single()
    dtype = torch.float32 if emulation == "exact" else torch.bfloat16
    log: list[str] = []
    wire: list[torch.Tensor] = []
    scales: dict[str, float] = {}
    result: dict[str, Any] = {}
    watch(log, wire)
    for kind, inputs, outputs in ((ColumnLinear, H, N), (RowLinear, N, H)):
        state = LinearState("x", recipe(name, **options), backend("emulated", emulation, compiled=False))

        def observe(role: str, x: torch.Tensor, codes: QuantizedTensor, amax: torch.Tensor) -> None:
            scales[role] = float(codes.scale_inv)

        state.observer = observe
        layer = made(kind, mesh, state, dtype)
        for micro_batch in range(2):
            # where columns are split each part has the same largest magnitude, where rows are split none has
            whole, grad = values((S, B, inputs), 5 + micro_batch), values((S, B, outputs), 8 + micro_batch)
            by_columns, by_rows = (grad, whole) if kind is ColumnLinear else (whole, grad)
            by_columns.clamp_(-3, 3)[:, :, :: by_columns.shape[-1] // 2] = 4.0
            by_rows *= torch.linspace(1, 3, S)[:, None, None]
            x = my_part(kind, "input", whole.to(dtype), mesh).contiguous().requires_grad_()
            wire.clear()
            y = layer(x)
            y.backward(my_part(kind, "output", grad.to(dtype), mesh))
            update_states([state], mesh.group("tp"))
            state.drop_weight_cache()
        result[kind.__name__] = {
            "scales": dict(scales),
            "wire": [(str(t.dtype), t.numel()) for t in wire],
            "y": joined(y.detach(), (kind is ColumnLinear, kind is RowLinear), mesh).numpy(),
            "dx": joined(x.grad, (kind is RowLinear, kind is ColumnLinear), mesh).numpy(),
            "dw": joined(layer.weight.grad, (kind is RowLinear, kind is ColumnLinear), mesh).numpy(),
        }
    return result


def joined(part: torch.Tensor, split: tuple[bool, bool], mesh: Mesh) -> torch.Tensor:
    """Whole from parts that are split along the last dim, or along the first."""
    return all_gather(part.float(), mesh.group("tp"), -1 if split[0] else 0)


@pytest.mark.parametrize("name", ["delayed", "current"])
def test_fp8_over_ranks_is_fp8_of_the_whole(name: str) -> None:
    """One scale on all ranks of a tensor that they share, hence the codes of one process.

    What differs is the order in which fp32 sums of at most 128 products are taken: 128 * 2^-24 = 8e-6 of the
    largest term; a scale of a rank's own would change codes, by 2^-4 each.
    """
    (alone,), split = run_ranks(quantized, 1, name, "exact", {}), run_ranks(quantized, 2, name, "exact", {})
    for kind, expected in alone.items():
        for of_rank in split:
            assert of_rank[kind]["scales"] == expected["scales"], kind
            for tensor in ("y", "dx", "dw"):
                got, want = (torch.from_numpy(r[tensor]) for r in (of_rank[kind], expected))
                assert (got - want).abs().max() < 1e-5 * want.abs().max(), (kind, tensor)


@pytest.mark.parametrize("name, emulation", [("delayed", "fast"), ("current", "fast"), ("current", "exact")])
def test_one_byte_an_element_is_gathered(name: str, emulation: str) -> None:
    for result in run_ranks(quantized, 2, name, emulation, {}):
        # a column's shard of x forward and backward, then its dx in the compute dtype; a row's shard of the gradient
        dtype = "torch.bfloat16" if emulation == "fast" else "torch.float32"
        shard, dx = ("torch.uint8", S // 2 * B * H), (dtype, S * B * H)
        assert result["ColumnLinear"]["wire"] == [shard, shard, dx]
        assert result["RowLinear"]["wire"] == [shard]


def test_scales_of_a_rank_alone_gather_the_compute_dtype() -> None:
    """reduce_amax = false: no rank knows the others' scales, so what is gathered is quantized after."""
    for result in run_ranks(quantized, 2, "delayed", "fast", {"reduce_amax": False}):
        assert all(dtype != "torch.uint8" for kind in result.values() for dtype, _ in kind["wire"])


def shared_scale(rank: int, world: int, amax_group: str) -> float:
    """The scale after a micro-batch whose largest magnitude is 1 + rank."""
    precision = PrecisionConfig(recipe="delayed", amax_group=amax_group)
    mesh = build_mesh(ParallelConfig(dp=2, tp=2), world)
    state = LinearState("x", recipe("delayed"), backend("native"))
    state.quantize("input", torch.full((1, 16), 1.0 + rank), record=True)
    update_states([state], mesh.group_of(precision.amax_axes))
    return float(state.roles["input"].scale)


def test_amaxes_are_joined_over_the_ranks_asked_for() -> None:
    assert run_ranks(shared_scale, 4, "all") == [448 / 4] * 4
    assert run_ranks(shared_scale, 4, "tp") == [448 / 2] * 2 + [448 / 4] * 2  # each replica has its own


class _CountGemms(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func._overloadpacket is torch.ops.aten.mm
        return func(*args, **(kwargs or {}))


def loss_traffic(rank: int, world: int, sequence_parallel: bool) -> tuple[list[Any], int]:
    """What the loss sends in a forward pass, each with the number of GEMMs before it, and how many GEMMs there are."""
    mesh = build_mesh(ParallelConfig(tp=world, sequence_parallel=sequence_parallel), world)
    layer = Output(40, H, tied=None, std=0.5, mesh=mesh, dtype=torch.float32, kernels=Kernels(compiled=False))
    fill(layer, mesh)
    loss_module.CHUNK_ELEMENTS["cpu"] = 20 * 8  # chunks of 8 tokens
    sent: list[Any] = []
    gemms = _CountGemms()

    def logged(name: str, function: Callable[..., Any], tensor: torch.Tensor, *args: Any) -> Any:
        sent.append((name, tuple(tensor.shape), gemms.count))
        return function(tensor, *args)

    for name in ("all_gather", "all_reduce_", "start_sum"):
        setattr(loss_module, name, partial(logged, name, getattr(loss_module, name)))
    x = my_part(ColumnLinear, "input", values((S, B, H), 5).float(), mesh).requires_grad_()
    with gemms:
        layer.loss(x, torch.zeros(B, S, dtype=torch.int64), 1.0)
    return sent, gemms.count


def test_logits_are_never_gathered_and_the_sum_starts_before_the_last_gemm() -> None:
    """Two chunks of three GEMMs: logits, gradient of the input, gradient of the weight."""
    for sequence_parallel in (True, False):
        sent, gemms = run_ranks(loss_traffic, 2, sequence_parallel)[0]
        assert gemms == 6
        gathered = [("all_gather", (S * B // 2, H), 0)] if sequence_parallel else []
        joined_numbers = [[("all_reduce_", (8, 1), n), ("all_reduce_", (8, 2), n)] for n in (1, 4)]
        assert sent == [*gathered, *joined_numbers[0], *joined_numbers[1], ("start_sum", (S * B, H), 5)]
