"""Statistics of quantization under Transformer Engine's names; they cost nothing unless armed for a step.

    underflows%      share of elements that were not zero and became zero
    overflows%       share beyond the format's range at the scale in use; where one scale serves the tensor
    cur_amax         largest magnitude
    amax_ratio       that over the largest in the amax history when the step began; delayed scaling
    scale            the one in use, the smallest where there were several
    scale_inv_min, scale_inv_max    inverse scales; of all blocks, blocks of zeros left out
    mse              mean squared quantization error

Names are Transformer Engine's (debug features LogFp8TensorStats and LogTensorStats) where it has one. A step's
micro-batches count together, a weight once. `what_if` measures a recipe that is not the one in use, under its prefix
(`mxfp8_underflows%`).

Over ranks: counts, squared errors and numbers of elements are summed, extremes joined, and shares taken last. So a
number is that of the whole tensor where ranks hold pieces of it; where they hold copies, all counts are multiplied
alike and shares stay as they are.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from megafp8.fp8.backends.emulated import Emulated
from megafp8.fp8.linear import LinearState
from megafp8.fp8.quantized import QuantizedTensor
from megafp8.fp8.recipe import ROLES, Recipe
from megafp8.fp8.stat_kernels import measure

NAMES = (
    "underflows%", "overflows%", "cur_amax", "amax_ratio", "scale", "scale_inv_min", "scale_inv_max", "mse",
)  # fmt: skip
# what Transformer Engine calls the recipes in the names of statistics
PREFIXES = {
    "delayed": "fp8_delayed_scaling_", "current": "fp8_current_scaling_", "blockwise": "fp8_block_scaling_",
    "mxfp8": "mxfp8_", "nvfp4": "nvfp4_",
}  # fmt: skip
_SUMS, _EXTREMES = 4, 4  # underflows, overflows, squared error, elements; amax, -scale_inv_min, scale_inv_max, history


@dataclass(eq=False)
class Collector:
    """A layer's observer: keeps what was measured of each role, as tensors, so that nothing waits for the device.

    Attributes:
        measured: by (role, prefix): number of elements, and what `measure` gave, once a quantization.
        history: of delayed scaling, fp32 [3], the largest past amax of each role when it was armed; 0 for none.
    """

    state: LinearState
    what_if: Mapping[str, Recipe]
    history: torch.Tensor | None = None
    measured: dict[tuple[str, str], list[tuple[int, torch.Tensor]]] = field(default_factory=dict)

    @torch.no_grad()
    def __call__(self, role: str, x: torch.Tensor, quantized: QuantizedTensor, amax: torch.Tensor | None) -> None:
        if x.numel() == 0 or (role == "weight" and (role, "") in self.measured):
            return
        self._keep(role, "", x, quantized)
        if not self.what_if:
            return
        emulated = Emulated(compiled=self._compiled)
        flat = x.detach().reshape(-1, x.shape[-1])
        for name, recipe in self.what_if.items():
            seed = torch.tensor([self.state.step], device=x.device)
            other, _ = emulated.quantize(flat, recipe.spec(role), None, columnwise=False, seed=seed)
            self._keep(role, PREFIXES[name], flat, other)

    def _keep(self, role: str, prefix: str, x: torch.Tensor, quantized: QuantizedTensor) -> None:
        found = measure(x, quantized.rows, compiled=self._compiled)
        self.measured.setdefault((role, prefix), []).append((x.numel(), found))

    @property
    def _compiled(self) -> bool:
        return bool(getattr(self.state.backend, "compiled", False))


def arm(states: Iterable[LinearState], *, modules: str = "", what_if: Mapping[str, Recipe] | None = None) -> None:
    """Collect from the next quantizations on, until `read`.

    Args:
        modules: a regular expression found in the names of those to look at; empty = all.
        what_if: recipes by name that are measured beside the one in use; not delayed scaling, whose scales come from
            tensors that only a run in it has seen.
    """
    chosen = [state for state in states if re.search(modules, state.name)]
    for state in chosen:
        state.observer = Collector(state, what_if or {})
    by_length: dict[int, list[Collector]] = {}
    for state in chosen:
        history = state.roles["input"].tensors.get("amax_history")
        if history is not None and len(history) > 1:
            assert isinstance(state.observer, Collector)
            by_length.setdefault(len(history), []).append(state.observer)
    for collectors in by_length.values():
        past = torch.stack([c.state.roles[r].tensors["amax_history"][1:] for c in collectors for r in ROLES])
        largest = torch.nan_to_num(past, nan=0.0, posinf=torch.inf).amax(1).view(-1, len(ROLES))
        for collector, part in zip(collectors, largest, strict=True):
            collector.history = part


@torch.no_grad()
def read(states: Iterable[LinearState], group: dist.ProcessGroup | None = None) -> dict[str, float]:
    """`{"<module>.<role>.<prefix><statistic>": value}` of all that ran since `arm`, and disarm.

    Args:
        group: the ranks with pieces or copies of the same layers' tensors; all call it, all get the same.
    """
    collectors = []
    for state in states:
        if isinstance(state.observer, Collector):
            collectors.append(state.observer)
        state.observer = None
    if not collectors:
        return {}
    keys = [(c, role, prefix) for c in collectors for role in ROLES for prefix in _prefixes(c)]
    device = collectors[0].state.device if group is not None else "cpu"
    sums, extremes = (part.to(device) for part in _joined(keys))
    if group is not None:
        dist.all_reduce(sums, dist.ReduceOp.SUM, group=group)
        dist.all_reduce(extremes, dist.ReduceOp.MAX, group=group)
    result: dict[str, float] = {}
    for (collector, role, prefix), total, extreme in zip(keys, sums.tolist(), extremes.tolist(), strict=True):
        for name, value in _statistics(total, extreme):
            recipe = collector.what_if[_recipe_of(prefix)] if prefix else collector.state.recipe
            if name not in ("overflows%", "scale") or recipe.spec(role).block is None:
                result[f"{collector.state.name}.{role}.{prefix}{name}"] = value
    return result


def _prefixes(collector: Collector) -> list[str]:
    return ["", *(PREFIXES[name] for name in collector.what_if)]


def _recipe_of(prefix: str) -> str:
    return next(name for name, other in PREFIXES.items() if other == prefix)


def _joined(keys: list[tuple[Collector, str, str]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums and extremes over the quantizations of each key, fp64 [T, 4] each, on the CPU; -infinity for none."""
    sums = torch.zeros(len(keys), _SUMS, dtype=torch.float64)
    extremes = torch.full((len(keys), _EXTREMES), -torch.inf, dtype=torch.float64)
    rows = [row for row, (c, role, prefix) in enumerate(keys) for _ in c.measured.get((role, prefix), ())]
    parts = [part for c, role, prefix in keys for part in c.measured.get((role, prefix), ())]
    if parts:
        found = torch.stack([tensor for _, tensor in parts]).double().cpu()  # waits for the device, once
        counts = torch.tensor([[count] for count, _ in parts], dtype=torch.float64)
        index = torch.tensor(rows)
        sums.index_add_(0, index, torch.cat([found[:, :3], counts], dim=1))
        largest = torch.stack([found[:, 3], -found[:, 4], found[:, 5]], dim=1)
        extremes[:, :3].scatter_reduce_(0, index[:, None].expand(-1, 3), largest, "amax")
    histories = {id(c): c.history.tolist() for c, _, _ in keys if c.history is not None}
    for row, (collector, role, prefix) in enumerate(keys):
        if not prefix and id(collector) in histories:
            extremes[row, 3] = histories[id(collector)][ROLES.index(role)]
    return sums, extremes


def _statistics(sums: list[float], extremes: list[float]) -> Iterator[tuple[str, float]]:
    """Names and values of one tensor; nothing if it did not occur."""
    underflows, overflows, squares, count = sums
    amax, least, largest, history = extremes
    if not count:
        return
    yield "underflows%", 100.0 * underflows / count
    yield "overflows%", 100.0 * overflows / count
    yield "cur_amax", amax
    if history > 0:
        yield "amax_ratio", amax / history
    yield "scale", 1.0 / largest if largest else float("inf")
    yield "scale_inv_min", -least
    yield "scale_inv_max", largest
    yield "mse", squares / count
