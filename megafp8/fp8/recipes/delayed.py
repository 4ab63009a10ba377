"""Delayed scaling: a tensor is quantized with the scale that its predecessors' amaxes gave, in a single read.

State of a tensor: `scale` fp32 [1] (starts at 1) and `amax_history` fp32 [L] (starts at 0); entry 0 collects the
running micro-batch, entries 1..L-1 hold the past, oldest first. The history counts micro-batches, not steps.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megafp8.core.config import config_dataclass
from megafp8.core.recipe_options import DelayedOptions
from megafp8.fp8.recipe import FLOAT32_MAX, TensorSpec, format_of


@config_dataclass
class Delayed(DelayedOptions):
    """Delayed scaling with Transformer Engine's option names and defaults (`DelayedScaling`)."""

    @property
    def name(self) -> str:
        return "delayed"

    @property
    def shares_amax(self) -> bool:
        return self.reduce_amax

    def spec(self, role: str) -> TensorSpec:
        return TensorSpec(format_of(self.fp8_format, role), delayed=True)

    def new_state(self, device: torch.device | str) -> dict[str, torch.Tensor]:
        return {
            "amax_history": torch.zeros(self.amax_history_len, dtype=torch.float32, device=device),
            "scale": torch.ones(1, dtype=torch.float32, device=device),
        }

    def keeps_state_of(self, other: Delayed) -> bool:
        """Whether state that `other` made is this one's as it stands."""
        names = ("margin", "fp8_format", "amax_history_len", "amax_compute_algo")
        return all(getattr(self, name) == getattr(other, name) for name in names)

    @torch.no_grad()
    def update(
        self, states: Sequence[dict[str, torch.Tensor]], specs: Sequence[TensorSpec], amax: torch.Tensor
    ) -> None:
        """Roll the histories and compute the next scales, all T tensors at once.

        Args:
            states: T dicts of `new_state`; filled in place.
            specs: T specs, for the formats.
            amax: fp32 [T], `amax_history[0]` of each, reduced over ranks where there are any.
        """
        history = torch.stack([s["amax_history"] for s in states])
        scale = torch.cat([s["scale"] for s in states])
        limits = torch.tensor([s.format.max for s in specs], dtype=torch.float32, device=scale.device)
        new_history, new_scale = updated(
            history, scale, amax, limits, margin=self.margin, most_recent=self.amax_compute_algo == "most_recent"
        )
        torch._foreach_copy_([s["amax_history"] for s in states], list(new_history.unbind(0)))
        torch._foreach_copy_([s["scale"] for s in states], list(new_scale.split(1)))


def updated(
    history: torch.Tensor,
    scale: torch.Tensor,
    reduced: torch.Tensor,
    fp8_max: torch.Tensor,
    *,
    margin: int,
    most_recent: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The update rule, without side effects.

    Args:
        history: fp32 [T, L].
        scale: fp32 [T].
        reduced: fp32 [T], largest `history[:, 0]` over ranks.
        fp8_max: fp32 [T], largest value of each tensor's format.

    Returns:
        The next history [T, L] and scale [T]. A tensor that was not seen (amax 0) neither rolls nor rescales; a
        window that is not finite leaves the scale as it is.

    Source: Transformer Engine 2.20 common/recipe/delayed_scaling.cu, kernel_bulk.
    """
    last = torch.where(reduced != 0, reduced, history[:, 0])
    seen = (last != 0).unsqueeze(1)
    if most_recent:
        amax = last
    else:
        window = torch.cat([history[:, 1:], last.unsqueeze(1)], dim=1)
        # fmaxf skips NaN; amax would pass it on
        amax = torch.where(seen[:, 0], torch.nan_to_num(window, nan=0.0, posinf=torch.inf).amax(dim=1), 0.0)
    rolled = torch.cat([torch.zeros_like(history[:, :1]), history[:, 2:], last.unsqueeze(1)], dim=1)
    if history.shape[1] == 1:
        rolled = torch.zeros_like(history)
    target = torch.div(fp8_max * 2.0**-margin, amax)
    target = torch.where(torch.isinf(target), torch.full_like(target, FLOAT32_MAX), target)
    usable = torch.isfinite(amax) & (amax > 0)
    return torch.where(seen, rolled, history), torch.where(usable, target, scale)


@torch.no_grad()
def carried_over(
    history: torch.Tensor, scale: torch.Tensor, role: str, old: Delayed, new: Delayed
) -> tuple[torch.Tensor, torch.Tensor]:
    """State of a tensor that `old` made, between two micro-batches, as `new` wants it: newest amaxes, scale from them.

    Args:
        history: fp32 [old.amax_history_len]; one of length 1 remembers nothing, and the amax is read from the scale.
        scale: fp32 [1].

    Returns:
        history fp32 [new.amax_history_len] and scale fp32 [1]; 1 if the tensor was never seen.
    """
    past = history[1:]
    if len(history) == 1 and bool(scale != 1):
        past = torch.div(torch.full_like(scale, old.spec(role).format.max * 2.0**-old.margin), scale)
    kept = past[-(new.amax_history_len - 1) :] if new.amax_history_len > 1 else past[:0]
    carried = torch.zeros(new.amax_history_len, dtype=history.dtype, device=history.device)
    if len(kept):
        carried[-len(kept) :] = kept
    window = past[-max(1, new.amax_history_len - 1) :]
    if new.amax_compute_algo == "most_recent":
        window = past[-1:]
    amax = torch.nan_to_num(window, nan=0.0, posinf=torch.inf).amax().reshape(1) if len(window) else scale.new_zeros(1)
    target = torch.div(torch.full_like(scale, new.spec(role).format.max * 2.0**-new.margin), amax)
    target = torch.where(torch.isinf(target), torch.full_like(target, FLOAT32_MAX), target)
    return carried, torch.where(torch.isfinite(amax) & (amax > 0), target, torch.ones_like(scale))


RECIPE = Delayed
