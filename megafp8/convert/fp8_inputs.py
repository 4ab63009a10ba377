"""Inputs of linears in transformers' model of a quantized folder: do the stored scales fit them, and rounded by them.

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

from megafp8.convert.fp8_read import Decoded

Tensor = torch.Tensor
E4M3_MAX = 448.0
CLIPPED = 0.01  # share of an input's values on other text than its scale was made from
SMALLEST = 2.0**-10  # of the largest storable input that the text should reach: E4M3 then still has normals for it
# An expert's matrices by their foreign names: those that its input goes into, and the one behind them.
_FIRST, _SECOND = ("w1", "w3", "gate_proj", "up_proj"), ("w2", "down_proj")
See = Callable[[str, Tensor], Tensor]  # (foreign name of a linear, its input) -> the input to compute with


def watch_inputs(model: Any, decoded: Decoded, ids: Tensor, problems: list[str]) -> dict[str, float]:
    """The share of each linear's inputs that its scale clips, on text that the scale was not made from."""
    seen: dict[str, _Seen] = {}

    def watch(name: str, x: Tensor) -> Tensor:
        seen[name] = _Seen(_limit(decoded, name), x)
        return x

    if not decoded.input_scales:
        return {}
    with _through(model, decoded, watch):
        model(ids)
    for name, found in seen.items():
        if found.is_wrong(few=".experts." in name):
            problems.append(
                f"{name}: inputs up to {found.largest:.3g} do not fit a scale made for {found.limit:.3g} "
                f"({found.share:.2%} clipped)"
            )
    for name in decoded.input_scales.keys() - seen.keys():  # experts to which the text sent no token
        alike = {other.limit for known, other in seen.items() if _kind(known) == _kind(name)}
        if alike and _limit(decoded, name) not in alike:
            problems.append(f"{name}: no text reached it, and its input scale is not that of the other experts")
    return {name: found.share for name, found in seen.items() if found.share > 0}


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
def rounded_inputs(model: Any, decoded: Decoded) -> Iterator[None]:
    """Within it, linears see their inputs as FP8 codes under the stored scales, or under scales of each token."""

    def rounded(name: str, x: Tensor) -> Tensor:
        scale = x.abs().amax(-1, keepdim=True).clamp_min(1e-30) / E4M3_MAX  # as it comes, a token at a time
        if decoded.algorithm == "FP8":
            scale = torch.tensor(decoded.input_scales[name])
        return as_served(x, scale)

    with _through(model, decoded, rounded):
        yield


@contextmanager
def _through(model: Any, decoded: Decoded, see: See) -> Iterator[None]:
    """Within it, every quantized linear computes with what `see` makes of its input."""
    known = dict(model.named_modules())
    names = [name.removesuffix(".weight") for name in decoded.steps]
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
