"""How large the inputs of linears, keys and values get on real text: what static FP8 scales are made from.

The model runs in its own dtype, unquantized, while every linear's input is looked at. By default the largest magnitude
counts; a percentile below 100 clips outliers, which a histogram over powers of two tells to within 1.1 %.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from megafp8.core.errors import DataError
from megafp8.models.decoder import Decoder
from megafp8.nn.cache import KeyValueCache
from megafp8.nn.linear import ColumnLinear, RowLinear
from megafp8.nn.mla import ReplicatedLinear
from megafp8.nn.moe import Experts

Tensor = torch.Tensor
_LOWEST, _HIGHEST, _PER_OCTAVE = -40, 24, 64  # bins of the histogram of log2 |x|


@dataclass
class Spread:
    """Magnitudes seen of one tensor: their largest, and a histogram over powers of two (int64)."""

    amax: float = 0.0
    counts: Tensor = field(default_factory=lambda: torch.zeros((_HIGHEST - _LOWEST) * _PER_OCTAVE, dtype=torch.int64))
    zeros: int = 0

    def add(self, x: Tensor, *, histogram: bool) -> None:
        """Count the values of `x`, any shape and dtype."""
        if x.numel() == 0:
            return
        magnitudes = x.detach().float().abs()
        self.amax = max(self.amax, float(magnitudes.max()))
        if histogram:
            some = magnitudes[magnitudes > 0]
            places = ((some.log2() - _LOWEST) * _PER_OCTAVE).long().clamp_(0, len(self.counts) - 1)
            self.counts += torch.bincount(places.cpu(), minlength=len(self.counts))
            self.zeros += magnitudes.numel() - some.numel()

    def percentile(self, percent: float) -> float:
        """The magnitude that `percent` of the values do not exceed, rounded up to a bin's edge; at most the largest."""
        if percent >= 100:
            return self.amax
        total = int(self.counts.sum()) + self.zeros
        above = self.counts.flip(0).cumsum(0).flip(0)  # values in this bin or a higher one
        fits = torch.nonzero(above <= total * (1 - percent / 100)).flatten()
        edge = _LOWEST + (int(fits[0]) if len(fits) else len(self.counts)) / _PER_OCTAVE
        return float(min(self.amax, 2.0**edge))


@dataclass
class Ranges:
    """What a calibration saw.

    Attributes:
        inputs: by linear, "layers.3.mlp.down" and the like.
        keys, values: by attention layer, "layers.3.attention".
        tokens: how many were read.
    """

    inputs: dict[str, Spread] = field(default_factory=dict)
    keys: dict[str, Spread] = field(default_factory=dict)
    values: dict[str, Spread] = field(default_factory=dict)
    tokens: int = 0


class _WatchedCache(KeyValueCache):
    """A cache of one call that looks at what it is given."""

    def __init__(self, batch: int, slots: int, ranges: Ranges, *, histogram: bool) -> None:
        super().__init__(batch, slots)
        self.ranges, self.histogram = ranges, histogram

    def extend(self, name: str, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """As KeyValueCache's, keeping nothing."""
        self.ranges.keys.setdefault(name, Spread()).add(k, histogram=self.histogram)
        self.ranges.values.setdefault(name, Spread()).add(v, histogram=self.histogram)
        return k, v


@torch.inference_mode()
def calibrate(model: Decoder, batches: Iterable[Tensor], *, histogram: bool = False) -> Ranges:
    """Run token ids [B, S] through the model and note how large everything gets.

    Args:
        histogram: for percentiles below 100; costs about as much again.

    Raises:
        DataError: no text, or an input or key that is not finite.
    """
    ranges = Ranges()
    handles = []

    def watch(name: str) -> Any:
        spread = ranges.inputs.setdefault(name, Spread())
        return lambda module, args: spread.add(args[0], histogram=histogram)

    for name, module in model.named_modules():
        if isinstance(module, ColumnLinear | RowLinear | ReplicatedLinear):
            handles.append(module.register_forward_pre_hook(watch(name)))
        elif isinstance(module, Experts):
            handles.append(module.register_forward_pre_hook(watch(f"{name}.gate_up")))
            down = watch(f"{name}.down")
            module.watch = lambda hidden, down=down: down(None, (hidden,))
    try:
        for tokens in batches:
            positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
            cache = _WatchedCache(len(tokens), tokens.shape[1], ranges, histogram=histogram)
            model(tokens, positions=positions, cache=cache, only=torch.zeros(len(tokens), dtype=torch.int64))
            ranges.tokens += tokens.numel()
    finally:
        for handle in handles:
            handle.remove()
        for module in model.modules():
            if isinstance(module, Experts):
                module.watch = None
    if not ranges.tokens:
        raise DataError("no text to calibrate with")
    for kind in (ranges.inputs, ranges.keys, ranges.values):
        for name, spread in kind.items():
            if not spread.amax < float("inf"):
                raise DataError(f"{name}: its input is not finite on the calibration text; the model is broken")
    return ranges
