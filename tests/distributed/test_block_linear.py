"""Recipes with scales of blocks over tp and sequence parallelism: the codes of one process, and codes on the wire."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megafp8.core.layout import layout_of
from megafp8.fp8 import LinearState, backend, recipe
from megafp8.fp8.blocks import HADAMARD_SIGNS
from megafp8.nn import gemm
from megafp8.nn.linear import ColumnLinear, RowLinear
from megafp8.parallel.collectives import all_gather
from megafp8.parallel.mesh import Mesh, build_mesh
from megafp8.parallel.mesh_config import ParallelConfig
from tests.distributed.ranks import run_ranks

B, H, N = 1, 256, 512  # both split over two ranks into whole blocks of 128
OPTIONS: dict[str, dict[str, Any]] = {
    "blockwise": {},
    "mxfp8": {},
    "nvfp4": {"disable_stochastic_rounding": True},  # ranks draw noise of their own
}


def values(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def made(kind: type, mesh: Mesh, state: LinearState, dtype: torch.dtype) -> Any:
    sizes: tuple[Any, Any] = (H, (N,)) if kind is ColumnLinear else (N, H)
    layer = kind(*sizes, bias=False, std=1.0, state=state, mesh=mesh, dtype=dtype)
    layout = layout_of(layer.weight)
    whole = values(layout.shape, 0)
    whole[::128, ::128] = 5.0  # NVFP4's amax of a weight is this rank's: let it be one on all
    layer.weight = torch.nn.Parameter(whole[layout.local_slices(mesh)].to(dtype))
    layer.weight.shard_layout = layout
    return layer


def both_linears(rank: int, world: int, name: str, mode: str, tokens: int) -> dict[str, Any]:
    """A pass through a column and a row linear of `tokens` tokens; the whole results, and what was gathered."""
    mesh = build_mesh(ParallelConfig(tp=world), world) if world > 1 else Mesh.single()
    dtype = torch.float32 if mode == "exact" else torch.bfloat16
    wire: list[tuple[str, int]] = []
    gather = gemm.start_all_gather

    def watched(tensor: torch.Tensor, group: Any, dim: int = 0) -> Any:
        wire.append((str(tensor.dtype).removeprefix("torch."), tensor.nbytes))
        return gather(tensor, group, dim)

    gemm.start_all_gather, gemm.all_gather = watched, lambda tensor, group: watched(tensor, group).wait()
    result: dict[str, Any] = {}
    for kind, inputs, outputs in ((ColumnLinear, H, N), (RowLinear, N, H)):
        state = LinearState("x", recipe(name, **OPTIONS[name]), backend("emulated", mode, compiled=False))
        layer = made(kind, mesh, state, dtype)
        x, grad = values((tokens, B, inputs), 5), values((tokens, B, outputs), 6) * 1e-3
        by_columns = grad if kind is ColumnLinear else x
        # as above for what tp splits by columns, before and after the transform (which sums up these 16 rows)
        signs = torch.tensor(HADAMARD_SIGNS, dtype=torch.float32).view(16, 1, 1)
        by_columns[:16, :, ::128] = signs * (6e-3 if by_columns is grad else 6.0)
        mine = [part(t.to(dtype), split, mesh) for t, split in ((x, kind is RowLinear), (grad, kind is ColumnLinear))]
        mine[0].requires_grad_()
        wire.clear()
        y = layer(mine[0])
        y.backward(mine[1])
        result[kind.__name__] = {
            "wire": list(wire),
            "y": whole(y.detach(), kind is ColumnLinear, mesh),
            "dx": whole(mine[0].grad, kind is RowLinear, mesh),
            "dw": all_gather(layer.weight.grad.float(), mesh.group("tp"), 0 if kind is ColumnLinear else 1).numpy(),
        }
    return result


def part(tensor: torch.Tensor, columns: bool, mesh: Mesh) -> torch.Tensor:
    """This rank's columns, or its rows."""
    return tensor.chunk(mesh.size("tp"), -1 if columns else 0)[mesh.coord("tp")].contiguous()


def whole(tensor: torch.Tensor | None, columns: bool, mesh: Mesh) -> Any:
    assert tensor is not None
    return all_gather(tensor.float(), mesh.group("tp"), -1 if columns else 0).numpy()


@pytest.mark.parametrize("name", list(OPTIONS))
@pytest.mark.parametrize("tokens", [256, 160])
def test_two_ranks_quantize_as_one(name: str, tokens: int) -> None:
    """256 tokens: shards of whole blocks, so codes travel. 160: a shard of 80 ends inside a block of 128 or 32.

    In fp32 only the order of at most 512 products differs: 512 * 2^-24 of their sum of magnitudes, which is 20 times
    a typical result (sqrt(512)). A code that differed would show as 2^-4 of a term, 1e-3 of the largest result.
    """
    (alone,) = run_ranks(both_linears, 1, name, "exact", tokens)
    split = run_ranks(both_linears, 2, name, "exact", tokens)
    sizes = {"ColumnLinear": H, "RowLinear": H}  # what is gathered along S: a column's input, a row's gradient
    for kind, expected in alone.items():
        for of_rank in split:
            for tensor in ("y", "dx", "dw"):
                got, want = (torch.from_numpy(found[tensor]) for found in (of_rank[kind], expected))
                assert (got - want).abs().max() < 1e-4 * want.abs().max(), (kind, tensor)
            elements = tokens // 2 * B * sizes[kind]
            largest = max(size for _, size in of_rank[kind]["wire"])
            in_codes = tokens == 256 or name == "nvfp4"
            assert largest == (elements // (2 if name == "nvfp4" else 1) if in_codes else 4 * elements), kind


@pytest.mark.parametrize("name", list(OPTIONS))
def test_values_travel_as_well(name: str) -> None:
    """The fast mode keeps bf16 values in the place of codes: two bytes an element, the same numbers."""
    (alone,), split = run_ranks(both_linears, 1, name, "fast", 256), run_ranks(both_linears, 2, name, "fast", 256)
    for kind, expected in alone.items():
        for tensor in ("y", "dx", "dw"):
            got, want = (torch.from_numpy(found[tensor]) for found in (split[0][kind], expected))
            # each rank rounds its part of a sum to bf16 twice, then the sum: 3 * 2^-8 of up to twice the largest
            assert (got - want).abs().max() < 3e-2 * want.abs().max(), (kind, tensor)
