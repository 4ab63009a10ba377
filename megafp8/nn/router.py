"""The router: which experts a token goes to, with what weight, and what keeps their load even.

Logits, scores and losses are in fp32 (fp64 for an fp64 model), whatever the model's dtype. Every rank routes tokens of
its own: its part of the sequence under tp and cp. What is decided or averaged over a sequence, a micro-batch or the
global batch is so on any mesh: capacity and the auxiliary losses see all parts of a sequence. What becomes of the
counts at the end of a step is in nn/balance.

Sources: softmax top-k as Mixtral (Jiang et al. 2024); sigmoid scores, group-limited choice, bias and sequence-wise loss
as DeepSeek-V3 (2024, sections 2.1.2 and appendix); loss over a micro-batch and capacity as Switch (Fedus et al. 2021);
z-loss as ST-MoE (Zoph et al. 2022).

Shapes: S' this rank's part of the sequence, B micro-batch, N = S' * B, E experts, K = top_k.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from megafp8.core.layout import Layout
from megafp8.nn.context import Context
from megafp8.nn.parameter import Init, declare
from megafp8.nn.recompute import Rebuild
from megafp8.parallel.collectives import all_gather, all_reduce_
from megafp8.parallel.mesh import Mesh

Tensor = torch.Tensor

TOKEN_AXES = ("tp", "cp")  # over which the tokens of a sequence lie


class RouterRules(Protocol):
    """What a router reads of the experts' configuration."""

    num_experts: int
    top_k: int
    score: Any
    normalize_top_k: bool
    scaling_factor: float
    num_groups: int
    top_k_groups: int
    capacity_factor: float
    drop_policy: Any
    aux_loss: Any
    aux_loss_coeff: float
    z_loss_coeff: float
    bias_update_rate: float
    has_bias: bool


@dataclass(frozen=True, eq=False)
class Route:
    """experts [N, K] int64, all different within a token; weights [N, K]; kept [N, K] bool or None for all."""

    experts: Tensor
    weights: Tensor
    kept: Tensor | None


class Router(nn.Module):
    """Parameters: weight [E, H]. Buffer, if the choice has one: bias [E] fp32, which no gradient reaches.

    Attributes:
        tally: [E + 3] fp64 of the step so far on this rank: assignments of each expert, dropped ones, and this rank's
            share of the auxiliary loss and the z-loss, both without their coefficients. Written in the backward pass,
            so that each micro-batch counts once whatever is recomputed, and evaluation never.
    """

    tally: Tensor
    bias: Tensor | None

    def __init__(self, hidden_size: int, rules: RouterRules, *, std: float, mesh: Mesh, dtype: torch.dtype) -> None:
        super().__init__()
        self.rules, self.mesh = rules, mesh
        layout = Layout((rules.num_experts, hidden_size), grad_sum=("tp",))
        self.weight = declare(layout, Init(std), mesh=mesh, dtype=dtype)
        self.register_buffer("bias", torch.zeros(rules.num_experts) if rules.has_bias else None)
        self.register_buffer("tally", torch.zeros(rules.num_experts + 3, dtype=torch.float64), persistent=False)

    def forward(self, tokens: Tensor, context: Context, rebuild: Rebuild | None = None) -> Route:
        """Route tokens [S', B, H]; `rebuild`, if given, makes them again in the backward pass."""
        rules = self.rules
        logits: Tensor = _Logits.apply(tokens, self.weight, rebuild)
        scores = logits.softmax(-1) if rules.score == "softmax" else logits.sigmoid()
        experts = self._choose(scores.detach())
        weights = scores.gather(-1, experts)
        if rules.normalize_top_k and rules.top_k > 1:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)  # all may underflow to 0
        weights = weights * rules.scaling_factor
        kept = self._within_capacity(experts, weights.detach(), context) if rules.capacity_factor else None
        if context.num_sequences and torch.is_grad_enabled():
            weights = self._with_losses(weights, logits, scores, experts, kept, context.num_sequences)
        flat = experts.flatten(0, 1)
        return Route(flat, weights.flatten(0, 1), None if kept is None else kept.flatten(0, 1))

    def _choose(self, scores: Tensor) -> Tensor:
        """[S', B, E] -> [S', B, K]: the best by score (+ bias); of equals the lower number."""
        rules = self.rules
        if self.bias is not None:
            scores = scores + self.bias
        if rules.num_groups > 1:
            grouped = scores.unflatten(-1, (rules.num_groups, -1))
            # DeepSeek-V3 ranks groups by their two best experts, V2 (softmax) by the best
            best = min(2 if rules.score == "sigmoid" else 1, grouped.shape[-1])
            value = _first(grouped, best)[0].sum(-1)
            allowed = torch.zeros_like(value, dtype=torch.bool)
            allowed.scatter_(-1, _first(value, rules.top_k_groups)[1], True)
            scores = grouped.masked_fill(~allowed.unsqueeze(-1), -math.inf).flatten(-2)
        return _first(scores, rules.top_k)[1].contiguous()  # a view would keep all E places for the backward pass

    def _within_capacity(self, experts: Tensor, weights: Tensor, context: Context) -> Tensor:
        """[S', B, K] bool: which assignments an expert takes, of all tokens of a sequence on all its ranks."""
        rules, group = self.rules, self.mesh.group_of(TOKEN_AXES)
        everyone = all_gather(experts, group)
        order = all_gather(_sequence_places(experts, context, self.mesh), group)
        whole, batch, choices = everyone.shape
        room = math.ceil(rules.capacity_factor * choices * whole / rules.num_experts)
        if rules.drop_policy == "probs":
            ranks = all_gather(weights, group)
        else:
            ranks = -order.view(-1, 1, 1).expand(whole, batch, choices).to(torch.float64)
        queue = everyone + torch.arange(batch, device=experts.device).view(1, -1, 1) * rules.num_experts
        # sorts are stable: by place, then by rank, then by queue
        by_place = order.sort(stable=True).indices.view(-1, 1, 1) * (batch * choices)
        by = (by_place + torch.arange(batch * choices, device=experts.device).view(1, batch, choices)).flatten()
        by = by[ranks.flatten()[by].sort(stable=True, descending=True).indices]
        by = by[queue.flatten()[by].sort(stable=True).indices]
        counts = torch.bincount(queue.flatten(), minlength=batch * rules.num_experts)
        begins = (counts.cumsum(0) - counts)[queue.flatten()[by]]
        kept = torch.empty_like(by, dtype=torch.bool)
        kept[by] = torch.arange(len(by), device=by.device) - begins < room
        mine = self.mesh.place(TOKEN_AXES)[0] * len(experts)
        return kept.view(whole, batch, choices)[mine : mine + len(experts)]

    def _with_losses(
        self, weights: Tensor, logits: Tensor, scores: Tensor, experts: Tensor, kept: Tensor | None, sequences: int
    ) -> Tensor:
        """weights, whose backward pass also starts that of the losses, and writes the tally."""
        rules = self.rules
        parts, batch, num_experts = scores.shape
        length = parts * self.mesh.size("tp") * self.mesh.size("cp")
        queue = experts + torch.arange(batch, device=experts.device).view(1, -1, 1) * num_experts
        counts = torch.bincount(queue.flatten(), minlength=batch * num_experts).view(batch, num_experts)
        aux = z = torch.zeros((), dtype=scores.dtype, device=scores.device)
        if rules.aux_loss != "none":
            shares = scores if rules.score == "softmax" else scores / (scores.sum(-1, keepdim=True) + 1e-20)
            aux = self._balance_loss(counts.clone(), shares.sum(0), length) / sequences
        if rules.z_loss_coeff:
            z = logits.logsumexp(-1).square().sum() / (sequences * length)
        dropped = counts.new_zeros(()) if kept is None else (~kept).sum()
        update = torch.cat((counts.sum(0).double(), torch.stack([t.detach().double() for t in (dropped, aux, z)])))
        loss = aux * rules.aux_loss_coeff + z * rules.z_loss_coeff
        result: Tensor = _Attach.apply(weights, loss if loss.requires_grad else None, self.tally, update)
        return result

    def _balance_loss(self, counts: Tensor, probability: Tensor, length: int) -> Tensor:
        """This rank's share of E * sum over experts of load share * mean probability; 1 a sequence if all is even.

        Args:
            counts: [B, E] assignments; probability: [B, E], summed over this rank's tokens.
            length: tokens of a whole sequence.
        """
        rules = self.rules
        load = all_reduce_(counts, self.mesh.group_of(TOKEN_AXES)).to(probability.dtype)
        if rules.aux_loss == "micro_batch":
            load = load.mean(0, keepdim=True)  # with P summed over B: B times the loss of the micro-batch
        scale = rules.num_experts / (rules.top_k * length) / length
        return (load * probability).sum() * scale


def _first(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest along the last dim and their places; topk does not say which of equals it takes."""
    values, places = scores.sort(dim=-1, descending=True, stable=True)
    return values[..., :count], places[..., :count]


def _sequence_places(experts: Tensor, context: Context, mesh: Mesh) -> Tensor:
    """[S'] int64, where in the sequence this rank's tokens stand."""
    parts, place = len(experts), mesh.coord("tp")
    here = slice(place * parts, (place + 1) * parts)
    if context.places is not None:
        return context.places[here]
    return torch.arange(here.start, here.stop, device=experts.device)


class _Logits(torch.autograd.Function):
    """x [..., H] @ weight.T in fp32 of inputs that are kept as they are, or made again by `rebuild`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, rebuild: Rebuild | None) -> Tensor:
        ctx.save_for_backward(weight, *(() if rebuild else (x,)))
        ctx.rebuild, ctx.dtype = rebuild, x.dtype
        wide = torch.promote_types(x.dtype, torch.float32)
        return x.to(wide) @ weight.to(wide).T

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        grad, saved = grads[0], ctx.saved_tensors
        weight, x = saved[0], ctx.rebuild() if ctx.rebuild else saved[1]
        dweight = grad.flatten(0, -2).T @ x.flatten(0, -2).to(grad.dtype)
        return (grad @ weight.to(grad.dtype)).to(ctx.dtype), dweight.to(weight.dtype), None


class _Attach(torch.autograd.Function):
    """Identity; backward gives `loss` the gradient 1 (as Megatron's MoEAuxLossAutoScaler) and adds to the tally."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, loss: Tensor | None, tally: Tensor, update: Tensor) -> Tensor:
        ctx.loss_like = None if loss is None else torch.ones_like(loss)
        ctx.tally, ctx.update = tally, update
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.tally += ctx.update
        return grads[0], ctx.loss_like, None, None
