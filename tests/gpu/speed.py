"""One linear of the 1.5B model's MLP, forward and backward, BF16 against every recipe; and the plain BF16 product."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from megafp8.core import log
from megafp8.core.errors import ConfigError
from megafp8.fp8 import LinearState, backend, quantized_linear, recipe, update_states
from megafp8.fp8.linear import begin_step
from megafp8.fp8.recipe import recipe_names
from tests.gpu.report import Clock, Figures, part_arguments

SHAPES = {False: (16384, 2048, 12288), True: (128, 256, 512)}  # tokens, in, out: gate and up of the MLP, or tiny
MOST_SECONDS, WARM_UP, MOST_REPEATS = 2.0, 3, 50


def median_seconds(work: Callable[[], object], device: torch.device) -> float:
    """Median wall time of `work`, the device's queue empty before and after."""

    def once() -> float:
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - start

    for _ in range(WARM_UP):
        once()
    times: list[float] = []
    while len(times) < MOST_REPEATS and sum(times) < MOST_SECONDS:
        times.append(once())
    return statistics.median(times)


def linear_of(
    x: torch.Tensor, weight: torch.Tensor, grad: torch.Tensor, state: LinearState | None
) -> Callable[[], None]:
    """Forward and backward with a fresh weight, as in a step of one micro-batch."""

    def work() -> None:
        x.grad = weight.grad = None
        if state is None:
            F.linear(x, weight).backward(grad)
            return
        state.drop_weight_cache()
        quantized_linear(x, weight, None, state).backward(grad)
        update_states([state])

    return work


def main() -> int:
    args = part_arguments("Speed of one linear.").parse_args()
    log.set_up(quiet=True)
    figures, clock = Figures(args.out), Clock(args.seconds)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokens, inputs, outputs = SHAPES[args.tiny]
    x, weight, grad = (
        torch.randn(shape, device=device, dtype=torch.bfloat16)
        for shape in ((tokens, inputs), (outputs, inputs), (tokens, outputs))
    )
    product = median_seconds(lambda: x @ weight.t(), device)
    x.requires_grad_()
    weight.requires_grad_()
    base = median_seconds(linear_of(x, weight, grad, None), device)
    linears: dict[str, Any] = {"bf16": {"milliseconds": base * 1e3, "speedup": 1.0}}
    figures.put(
        tokens=tokens, in_features=inputs, out_features=outputs, linears=linears,
        bf16_product_tflops=2 * tokens * inputs * outputs / product / 1e12,
    )  # fmt: skip
    for name in recipe_names():
        if clock.left < 8:
            linears[name] = {"reason": "the part's time is up"}
            continue
        try:
            made = recipe(name)
            state = LinearState("layer", made, backend("native", device=device, recipe=made), device)
            begin_step([state], 1, 1234)
            seconds = median_seconds(linear_of(x, weight, grad, state), device)
            linears[name] = {"milliseconds": seconds * 1e3, "speedup": base / seconds}
        except ConfigError as error:
            linears[name] = {"reason": str(error)}
        figures.put(linears=linears)
    figures.put(linears=linears, status="passed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
