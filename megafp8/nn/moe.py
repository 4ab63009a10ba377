"""Mixture of experts: route, send to the ranks of the experts, their two GEMMs, bring back, add up.

Every tp rank has tokens of its own: its shard under sequence parallelism, else a share that it takes here and joins
afterwards. Nothing is dropped but what is over an expert's capacity, where there is one.

Shapes: [S or S/tp, B, H] in and out; N tokens of a rank, R rows of its experts.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from megafp8.core.layout import Layout
from megafp8.fp8.linear import LinearState
from megafp8.fp8.quantized import QuantizedTensor
from megafp8.nn.context import Context
from megafp8.nn.grouped import grouped_linear
from megafp8.nn.kernels import Kernels
from megafp8.nn.mlp import SwiGLU, activation
from megafp8.nn.parameter import Init, declare
from megafp8.nn.permute import combine, send_codes, spread
from megafp8.nn.recompute import Rebuild
from megafp8.nn.router import Router
from megafp8.nn.smooth import channel_scales, smooth
from megafp8.parallel.collectives import join_from, split_to
from megafp8.parallel.expert import Dispatch, plan_dispatch
from megafp8.parallel.mesh import Mesh

Tensor = torch.Tensor


class Experts(nn.Module):
    """Gated MLPs side by side; parameters: gate_up [E, 2, F, H] (gate first) and down [E, H, F].

    A rank has E / ep of them, and F / etp of each: results are then partial sums. `states` put gate_up
    and down into FP8. `smooth`: as of SwiGLU, each expert's channels for themselves.
    """

    recompute: frozenset[str] = frozenset()  # "activation": its output is made again in backward, see nn/recompute
    watch: Callable[[Tensor], None] | None = None  # is shown the input of `down`, for calibration

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        ffn_hidden_size: int,
        *,
        std: float,
        down_std: float,
        mesh: Mesh,
        dtype: torch.dtype,
        kernels: Kernels,
        states: tuple[LinearState | None, LinearState | None] = (None, None),
        smooth: bool = False,
    ) -> None:
        super().__init__()
        split = {0: "ep", 2: "etp"}
        gate_up = Layout((num_experts, 2, ffn_hidden_size, hidden_size), split)
        self.gate_up = declare(gate_up, Init(std), mesh=mesh, dtype=dtype)
        down = Layout((num_experts, hidden_size, ffn_hidden_size), split)
        self.down = declare(down, Init(down_std), mesh=mesh, dtype=dtype)
        self.mesh, self.kernels, self.states, self.smooth = mesh, kernels, states, smooth

    def send(self, tokens: Tensor, dispatch: Dispatch) -> tuple[Tensor, QuantizedTensor | None]:
        """Tokens [N, H] to the ranks of their experts: rows [R, H], and their codes if they travelled as such.

        They do where FP8 has one scale on all these ranks, so that codes made there mean the same here.
        """
        state, group = self.states[0], self.mesh.group_of(("ep", "etp"))
        if state is None or group is None or not state.alike_everywhere("input"):
            return dispatch.send(spread(tokens, dispatch)), None
        return send_codes(tokens, dispatch, state, group)

    def forward(self, x: Tensor, counts: Tensor, codes: QuantizedTensor | None = None) -> Tensor:
        """x [R, H], `counts` [E / ep] rows of each expert in order -> [R, H], summed over this rank's part of F."""
        group = self.mesh.group_of(("ep", "etp"))
        gates = grouped_linear(x, self.gate_up, counts, state=self.states[0], group=group, codes=codes)
        gates = gates.unflatten(1, (2, gates.shape[1] // 2))  # a rank may have no tokens: -1 would be ambiguous
        hidden, kept = activation(gates, "swiglu", self.kernels), gates.detach()
        again = (lambda: self.kernels.swiglu(kept)) if "activation" in self.recompute else None
        if self.watch is not None:
            self.watch(hidden)
        if self.smooth:
            sizes = counts.tolist()
            scales = channel_scales(hidden.detach(), sizes)
            hidden, plain = smooth(hidden, scales, sizes), again
            again = (lambda: smooth(plain(), scales, sizes)) if plain else None
            return grouped_linear(hidden, self.down, counts, again, state=self.states[1], group=group, columns=scales)
        return grouped_linear(hidden, self.down, counts, again, state=self.states[1], group=group)


class MoE(nn.Module):
    """router, experts, and `shared`, an MLP that sees every token, if there is one."""

    def __init__(self, router: Router, experts: Experts, shared: SwiGLU | None, *, mesh: Mesh) -> None:
        super().__init__()
        self.router, self.experts, self.shared, self.mesh = router, experts, shared, mesh
        self.takes_share = mesh.size("tp") > 1 and not mesh.sequence_parallel

    def forward(self, y: Tensor, context: Context, rebuild: Rebuild | None = None) -> Tensor:
        """`rebuild`, if given, makes y again in the backward pass, so that it is not kept."""
        tokens = self._share(y)
        again = None if rebuild is None else lambda: self._share(rebuild())
        route = self.router(tokens, context, again)
        dispatch = plan_dispatch(route.experts, route.kept, self.router.rules.num_experts, self.mesh)
        rows, codes = self.experts.send(tokens.flatten(0, 1), dispatch)
        rows = self.experts(rows, dispatch.counts, codes)
        branch = combine(dispatch.bring_back(rows), route.weights, dispatch).view(tokens.shape)
        if self.takes_share:
            branch = join_from(branch, self.mesh, "tp", 0)
        return branch if self.shared is None else branch + self.shared(y, context, rebuild)

    def _share(self, y: Tensor) -> Tensor:
        return split_to(y, self.mesh, "tp", 0) if self.takes_share else y
