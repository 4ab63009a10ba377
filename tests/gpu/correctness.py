"""Every recipe on one backend of this machine, held against the emulated definition.

1. Codes and scales: bit for bit those that the definition makes on the CPU.
2. The three GEMMs of a linear in fp32 output, and a whole linear in bf16, against `emulated` exact: within the bounds
   of `bounds.py`, as a whole and in every row and column (a misplaced scale is wrong by whole powers of two).
3. Delayed scaling's state after three micro-batches: equal bit for bit.
4. A small decoder: the gradient may differ from the emulated one by less than that differs from BF16's.

Transformer Engine's layers own their GEMMs: of them only the last is asked.
"""

from __future__ import annotations

import sys
import traceback
from dataclasses import dataclass, field
from typing import Any

import torch

from megafp8.core import log
from megafp8.core.errors import ConfigError
from megafp8.fp8 import LinearState, backend, quantize, quantized_linear, recipe, update_states
from megafp8.fp8.linear import begin_step
from megafp8.fp8.quantized import QuantizedTensor
from megafp8.fp8.recipe import ROLES, Recipe, recipe_names
from tests.gpu.bounds import ROW_FACTOR, result_bound
from tests.gpu.model_check import model_checks
from tests.gpu.report import Clock, Figures, part_arguments

SHAPES = {False: (1024, 2048, 1536), True: (128, 256, 128)}  # tokens, in, out; `--tiny` or not
ODD_SHAPE = (208, 272, 80)  # multiples of 16 only: what one-scale recipes must take
MICRO_BATCHES = 3
Tensor = torch.Tensor


@dataclass
class Checks:
    """What was compared, with its error and bound."""

    found: list[dict[str, Any]] = field(default_factory=list)

    def add(self, what: str, error: float, bound: float) -> None:
        """One comparison; not a number is a failure."""
        self.found.append({"what": what, "error": error, "bound": bound, "passed": bool(error <= bound)})

    def equal(self, what: str, got: Tensor, want: Tensor) -> None:
        """Two tensors bit for bit; the error is the number of elements that differ."""
        if got.shape != want.shape or got.dtype != want.dtype:
            self.found.append({"what": f"{what}: {got.dtype} {tuple(got.shape)}, not {want.dtype} {tuple(want.shape)}",
                               "error": float("nan"), "bound": 0.0, "passed": False})  # fmt: skip
            return
        mine, other = (_bytes(t) for t in (got, want))
        self.add(what, float((mine != other).sum()), 0.0)

    def near(self, what: str, got: Tensor, want: Tensor, bound: float) -> None:
        """The norm of the difference against that of `want`: of all, and of every row and column."""
        wide, reference = got.detach().double(), want.detach().double()
        difference = wide - reference
        self.add(what, float(difference.norm() / reference.norm()), bound)
        for dim, name in ((1, "rows"), (0, "columns")) if got.dim() == 2 else ():
            worst = difference.norm(dim=dim) / reference.norm(dim=dim).clamp(min=1e-30)
            self.add(f"{what}, worst of its {name}", float(worst.max()), ROW_FACTOR * bound)

    @property
    def passed(self) -> bool:
        return all(check["passed"] for check in self.found)


def operands(shape: tuple[int, int, int], step: int, device: torch.device) -> dict[str, Tensor]:
    """Input, weight, gradient and bias of a linear; blocks of 16 x 16 lie at different powers of two."""
    tokens, inputs, outputs = shape
    generator = torch.Generator().manual_seed(100 + step)

    def uneven(rows: int, columns: int, size: float) -> Tensor:
        powers = torch.randint(-3, 4, (-(-rows // 16), -(-columns // 16)), generator=generator)
        spread = powers.repeat_interleave(16, 0).repeat_interleave(16, 1)[:rows, :columns]
        return (torch.randn(rows, columns, generator=generator) * torch.exp2(spread.float()) * size).bfloat16()

    made = {
        "input": uneven(tokens, inputs, 1.0),
        "weight": uneven(outputs, inputs, 0.02),
        "grad_output": uneven(tokens, outputs, 1e-4),
        "bias": torch.randn(outputs, generator=generator).bfloat16(),
    }
    return {name: tensor.to(device) for name, tensor in made.items()}


def check_codes(checks: Checks, made: Recipe, chosen: Any, tensors: dict[str, Tensor]) -> None:
    """The backend's quantization of each role against the definition's, which runs on the CPU."""
    for role in ROLES:
        spec, x = made.spec(role), tensors[role]
        seed = torch.tensor([7], dtype=torch.int64)
        scale = torch.tensor([37.7]) if spec.delayed else None
        want = quantize(x.cpu(), spec, scale, columnwise=True, seed=seed)
        got, amax = chosen.quantize(
            x, spec, None if scale is None else scale.to(x.device), columnwise=True, seed=seed.to(x.device)
        )
        if amax is not None:
            checks.equal(f"{role} amax", amax, x.float().abs().amax().reshape(1))
        for side in ("rows", "columnwise"):
            mine, other = getattr(got, side), getattr(want, side)
            checks.equal(f"{role} {side} codes", mine.data, other.data)
            checks.equal(f"{role} {side} scales", mine.scale_inv, other.scale_inv)
            if other.tensor_amax is not None:
                checks.equal(f"{role} {side} tensor amax", mine.tensor_amax, other.tensor_amax)


def check_gemms(checks: Checks, made: Recipe, chosen: Any, tensors: dict[str, Tensor], what: str) -> None:
    """fprop, dgrad and wgrad of the backend's own operands, fp32 results."""
    exact = backend("emulated", "exact")
    quantized: dict[str, QuantizedTensor] = {}
    for role in ROLES:
        seed = torch.tensor([7], dtype=torch.int64, device=tensors[role].device)
        quantized[role], _ = chosen.quantize(tensors[role], made.spec(role), None, seed=seed)
    x, w, g = (quantized[role] for role in ROLES)
    sides = {"fprop": (x.rows, w.rows), "dgrad": (g.rows, w.columnwise), "wgrad": (g.columnwise, x.columnwise)}
    for name, (a, b) in sides.items():
        precise = name != "fprop"
        got = chosen.gemm(a, b, None, torch.float32, precise=precise)
        want = exact.gemm(a, b, None, torch.float32, precise=True)
        bound = result_bound(a.shape[1], fast=not precise, capability=_capability(got), bf16=False)
        checks.near(f"{what}{name}", got, want, bound)


def check_linear(checks: Checks, made: Recipe, chosen: Any, shape: tuple[int, int, int], what: str) -> None:
    """A linear with bias, forward and backward over micro-batches, in bf16; and its state."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    states = [LinearState("layer", made, b, device) for b in (chosen, backend("emulated", "exact", device=device))]
    tokens, inputs, outputs = shape
    for step in range(MICRO_BATCHES):
        tensors = operands(shape, step, device)
        results = []
        for state in states:
            begin_step([state], step, 1234)
            x, weight, bias = (tensors[n].clone().requires_grad_() for n in ("input", "weight", "bias"))
            y = quantized_linear(x, weight, bias, state)
            y.backward(tensors["grad_output"])
            results.append({"y": y, "dx": x.grad, "dw": weight.grad, "db": bias.grad})
            update_states([state])
            state.drop_weight_cache()
        if step and step < MICRO_BATCHES - 1:
            continue
        got, want = results
        for name, terms in (("y", inputs), ("dx", outputs), ("dw", tokens)):
            bound = result_bound(terms, fast=name == "y", capability=_capability(got[name]), bf16=True)
            checks.near(f"{what}linear {name}, micro-batch {step}", got[name], want[name], bound)
        checks.equal(f"{what}linear db, micro-batch {step}", got["db"], want["db"])
    for name, tensor in states[0].tensors().items():
        checks.equal(f"{what}state {name}", tensor, states[1].tensors()[name])


def _bytes(tensor: Tensor) -> Tensor:
    # clone, for contiguous() keeps odd strides of dims of size 1
    return tensor.detach().cpu().clone(memory_format=torch.contiguous_format).view(torch.uint8)


def _capability(tensor: Tensor) -> tuple[int, int] | None:
    return torch.cuda.get_device_capability(tensor.device) if tensor.is_cuda else None


def check_recipe(name: str, kind: str, *, tiny: bool) -> dict[str, Any]:
    """All checks of one recipe, or why it does not run here."""
    made, checks, device = recipe(name), Checks(), torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if kind != "te":
        try:
            chosen = backend(kind, device=device, recipe=made)
        except ConfigError as error:
            return {"status": "skipped", "reason": str(error)}
        shape = SHAPES[tiny]
        check_codes(checks, made, chosen, operands(shape, 0, device))
        check_gemms(checks, made, chosen, operands(shape, 0, device), "")
        check_linear(checks, made, chosen, shape, "")
        if chosen.supports(made, *ODD_SHAPE[1:]) is None:
            check_gemms(checks, made, chosen, operands(ODD_SHAPE, 0, device), "odd dims ")
    try:
        for what, error, bound in model_checks(name, kind, device):
            checks.add(what, error, bound)
    except ConfigError as error:
        if not checks.found:
            return {"status": "skipped", "reason": str(error)}
        raise
    return {"status": "passed" if checks.passed else "failed", "checks": checks.found}


def main() -> int:
    parser = part_arguments("Recipes on a backend against the emulated definition.")
    parser.add_argument("--backend", required=True, help="native or te")
    parser.add_argument("--without", default="", help="recipes that are done, joined by commas")
    args = parser.parse_args()
    log.set_up(quiet=True)
    figures, clock = Figures(args.out), Clock(args.seconds)
    results: dict[str, Any] = {}
    for name in recipe_names():
        if name in args.without.split(","):
            continue
        if clock.left < 5:
            results[name] = {"status": "skipped", "reason": "the part's time is up"}
            continue
        figures.put(recipes=results | {name: {"status": "running"}})
        try:
            results[name] = check_recipe(name, args.backend, tiny=args.tiny)
        except Exception as error:  # the other recipes go on; a lost device ends the process, and it starts anew
            results[name] = {"status": "error", "reason": f"{type(error).__name__}: {error}".splitlines()[0]}
            traceback.print_exc()
        figures.put(recipes=results)
    statuses = [result["status"] for result in results.values()]
    worst = next((s for s in ("error", "failed", "passed") if s in statuses), "skipped")
    figures.put(recipes=results, status=worst)
    return 0


if __name__ == "__main__":
    sys.exit(main())
