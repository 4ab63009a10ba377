"""Statistics of quantization under Transformer Engine's names; costs nothing unless armed for a step.

underflows%: share of elements that were not zero and became zero. overflows%: share beyond the format's range at
the scale in use. amax: largest magnitude seen. scale: the one in use. mse: mean squared quantization error.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from megafp8.fp8.kernels import amax_of
from megafp8.fp8.linear import LinearState
from megafp8.fp8.quantized import QuantizedTensor

NAMES = ("underflows%", "overflows%", "amax", "scale", "mse")


class Collector:
    """Keeps the last quantization's statistics of each role, as tensors, so that nothing waits for the device."""

    def __init__(self) -> None:
        self.roles: dict[str, torch.Tensor] = {}

    @torch.no_grad()
    def __call__(self, role: str, x: torch.Tensor, quantized: QuantizedTensor, amax: torch.Tensor | None) -> None:
        self.roles[role] = collect(x, quantized, amax)


def collect(x: torch.Tensor, quantized: QuantizedTensor, amax: torch.Tensor | None) -> torch.Tensor:
    """The five statistics in the order of `NAMES`, fp32 [5]. An empty tensor gives zeros and its scale."""
    amax = amax_of(x) if amax is None else amax
    wide, count = x.detach().float(), max(x.numel(), 1)
    values = quantized.data.float()
    underflows = wide.count_nonzero() - values.count_nonzero()
    # two ulps of slack: with the scale of its own amax, a tensor's maximum lies on the edge, not beyond it
    edge = quantized.format.max * quantized.scale_inv * (1.0 + 2.0**-22)
    overflows = (wide.abs() > edge).sum()
    error = ((values * quantized.scale_inv - wide) ** 2).sum() / count
    percents = [(n * (100.0 / count)).reshape(1).float() for n in (underflows, overflows)]
    return torch.cat([*percents, amax, 1.0 / quantized.scale_inv, error.reshape(1)])


def arm(states: Iterable[LinearState]) -> None:
    """Collect from the next quantizations on, until `read`."""
    for state in states:
        state.observer = Collector()


def read(states: Iterable[LinearState]) -> dict[str, float]:
    """`{"<module>.<role>.<statistic>": value}` of all that ran since `arm`, and disarm."""
    result: dict[str, float] = {}
    for state in states:
        if isinstance(state.observer, Collector):
            for role, values in state.observer.roles.items():
                numbers = values.tolist()
                result |= {f"{state.name}.{role}.{name}": v for name, v in zip(NAMES, numbers, strict=True)}
        state.observer = None
    return result
