"""How the model's own weights fall on the values of E4M3 and E5M2: histograms and rounding errors. No drawing here.

Scaled as a per-tensor recipe does it (current scaling, and delayed scaling while amax stands still): the largest
magnitude of each tensor lies on the format's largest value.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from megafp8.checkpoint import iterate_tensors, latest
from megafp8.fp8.formats import BF16, E4M3, E5M2, Format, cast, finite_values

FORMATS = (E4M3, E5M2)
PREFIX = "optimizer.master."
# the linear layers inside the blocks, which are what a recipe quantizes
QUANTIZED = re.compile(r"layers\.\d+\.(attention|mlp)\.\w+\.weight$")
LOG2_EDGES = np.arange(-40.0, 0.0 + 1e-9, 0.25)
LINEAR_EDGES = np.linspace(-1.0, 1.0, 402)


@dataclass
class Rounding:
    """What a format does to the weights, summed over tensors."""

    zeroed: int = 0
    squared_error: float = 0.0
    relative_error: float = 0.0

    def add(self, x: torch.Tensor, rounded: torch.Tensor) -> None:
        """Count one tensor and what it became, both fp32 of one shape and scaled back."""
        self.zeroed += int((x.count_nonzero() - rounded.count_nonzero()).item())
        self.squared_error += float(((x - rounded).double() ** 2).sum())
        self.relative_error += float(((x - rounded).abs() / x.abs().clamp(min=1e-38)).double().sum())


@dataclass
class WeightSpread:
    """Histograms of |w| / amax of each tensor, all tensors together.

    Attributes:
        checkpoint: the folder it was read from.
        log2_counts: of log2(|w| / amax) over LOG2_EDGES; what lies below is in the first bin.
        linear_counts: of w / amax over LINEAR_EDGES.
        rounding: by format name, E4M3 and E5M2 with scaling, BF16 without.
    """

    checkpoint: Path
    num_tensors: int = 0
    num_weights: int = 0
    num_zero: int = 0
    squares: float = 0.0
    log2_counts: np.ndarray = field(default_factory=lambda: np.zeros(len(LOG2_EDGES) - 1, dtype=np.int64))
    linear_counts: np.ndarray = field(default_factory=lambda: np.zeros(len(LINEAR_EDGES) - 1, dtype=np.int64))
    rounding: dict[str, Rounding] = field(default_factory=lambda: {f.name: Rounding() for f in (*FORMATS, BF16)})

    def add(self, weight: torch.Tensor) -> None:
        """Add one tensor of any shape."""
        x = weight.detach().float().flatten()
        amax = x.abs().max()
        if not torch.isfinite(amax) or amax == 0:
            return
        unit = (x / amax).numpy()
        magnitude = np.abs(unit[unit != 0])
        self.num_tensors += 1
        self.num_weights += x.numel()
        self.num_zero += x.numel() - magnitude.size
        self.squares += float((x.double() ** 2).sum())
        self.linear_counts += np.histogram(unit, LINEAR_EDGES)[0]
        self.log2_counts += np.histogram(np.log2(np.maximum(magnitude, 2.0 ** LOG2_EDGES[0])), LOG2_EDGES)[0]
        for fmt in FORMATS:
            scale = fmt.max / amax
            self.rounding[fmt.name].add(x, cast(x * scale, fmt).float() / scale)
        self.rounding[BF16.name].add(x, x.bfloat16().float())

    def table(self) -> list[dict[str, float | str]]:
        """A row a format: weights that become zero in %, signal-to-noise ratio in dB, mean relative error in %."""
        rows: list[dict[str, float | str]] = []
        for name, rounding in self.rounding.items():
            noise = rounding.squared_error
            rows.append(
                {
                    "format": name,
                    "zeroed_percent": 100.0 * rounding.zeroed / self.num_weights,
                    "snr_db": 10.0 * float(np.log10(self.squares / noise)) if noise else float("inf"),
                    "relative_percent": 100.0 * rounding.relative_error / self.num_weights,
                }
            )
        return rows


def read_spread(run_folder: Path) -> WeightSpread | None:
    """Histograms over the newest complete checkpoint of a run; None if there is none, or no quantized weight in it.

    Raises:
        CheckpointError: the checkpoint is damaged.
    """
    root = run_folder / "checkpoints"
    path = latest(root) if root.is_dir() else None
    if path is None:
        return None
    return spread(iterate_tensors(path, prefix=PREFIX), path)


def spread(tensors: Iterable[tuple[str, torch.Tensor]], path: Path) -> WeightSpread | None:
    """Histograms over named tensors, one at a time in memory."""
    result = WeightSpread(path)
    for name, tensor in tensors:
        if QUANTIZED.search(name):
            result.add(tensor)
    return result if result.num_weights else None


def magnitudes(fmt: Format) -> np.ndarray:
    """The positive finite values of a format over its largest, rising, float64."""
    values = finite_values(fmt).double().numpy()
    return values[values > 0] / fmt.max
