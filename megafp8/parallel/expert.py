"""Tokens to the ranks of their experts and back: who sends how many rows where, and the exchanges themselves.

Every rank of dp x cp x tp has tokens of its own. An assignment is a (token, choice) pair; its row goes to the rank
along ep that holds the chosen expert (all-to-all), and, where the expert's matrices are split, to all ranks along etp
(all-gather, summed on the way back). Rows travel sorted by expert, so that what arrives is a few contiguous runs.
Counts are exchanged once, forward; the backward pass uses them again.

Shapes: N tokens of this rank, K choices, E experts of which a rank holds E / ep, R rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from megafp8.parallel.collectives import all_gather, all_gather_uneven, all_to_all, reduce_scatter_uneven
from megafp8.parallel.mesh import Mesh

Tensor = torch.Tensor


@dataclass(frozen=True, eq=False)
class Dispatch:
    """How the rows of one micro-batch travel.

    Attributes:
        order: [R] int64, the assignment (token * K + choice) of each row that this rank sends, by expert.
        places: [N, K] int64, the row of each assignment; 0 where it is dropped.
        kept: [N, K] bool, which assignments travel; None: all.
        counts: [E / ep] int64, rows of each expert here, as `send` returns them.
        sent, received: rows to and from each rank along ep; empty at ep = 1.
        gathered: rows of each rank along etp; empty at etp = 1.
        regroup, ungroup: permutation of the rows that arrived into expert order, and its inverse; None: they are.
    """

    mesh: Mesh
    order: Tensor
    places: Tensor
    kept: Tensor | None
    counts: Tensor
    sent: tuple[int, ...] = ()
    received: tuple[int, ...] = ()
    gathered: tuple[int, ...] = ()
    regroup: Tensor | None = None
    ungroup: Tensor | None = None

    def there(self, rows: Tensor) -> Tensor:
        """Rows [R, H] of any dtype in `order` -> the rows for this rank's experts, grouped by expert; no gradient."""
        if self.sent:
            rows = all_to_all(rows, self.mesh.group("ep"), self.sent, self.received)
        if self.gathered:
            rows = all_gather_uneven(rows, self.mesh.group("etp"), self.gathered)
        return rows if self.regroup is None else rows.index_select(0, self.regroup)

    def back(self, rows: Tensor) -> Tensor:
        """Rows in the order of `there`'s -> [R, H] in `order`, summed over etp; no gradient."""
        if self.ungroup is not None:
            rows = rows.index_select(0, self.ungroup)
        if self.gathered:
            rows = reduce_scatter_uneven(rows, self.mesh.group("etp"), self.gathered)
        return all_to_all(rows, self.mesh.group("ep"), self.received, self.sent) if self.sent else rows

    def send(self, rows: Tensor) -> Tensor:
        """`there` with a gradient. Conjugate: `bring_back`."""
        return rows if self.is_local else _Send.apply(rows, self)

    def bring_back(self, rows: Tensor) -> Tensor:
        """`back` with a gradient. Conjugate: `send`."""
        return rows if self.is_local else _BringBack.apply(rows, self)

    @property
    def is_local(self) -> bool:
        """Whether every expert is whole on this rank, so that no row travels."""
        return not self.sent and not self.gathered


@torch.no_grad()
def plan_dispatch(experts: Tensor, kept: Tensor | None, num_experts: int, mesh: Mesh) -> Dispatch:
    """Plan how rows travel; collective over ep and etp (the counts), and one wait for the device where those are > 1.

    Args:
        experts: [N, K] int64, the choices of this rank's tokens, all different within a token.
        kept: [N, K] bool, which of them have room; None: all.
    """
    flat = experts.flatten()
    if kept is not None:
        flat = torch.where(kept.flatten(), flat, num_experts)  # sorted behind all experts, then cut off
    order = flat.sort(stable=True).indices
    counts = torch.bincount(flat, minlength=num_experts + 1)[:num_experts]
    if kept is not None:
        order = order[: int(counts.sum())]
    places = torch.zeros_like(flat)
    places[order] = torch.arange(len(order), device=flat.device)
    places = places.view(experts.shape)
    ep, etp = mesh.size("ep"), mesh.size("etp")
    if ep == etp == 1:
        return Dispatch(mesh, order, places, kept, counts)
    mine = num_experts // ep
    table = all_to_all(counts, mesh.group("ep"), [mine] * ep, [mine] * ep)  # [source rank along ep, my experts]
    tables = all_gather(table.view(1, ep, mine), mesh.group("etp"))
    sizes = torch.cat((counts.view(ep, mine).sum(1), table.view(ep, mine).sum(1), tables.sum((1, 2)))).tolist()
    regroup, ungroup = _grouping(tables.flatten(0, 1)) if mine > 1 else (None, None)
    return Dispatch(
        mesh,
        order,
        places,
        kept,
        tables.sum((0, 1)),
        sent=tuple(sizes[:ep]) if ep > 1 else (),
        received=tuple(sizes[ep : 2 * ep]) if ep > 1 else (),
        gathered=tuple(sizes[2 * ep :]) if etp > 1 else (),
        regroup=regroup,
        ungroup=ungroup,
    )


def _grouping(table: Tensor) -> tuple[Tensor, Tensor]:
    """The permutation from rows by (source, expert) to rows by (expert, source), and back.

    Args:
        table: [sources, experts] int64, rows of each.
    """
    lengths = table.T.flatten()
    starts = (table.flatten().cumsum(0) - table.flatten()).view(table.shape).T.flatten()
    shift = starts - (lengths.cumsum(0) - lengths)
    places = torch.arange(int(lengths.sum()), device=table.device)
    regroup = places + shift.repeat_interleave(lengths)
    ungroup = torch.empty_like(regroup)
    ungroup[regroup] = places
    return regroup, ungroup


class _Send(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dispatch: Dispatch) -> Tensor:
        ctx.dispatch = dispatch
        return dispatch.there(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return ctx.dispatch.back(grads[0]), None


class _BringBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dispatch: Dispatch) -> Tensor:
        ctx.dispatch = dispatch
        return dispatch.back(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return ctx.dispatch.there(grads[0]), None
