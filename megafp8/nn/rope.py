"""Rotary positions: frequencies with the scaling rules as transformers computes them, and tables of cos and sin.

The rotation itself is fused with the splitting of q, k, v: `kernels.split_rotate`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch

Tensor = torch.Tensor


class Scaling(Protocol):
    """What a scaling rule reads; models' RopeScaling is one. A zero means "not given"."""

    type: str
    factor: float
    original_max_length: int
    low_freq_factor: float
    high_freq_factor: float
    beta_fast: float
    beta_slow: float
    attention_factor: float
    mscale: float
    mscale_all_dim: float


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """How much yarn sharpens attention when a sequence is `factor` times as long (Peng et al. 2023, section 3.4)."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


@dataclass(frozen=True)
class Rotary:
    """Positions to tables; `scaling` as in models' RopeScaling."""

    head_dim: int
    theta: float
    max_length: int
    scaling: Scaling

    def tables(
        self,
        length: int,
        positions: Tensor | None,
        device: torch.device,
        dtype: torch.dtype,
        places: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """cos and sin, [S, 1, d/2], or [S, B, d/2] for `positions` [B, S]; in fp32 (fp64 for an fp64 model).

        `length` is S over all ranks, `positions` are those of the whole sequence; with `places` [n], only the rows of
        those tokens are made. With the dynamic rule the largest position of all decides on the frequencies.
        """
        if positions is None:
            positions = (torch.arange(length, device=device) if places is None else places)[None]
        else:
            if self.scaling.type == "dynamic":
                length = int(positions.max()) + 1
            positions = positions if places is None else positions[:, places]
        inverse, factor = self.frequencies(length, device)
        angles = positions.t()[..., None].float() * inverse
        wide = torch.promote_types(dtype, torch.float32)
        return (angles.cos() * factor).to(wide), (angles.sin() * factor).to(wide)

    def frequencies(self, length: int, device: torch.device | str = "cpu") -> tuple[Tensor, float]:
        """Angles per position [d/2] in fp32, and the factor on cos and sin, for a sequence of `length` tokens."""
        rule, theta, d = self.scaling, self.theta, self.head_dim
        if rule.type == "dynamic":  # NTK: the base grows with the sequence beyond the trained length
            stretch = rule.factor * max(length, self.max_length) / self.max_length - (rule.factor - 1)
            theta = theta * stretch ** (d / (d - 2))
        inverse = 1.0 / theta ** (torch.arange(0, d, 2, dtype=torch.float32, device=device) / d)
        match rule.type:
            case "linear":
                return inverse / rule.factor, 1.0
            case "llama3":
                return self._llama3(inverse), 1.0
            case "yarn":
                return self._yarn(inverse), rule.attention_factor or self._yarn_factor()
        return inverse, 1.0

    def _yarn_factor(self) -> float:
        rule = self.scaling
        if rule.mscale and rule.mscale_all_dim:
            return yarn_mscale(rule.factor, rule.mscale) / yarn_mscale(rule.factor, rule.mscale_all_dim)
        return yarn_mscale(rule.factor)

    def _llama3(self, inverse: Tensor) -> Tensor:
        """Long wavelengths divided by the factor, short ones kept, a linear blend between ("The Llama 3 Herd")."""
        rule = self.scaling
        turns = rule.original_max_length * inverse / (2 * math.pi)  # rotations within the trained length
        blend = (turns - rule.low_freq_factor) / (rule.high_freq_factor - rule.low_freq_factor)
        blend = blend.clamp(0, 1)
        return inverse / rule.factor * (1 - blend) + inverse * blend

    def _yarn(self, inverse: Tensor) -> Tensor:
        """NTK by parts: a ramp over dims between beta_fast and beta_slow rotations (Peng et al. 2023)."""
        rule, d = self.scaling, self.head_dim

        def dim_of(rotations: float) -> float:
            return d * math.log(rule.original_max_length / (rotations * 2 * math.pi)) / (2 * math.log(self.theta))

        low = max(math.floor(dim_of(rule.beta_fast)), 0)
        high = min(math.ceil(dim_of(rule.beta_slow)), d - 1)
        width = high - low if high != low else 0.001  # transformers' guard against a division by zero
        ramp = (torch.arange(d // 2, dtype=torch.float32, device=inverse.device) - low) / width
        keep = 1 - ramp.clamp(0, 1)
        return inverse / rule.factor * (1 - keep) + inverse * keep
