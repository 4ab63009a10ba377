"""A training step in every FP8 recipe, emulated fast, against the same step in BF16, and what statistics add to it.

Every precision is a process of its own, and they take turns, each round beginning with another. An FP8 process takes
every other step with statistics of all its tensors on; ratios are medians of the ratios of a round. Off, statistics
cost one comparison a quantization, which is counted and timed.

    python -m benchmarks.fp8_step --threads 2 --steps 8
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import timeit
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.contenders import Contender, serve
from benchmarks.fp8_picture import draw_steps
from benchmarks.parallel_step import AFTER_WARM_UP, LENGTH, VOCAB, made_parts
from megafp8.fp8 import stats
from megafp8.fp8.linear import LinearState
from megafp8.fp8.recipe import ROLES, recipe_names
from megafp8.train.step import train_step

BASE = "none"
BATCH = 4
MOST_RATIO, MOST_ON, MOST_OFF = 1.8, 0.10, 0.005


def stepper(recipe: str) -> Callable[[], float]:
    """The trainer's own step; in FP8 every second one with statistics, as the training loop takes them."""
    tokens = torch.randint(0, VOCAB, (BATCH, LENGTH), generator=torch.Generator().manual_seed(0))
    parts = made_parts({"preset": "bench"}, tokens, micro_batches=1, recipe=recipe)
    steps = itertools.count(AFTER_WARM_UP)

    def step() -> float:
        number = next(steps)
        armed = recipe != BASE and number % 2 == 1
        if armed:
            stats.arm(parts.fp8_states.values())
        loss = train_step(parts, number, 3e-4).loss
        if armed and not stats.read(parts.fp8_states.values()):
            raise RuntimeError("no statistics came")
        return loss

    return step


def contend(recipe: str, threads: int) -> None:
    """Child: serve steps in this recipe."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    serve(lambda: stepper(recipe))


def measure(names: list[str], *, threads: int, rounds: int) -> dict[str, Any]:
    """Let all take turns; seconds, ratios to BF16 (wall clock and CPU), what statistics add."""
    words = ["benchmarks.fp8_step", "--threads", str(threads), "--contender"]
    running = {name: Contender([*words, name], ranks=1, threads=threads) for name in names}
    for number in range(rounds):
        for place in range(len(names)):
            name = names[(number + place) % len(names)]
            running[name].step()
            if name != BASE:
                running[name].step()
    for contender in running.values():
        contender.close()
    plain = {name: c.steps if name == BASE else c.steps[::2] for name, c in running.items()}
    result: dict[str, Any] = {}
    for name, steps in plain.items():
        result[name] = {
            "seconds": statistics.median(s["seconds"] for s in steps),
            "cpu_seconds": statistics.median(s["cpu_seconds"] for s in steps),
            "peak_bytes": steps[-1]["peak_bytes"],
            "first_step_seconds": running[name].first_step_seconds,
            "loss": steps[-1]["loss"],
        }
        for key in ("seconds", "cpu_seconds"):
            result[name][f"ratio_{key}"] = _median_ratio(steps, plain[BASE], key)
            if name != BASE:
                result[name][f"statistics_{key}"] = _median_ratio(running[name].steps[1::2], steps, key) - 1.0
    return result


def _median_ratio(some: list[dict[str, float]], others: list[dict[str, float]], key: str) -> float:
    return statistics.median(a[key] / b[key] for a, b in zip(some, others, strict=True))


def seconds_when_off() -> float:
    """What statistics cost a quantization when they are off: asking whether somebody observes."""
    state = LinearState.__new__(LinearState)
    state.observer = None
    count = 100_000
    return min(timeit.repeat(lambda: state.observer is not None, number=count, repeat=5)) / count


def show(result: dict[str, Any], names: list[str], off: float, quantizations: int) -> bool:
    """Print the table; whether every figure keeps its bound."""
    head = ("recipe", "ms", "cpu ms", "x BF16", "x (cpu)", "statistics", "(cpu)", "peak MB", "first step s")
    print(("{:<12}" + "{:>13}" * 8).format(*head))
    kept = True
    for name in names:
        row = result[name]
        line = f"{'BF16' if name == BASE else name:<12}{row['seconds'] * 1e3:>13.0f}{row['cpu_seconds'] * 1e3:>13.0f}"
        line += f"{row['ratio_seconds']:>13.2f}{row['ratio_cpu_seconds']:>13.2f}"
        if name == BASE:
            line += f"{'':>26}"
        else:
            line += f"{row['statistics_seconds']:>+13.1%}{row['statistics_cpu_seconds']:>+13.1%}"
            kept = kept and row["ratio_cpu_seconds"] <= MOST_RATIO and row["statistics_cpu_seconds"] <= MOST_ON
        print(f"{line}{row['peak_bytes'] / 1e6:>13.0f}{row['first_step_seconds']:>13.1f}")
    share = off * quantizations / min(result[name]["seconds"] for name in names)
    print(f"statistics off: {quantizations} comparisons a step of {off * 1e9:.0f} ns: {share:.5%}")
    print(f"bounds: FP8 <= {MOST_RATIO} x BF16, statistics <= {MOST_ON:.0%} on, <= {MOST_OFF:.1%} off (CPU seconds)")
    return kept and share <= MOST_OFF


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    recipes = recipe_names()
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=8, help="rounds after warm-up")
    parser.add_argument("--only", nargs="*", choices=recipes, default=recipes, help="recipes to run beside BF16")
    parser.add_argument("--out", type=Path, default=Path("runs/bench/fp8_step.svg"), help="the picture, SVG or PNG")
    parser.add_argument("--json", type=Path, help="write the result here")
    parser.add_argument("--contender", choices=[BASE, *recipes], help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.contender:
        contend(options.contender, options.threads)
        return 0
    names = [BASE, *options.only]
    result = measure(names, threads=options.threads, rounds=options.steps)
    off, layers = seconds_when_off(), 4 * 8  # linears of a layer, layers of the bench model
    kept = show(result, names, off, layers * len(ROLES))
    draw_steps({name: result[name] for name in names if name != BASE}, MOST_RATIO, MOST_ON, options.out)
    print(f"drawn: {options.out}")
    if options.json:
        setting = {"threads": options.threads, "rounds": options.steps, "off_seconds": off}
        options.json.write_text(json.dumps(setting | {"recipes": result}, indent=2) + "\n")
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
