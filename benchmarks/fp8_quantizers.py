"""Quantizers of every recipe, compiled against as written, on one matrix; whether both give the same bits is checked.

Both take turns on it; ratios are medians over the rounds of CPU seconds.

    python -m benchmarks.fp8_quantizers --size 2048
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.fp8_picture import draw_quantizers
from megafp8.fp8.kernels import Kernels, compiled_kernels, eager_kernels
from megafp8.fp8.recipe import ROLES, TensorSpec, recipe, recipe_names

LEAST_SPEEDUP = 3.0
Made = tuple[torch.Tensor, ...]


def cases() -> Iterator[tuple[str, TensorSpec, bool]]:
    """Every different quantization of the recipes' defaults: its name, spec, and whether it is column-wise."""
    seen: set[TensorSpec] = set()
    for name in recipe_names():
        for role in ROLES:
            spec = recipe(name).spec(role)
            if spec in seen:
                continue
            seen.add(spec)
            yield f"{name} {role}", spec, False
            if spec.block is not None and not spec.same_both_ways:
                yield f"{name} {role}, column-wise", spec, True


def quantizer(kernels: Kernels, x: torch.Tensor, spec: TensorSpec, columnwise: bool) -> Callable[[], Made]:
    """One quantization of `x` by these kernels."""
    seed = torch.tensor([20_26])
    if spec.block is not None:
        return lambda: kernels.quantize_blocks(x, spec, columnwise=columnwise, seed=seed)
    scale = torch.tensor([91.7]) if spec.delayed else None
    return lambda: kernels.quantize(x, spec, scale)


def measure(size: int, rounds: int) -> dict[str, dict[str, Any]]:
    """Milliseconds of both, their ratio, and whether the results are equal."""
    x = torch.randn(size, size, generator=torch.Generator().manual_seed(0)).bfloat16()
    result = {}
    for name, spec, columnwise in cases():
        pair = {
            "compiled": quantizer(compiled_kernels(), x, spec, columnwise),
            "eager": quantizer(eager_kernels(), x, spec, columnwise),
        }
        same = all(torch.equal(a, b) for a, b in zip(pair["compiled"](), pair["eager"](), strict=True))
        spent: dict[str, list[float]] = {key: [] for key in pair}
        for number in range(rounds):
            for key in list(pair)[:: 1 if number % 2 else -1]:
                start = time.process_time()
                pair[key]()
                spent[key].append(time.process_time() - start)
        ratios = [a / b for a, b in zip(spent["eager"], spent["compiled"], strict=True)]
        result[name] = {
            "compiled_ms": statistics.median(spent["compiled"]) * 1e3,
            "eager_ms": statistics.median(spent["eager"]) * 1e3,
            "speedup": statistics.median(ratios),
            "equal": same,
        }
    return result


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=2048, help="of the square matrix")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path, default=Path("runs/bench/fp8_quantizers.svg"), help="the picture")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    if compiled_kernels() is eager_kernels():
        print("no C++ compiler works here: nothing to compare")
        return 1
    result = measure(options.size, options.rounds)
    print(f"{'quantizer':<36}{'eager ms':>10}{'compiled ms':>13}{'ns a value':>12}{'x faster':>10}  bits")
    for name, row in result.items():
        nanoseconds = row["compiled_ms"] * 1e6 / options.size**2
        print(
            f"{name:<36}{row['eager_ms']:>10.1f}{row['compiled_ms']:>13.2f}{nanoseconds:>12.2f}{row['speedup']:>10.1f}"
            f"  {'equal' if row['equal'] else 'DIFFERENT'}"
        )
    draw_quantizers(result, LEAST_SPEEDUP, options.out)
    print(f"drawn: {options.out}; bound: compiled >= {LEAST_SPEEDUP} x as fast as eager, bit for bit equal")
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    return 0 if all(row["equal"] and row["speedup"] >= LEAST_SPEEDUP for row in result.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
