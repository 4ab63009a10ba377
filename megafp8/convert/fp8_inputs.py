"""Inputs of linears in transformers' model of a quantized folder: rounded by the stored scales; do these fit them?

Experts, which transformers 5 keeps fused in one module, are computed one after the other here, so that what each of
their matrices is multiplied with can be looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from megafp8.convert.by_layer import LAYER
from megafp8.convert.fp8_read import Decoded

Tensor = torch.Tensor
E4M3_MAX = 448.0
CLIPPED = 0.01  # share of an input's values on other text than its scale was made from
SMALLEST = 2.0**-10  # of the largest storable input that the text should reach: E4M3 then still has normals for it
# An expert's matrices by their foreign names: those that its input goes into, and the one behind them.
_FIRST, _SECOND = ("w1", "w3", "gate_proj", "up_proj"), ("w2", "down_proj")
See = Callable[[str, Tensor], Tensor]  # (foreign name of a linear, its input) -> the input to compute with


class Inputs:
    """Rounds inputs as a server does, layer by layer, and watches whether their scales fit.

    Attributes:
        shares: of each linear's inputs that its scale clips, on text that the scale was not made from; those above 0.
    """

    def __init__(self, decoded: Decoded) -> None:
        self._decoded = decoded
        self._seen: dict[str, _Seen] = {}

    @contextmanager
    def within(self, model: Any, number: int) -> Iterator[None]:
        """In it, quantized linears of layer `number`, which is all that `model` has, compute with rounded inputs."""
        ours = {}
        for name in self._decoded.steps:
            found = LAYER.match(name)
            if found and int(found[2]) == number:
                ours[LAYER.sub(r"\1.0.", name).removesuffix(".weight")] = name.removesuffix(".weight")
        with _through(model, list(ours), lambda name, x: self._served(ours[name], x)):
            yield

    def _served(self, name: str, x: Tensor) -> Tensor:
        if name in self._decoded.input_scales:
            self._seen[name] = _Seen(_limit(self._decoded, name), x)
        scale = x.abs().amax(-1, keepdim=True).clamp_min(1e-30) / E4M3_MAX  # as it comes, a token at a time
        if self._decoded.algorithm == "FP8":
            scale = torch.tensor(self._decoded.input_scales[name])
        return as_served(x, scale)

    @property
    def shares(self) -> dict[str, float]:
        return {name: found.share for name, found in self._seen.items() if found.share > 0}

    def problems(self) -> list[str]:
        """Scales that do not fit what was seen."""
        found = [
            f"{name}: inputs up to {seen.largest:.3g} do not fit a scale made for {seen.limit:.3g} "
            f"({seen.share:.2%} clipped)"
            for name, seen in self._seen.items()
            if seen.is_wrong(few=".experts." in name)
        ]
        for name in self._decoded.input_scales.keys() - self._seen.keys():  # experts to which the text sent no token
            alike = {seen.limit for known, seen in self._seen.items() if _kind(known) == _kind(name)}
            if alike and _limit(self._decoded, name) not in alike:
                found.append(f"{name}: no text reached it, and its input scale is not that of the other experts")
        return found


class _Seen:
    """What a linear was given: the share beyond what its scale can store, and the largest."""

    def __init__(self, limit: float, x: Tensor) -> None:
        size = x.abs()
        self.limit, self.largest = limit, float(size.max())
        self.share = float((size > limit).double().mean())

    def is_wrong(self, *, few: bool) -> bool:
        """An expert sees `few` tokens of the text, of which one value may be a large share: it must be far off too."""
        clips = self.share > CLIPPED and (not few or self.largest > 2 * self.limit)
        return clips or self.largest < SMALLEST * self.limit


def _limit(decoded: Decoded, name: str) -> float:
    return decoded.input_scales[name] * (6 * E4M3_MAX if decoded.algorithm == "NVFP4" else E4M3_MAX)


def _kind(name: str) -> tuple[str, str]:
    """Of an expert's linear: the layer's experts, and which of their matrices."""
    return name.partition(".experts.")[0], name.rpartition(".")[2]


def as_served(x: Tensor, scale: Tensor | float) -> Tensor:
    """What E4M3 codes under `scale` say of `x`."""
    return (x / scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).to(x.dtype) * scale


@contextmanager
def _through(model: Any, names: list[str], see: See) -> Iterator[None]:
    """Within it, each of these linears computes with what `see` makes of its input."""
    known = dict(model.named_modules())
    with ExitStack() as stack:
        for name in names:
            if name in known:
                hook = known[name].register_forward_pre_hook(
                    lambda _, args, name=name: (see(name, args[0]), *args[1:])
                )
                stack.callback(hook.remove)
        for place, experts in _experts(known, names).items():
            known[place].forward = _one_by_one(known[place], experts, see)
            stack.callback(delattr, known[place], "forward")
        yield


@dataclass(frozen=True)
class _Expert:
    first: tuple[str, ...]
    second: str


def _experts(known: dict[str, Any], names: list[str]) -> dict[str, dict[int, _Expert]]:
    """{fused module: {expert: its linears by the folder's names}}."""
    found: dict[str, dict[int, _Expert]] = {}
    for place, module in known.items():
        if hasattr(module, "gate_up_proj") and hasattr(module, "down_proj"):
            layer = place.rpartition(".experts")[0].rpartition(".")[0] + "."
            mine: dict[int, list[str]] = {}
            for name in names:
                if name.startswith(layer) and ".experts." in name:
                    mine.setdefault(int(name.split(".")[-2]), []).append(name)
            found[place] = {number: _expert(linears) for number, linears in mine.items()}
    return {place: experts for place, experts in found.items() if experts}


def _expert(linears: list[str]) -> _Expert:
    first = tuple(name for name in linears if name.endswith(_FIRST))
    (second,) = (name for name in linears if name.endswith(_SECOND))
    return _Expert(first, second)


def _one_by_one(module: Any, experts: dict[int, _Expert], see: See) -> Callable[..., Tensor]:
    """A fused module's forward with each expert for itself."""

    def forward(hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        whole = torch.zeros_like(hidden)
        for number in chosen.unique().tolist():
            token, place = torch.where(chosen == number)
            inputs = [see(name, hidden[token]) for name in experts[number].first]  # alike: gate and up have one scale
            gate, up = F.linear(inputs[0], module.gate_up_proj[number]).chunk(2, -1)
            y = F.linear(see(experts[number].second, module.act_fn(gate) * up), module.down_proj[number])
            whole.index_add_(0, token, y * weights[token, place, None])
        return whole

    return forward
