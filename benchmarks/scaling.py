"""How the cost of a training step grows with layers, sequence length and micro-batches, drawn beside the arithmetic.

Each point is the fastest of a few steps of one process; the line is its FLOPs (models/cost) at the rate of the middle
point, so a cost that grows faster than the arithmetic bends away from it.

    python -m benchmarks.scaling --out scaling.svg
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import torch

from benchmarks.parallel_step import VOCAB, made_parts
from megafp8.models import ModelConfig
from megafp8.models.cost import flops_per_token
from megafp8.train.step import train_step

matplotlib.use("Agg")
from matplotlib import pyplot


@dataclass(frozen=True)
class Point:
    """A training step's size."""

    layers: int = 4
    length: int = 512
    micro_batches: int = 2

    @property
    def model(self) -> dict[str, object]:
        """The model section."""
        return {"preset": "bench", "num_layers": self.layers, "max_sequence_length": self.length}

    @property
    def flops(self) -> float:
        """Of a step, attention causal."""
        per_token = flops_per_token(ModelConfig(**self.model), self.length, causal=True)  # type: ignore[arg-type]
        return per_token * self.length * self.micro_batches


SERIES: dict[str, list[Point]] = {
    "layers": [Point(layers=n) for n in (2, 4, 8, 16)],
    "sequence length, tokens": [Point(length=n) for n in (256, 512, 1024, 2048)],
    "micro-batches a step": [Point(micro_batches=n) for n in (1, 2, 4, 8)],
}
_VALUE: dict[str, Callable[[Point], int]] = {
    "layers": lambda p: p.layers,
    "sequence length, tokens": lambda p: p.length,
    "micro-batches a step": lambda p: p.micro_batches,
}


def step_seconds(point: Point, steps: int) -> float:
    """The fastest of `steps` steps after one to warm up; micro-batches of one sequence."""
    tokens = torch.randint(0, VOCAB, (1, point.length), generator=torch.Generator().manual_seed(0))
    parts = made_parts(point.model, tokens, micro_batches=point.micro_batches)
    train_step(parts, 1, 3e-4)
    best = float("inf")
    for _ in range(steps):
        start = time.perf_counter()
        train_step(parts, 1, 3e-4)
        best = min(best, time.perf_counter() - start)
    return best


def draw(measured: dict[str, list[float]], path: Path) -> None:
    """Three panels of seconds a step, both axes logarithmic."""
    figure, panels = pyplot.subplots(1, 3, figsize=(12, 4), layout="constrained", sharey=True)
    for panel, (what, points) in zip(panels, SERIES.items(), strict=True):
        at = [_VALUE[what](point) for point in points]
        middle = len(points) // 2
        rate = points[middle].flops / measured[what][middle]
        panel.plot(at, [point.flops / rate for point in points], color="#999999", label="FLOPs at the middle's rate")
        panel.plot(at, measured[what], "o", color="#1f5fa8", label="measured")
        for x, point, seconds in zip(at, points, measured[what], strict=True):
            panel.annotate(f"{point.length * point.micro_batches / seconds:,.0f} tokens/s", (x, seconds),
                           textcoords="offset points", xytext=(-6, 6), fontsize=8, ha="right")  # fmt: skip
        panel.set(xscale="log", yscale="log", xlabel=what)
        panel.set_xticks(at, [str(x) for x in at])
        panel.minorticks_off()
        panel.margins(x=0.2)
    panels[0].set_ylabel("seconds a step")
    panels[0].legend(frameon=False)
    figure.suptitle("Cost of a training step: 4 layers, 512 tokens, 2 micro-batches, one of them varied")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("runs/bench/scaling.svg"), help="the picture, SVG or PNG")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    measured: dict[str, list[float]] = {}
    print(f"{'varied':<26}{'value':>8}{'seconds':>10}{'tokens/s':>12}{'GFLOP/s':>10}")
    for what, points in SERIES.items():
        measured[what] = []
        for point in points:
            seconds = step_seconds(point, options.steps)
            measured[what].append(seconds)
            rate = point.length * point.micro_batches / seconds
            gflops = point.flops / seconds / 1e9
            print(f"{what:<26}{_VALUE[what](point):>8}{seconds:>10.3f}{rate:>12.0f}{gflops:>10.0f}")
    draw(measured, options.out)
    print(f"drawn: {options.out}")
    if options.json:
        options.json.write_text(json.dumps(measured, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
