"""The experts' section of a model: which layers have experts, how tokens choose them, and what is refused.

No torch here: `megafp8 check` reads this.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Literal

from pydantic import Field

from megafp8.core.config import config_dataclass


@config_dataclass
class MoEConfig:
    """Mixture of experts in place of the MLP; num_experts = 0 is a dense model."""

    num_experts: Annotated[int, Field(ge=0, le=65_536, description="routed experts of a layer; 0 = dense")] = 0
    top_k: Annotated[int, Field(ge=1, description="experts that a token is sent to")] = 2
    ffn_hidden_size: Annotated[int, Field(ge=0, le=1 << 24, description="width of an expert; 0 = the model's")] = 0
    num_shared_experts: Annotated[int, Field(ge=0, description="experts that see every token")] = 0
    shared_ffn_hidden_size: Annotated[
        int,
        Field(
            ge=0, le=1 << 24, description="width of all shared experts together; 0 = their number x an expert's width"
        ),
    ] = 0
    first_dense_layers: Annotated[int, Field(ge=0, description="layers at the start that keep an MLP")] = 0
    layer_interval: Annotated[int, Field(ge=1, description="experts in every so many layers (i % n = 0)")] = 1
    score: Annotated[
        Literal["softmax", "sigmoid"], Field(description="an expert's score from its logit (DeepSeek-V3: sigmoid)")
    ] = "softmax"
    normalize_top_k: Annotated[
        bool, Field(description="the chosen scores sum to 1 (Mixtral; with softmax the same as softmax after top-k)")
    ] = True
    scaling_factor: Annotated[float, Field(gt=0, description="of the chosen scores, after normalising")] = 1.0
    num_groups: Annotated[int, Field(ge=1, description="groups of experts for the group-limited choice; 1 = no")] = 1
    top_k_groups: Annotated[int, Field(ge=1, description="groups that a token may use")] = 1
    capacity_factor: Annotated[
        float, Field(ge=0, description="an expert takes at most this x top_k x S / E tokens of a sequence; 0 = all")
    ] = 0.0
    drop_policy: Annotated[
        Literal["probs", "position"], Field(description="who goes over capacity: lowest score, or last in the sequence")
    ] = "probs"
    aux_loss: Annotated[
        Literal["none", "sequence", "micro_batch"], Field(description="over what load is balanced (DeepSeek, Switch)")
    ] = "none"
    aux_loss_coeff: Annotated[float, Field(ge=0, description="of the auxiliary loss")] = 0.0
    z_loss_coeff: Annotated[float, Field(ge=0, description="of the mean squared log-sum-exp of router logits")] = 0.0
    bias_update_rate: Annotated[
        float, Field(ge=0, description="step of the balance bias once a training step (DeepSeek-V3: 0.001); 0 = fixed")
    ] = 0.0

    def __post_init__(self) -> None:
        problems = self._unused() if not self.num_experts else self._choice_problems()
        if (self.aux_loss == "none") != (self.aux_loss_coeff == 0):
            problems.append(
                f"aux_loss {self.aux_loss!r} with aux_loss_coeff {self.aux_loss_coeff}; a loss needs a coefficient "
                "above 0 (usual: 0.01 for micro_batch, 0.0001 for sequence), none needs 0"
            )
        if problems:
            raise ValueError("; also: ".join(problems))

    def _unused(self) -> list[str]:
        given = [f.name for f in dataclasses.fields(self) if getattr(self, f.name) != f.default]
        return [f"{', '.join(given)} without num_experts; give num_experts, or leave them out"] if given else []

    def _choice_problems(self) -> list[str]:
        problems = []
        experts, groups = self.num_experts, self.num_groups
        if self.top_k > experts:
            problems.append(f"top_k {self.top_k} is above num_experts {experts}; nearest: {experts}")
        if experts % groups:
            choices = nearest_divisors(experts, groups)
            problems.append(f"num_experts {experts} is not divisible by num_groups {groups}; nearest: {choices}")
        if self.top_k_groups > groups:
            problems.append(f"top_k_groups {self.top_k_groups} is above num_groups {groups}; nearest: {groups}")
        room = self.top_k_groups * (experts // groups)
        if not problems and self.top_k > room:
            problems.append(
                f"top_k {self.top_k} is above the {room} experts of {self.top_k_groups} groups of {experts // groups}; "
                f"nearest: top_k {room}, or top_k_groups {-(-self.top_k // (experts // groups))}"
            )
        if self.shared_ffn_hidden_size and not self.num_shared_experts:
            problems.append("shared_ffn_hidden_size without num_shared_experts; nearest: num_shared_experts 1")
        return problems

    @property
    def has_bias(self) -> bool:
        """Whether the choice is by score + bias: DeepSeek-V3's router, or wherever the bias is updated."""
        return self.num_experts > 0 and (self.score == "sigmoid" or self.bias_update_rate > 0)

    def is_moe_layer(self, layer: int) -> bool:
        """Whether decoder layer `layer` has experts."""
        return self.num_experts > 0 and layer >= self.first_dense_layers and layer % self.layer_interval == 0


def with_widths(moe: MoEConfig, ffn_hidden_size: int) -> MoEConfig:
    """`moe` with the widths that it leaves open filled in; a dense model's as it is."""
    if not moe.num_experts:
        return moe
    ffn = moe.ffn_hidden_size or ffn_hidden_size
    shared = moe.shared_ffn_hidden_size or moe.num_shared_experts * ffn
    return dataclasses.replace(moe, ffn_hidden_size=ffn, shared_ffn_hidden_size=shared)


def check_experts(
    moe: MoEConfig, *, num_layers: int, activation: str, mlp_bias: bool, tp: int = 1, ep: int = 1, etp: int = 1
) -> list[str]:
    """Every rule that these experts break on such a mesh, a line each with the nearest valid choice.

    Args:
        moe: widths filled in.
        etp: resolved (never 0).
    """
    if not moe.num_experts:
        given = {"ep": (ep, 1), "etp": (etp, tp)}
        return [
            f"parallel.{axis} = {value}: the model has no experts (model.moe.num_experts = 0); nearest: {only}"
            for axis, (value, only) in given.items()
            if value != only
        ]
    problems = [
        f"parallel.{axis} = {ranks}: does not divide model.moe.{name} {value}; "
        f"nearest: {nearest_divisors(value, ranks)}"
        for axis, ranks, name, value in (
            ("ep", ep, "num_experts", moe.num_experts),
            ("etp", etp, "ffn_hidden_size", moe.ffn_hidden_size),
            ("tp", tp, "shared_ffn_hidden_size", moe.shared_ffn_hidden_size),
        )
        if value % ranks
    ]
    if not any(moe.is_moe_layer(i) for i in range(num_layers)):
        problems.append(
            f"model.moe: first_dense_layers {moe.first_dense_layers} and layer_interval {moe.layer_interval} leave "
            f"none of {num_layers} layers with experts; nearest: first_dense_layers {max(0, num_layers - 1)}, "
            "layer_interval 1"
        )
    if activation != "swiglu":
        problems.append(f"model.activation = {activation!r}: experts are gated; nearest: 'swiglu'")
    if mlp_bias:
        problems.append("model.mlp_bias = true: experts have no biases; nearest: false")
    return problems


def nearest_divisors(number: int, near: int) -> str:
    """The divisors of `number` next to `near`, for a message."""
    divisors = [d for d in range(1, number + 1) if number % d == 0]
    return " or ".join(str(d) for d in sorted(sorted(divisors, key=lambda d: abs(d - near))[:2]))
