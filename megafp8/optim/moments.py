"""NarrowMoments: Adam's two moments of a run's parameters in bf16 or FP8, and the fused step over them."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from megafp8.core.layout import Layout
from megafp8.core.log import event, get_logger
from megafp8.core.rng import seed_for
from megafp8.optim.config import OptimizerConfig
from megafp8.optim.narrow import EXP_AVG, EXP_AVG_SQ, Form, block_width, random_bits, update_kernel
from megafp8.parallel.mesh import Mesh

Tensor = torch.Tensor
_log = get_logger(__name__)
CHUNK_ELEMENTS = 1 << 20  # updated in one call: bounds what a kernel holds in between


@dataclass(eq=False)
class Moment:
    """One moment of one parameter's piece.

    Attributes:
        data: of the piece's shape, in `form.dtype`.
        exponents: uint8 [B, 1] in FP8: a block's scale is 2**(exponent - 127), E8M0's code; else [0, 1].
    """

    form: Form
    data: Tensor
    exponents: Tensor

    @staticmethod
    def zeros(form: Form, like: Tensor) -> Moment:
        """Zeros of the shape and on the device of `like`."""
        data = torch.zeros_like(like, dtype=form.dtype)
        count = like.numel() // block_width(like.shape[-1]) if form.scaled else 0
        return Moment(form, data, torch.full((count, 1), 127, dtype=torch.uint8, device=like.device))

    @property
    def num_bytes(self) -> int:
        """What it takes."""
        return self.data.nbytes + self.exponents.nbytes

    def values(self) -> Tensor:
        """A copy as bf16, exact; fp32 moments themselves."""
        if self.form.dtype == torch.float32:
            return self.data
        if not self.data.numel():
            return self.data.to(torch.bfloat16, copy=True)
        return self.form.read(blocks(self.data), self.exponents).view(self.data.shape).to(torch.bfloat16)

    def fill(self, values: Tensor) -> None:
        """Store `values`, of the piece's shape: each as the nearest that can be stored."""
        if not values.numel() or values is self.data:
            return
        found = blocks(values.float().contiguous())
        data, exponents = self.form.write(found, torch.full_like(found, 0.5))
        self.data.copy_(data.view(self.data.shape))
        if exponents is not None:
            self.exponents.copy_(exponents)


def blocks(piece: Tensor) -> Tensor:
    """A contiguous piece as [B, W], a block a row; a view."""
    return piece.view(-1, block_width(piece.shape[-1]))


class NarrowMoments:
    """The moments of all parameters that AdamW updates, by global name.

    Args:
        masters: fp32, each a contiguous piece.
        grads: their gradients, of the same shapes.
        layouts: of the pieces.
        decays: names that weight decay applies to.
        compiled: compile the kernel.

    Attributes:
        exp_avg, exp_avg_sq: by name.
    """

    def __init__(
        self,
        masters: Mapping[str, Tensor],
        grads: Mapping[str, Tensor],
        layouts: Mapping[str, Layout],
        config: OptimizerConfig,
        mesh: Mesh,
        *,
        decays: frozenset[str],
        compiled: bool,
    ) -> None:
        self._masters, self._grads, self._config, self._decays = masters, grads, config, decays
        mean, square = EXP_AVG[config.exp_avg_dtype], EXP_AVG_SQ[config.exp_avg_sq_dtype]
        self.exp_avg = {name: Moment.zeros(mean, master) for name, master in masters.items()}
        self.exp_avg_sq = {name: Moment.zeros(square, master) for name, master in masters.items()}
        self._first = {n: _first_of(layouts[n], mesh, m.device) for n, m in masters.items() if m.numel()}
        plain = update_kernel(mean, square)
        self._device = next(iter(masters.values())).device if masters else torch.device("cpu")
        self._kernel = _compiled(plain, self._device.type) if compiled else plain
        chosen: dict[str, Any] = {"exp_avg_dtype": config.exp_avg_dtype, "exp_avg_sq_dtype": config.exp_avg_sq_dtype}
        event(_log, "optimizer kernel", kernel="narrow", **chosen, compiled=self._kernel is not plain)

    @property
    def num_bytes(self) -> int:
        """Both moments and what goes with them."""
        moments = (*self.exp_avg.values(), *self.exp_avg_sq.values())
        return sum(m.num_bytes for m in moments) + sum(first.nbytes for first in self._first.values())

    def values(self) -> dict[str, dict[str, Tensor]]:
        """{"exp_avg", "exp_avg_sq"} -> copies by name (`Moment.values`)."""
        kinds = {"exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}
        return {kind: {name: m.values() for name, m in named.items()} for kind, named in kinds.items()}

    @torch.no_grad()
    def fill(self, values: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Store what `values()` has given, changed or not."""
        for kind, named in {"exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}.items():
            for name, moment in named.items():
                moment.fill(values[kind][name])

    @torch.no_grad()
    def step(self, step: int, lr: float, grad_scale: float) -> None:
        """Take step number `step` (from 1) at rate `lr`, gradients times `grad_scale`, which they are left with."""
        if grad_scale != 1.0:
            torch._foreach_mul_([self._grads[name] for name in self._first], grad_scale)
        numbers = {decays: self._numbers(step, lr, decays=decays).to(self._device) for decays in (True, False)}
        seeds = [_int32(seed_for(0, "moments", name, step)) for name in self._first]
        seed_of = dict(zip(self._first, torch.tensor(seeds, dtype=torch.int32).to(self._device).split(1), strict=True))
        for name, first in self._first.items():
            mean, square = self.exp_avg[name], self.exp_avg_sq[name]
            tensors = (self._masters[name], self._grads[name], mean.data, square.data)
            rows = [blocks(tensor) for tensor in tensors]
            height = max(1, CHUNK_ELEMENTS // rows[0].shape[1])
            for start in range(0, len(rows[0]), height):
                part = slice(start, start + height)
                master, grad, mean_data, square_data = (tensor[part] for tensor in rows)
                exponents = [m.exponents[part] if m.form.scaled else m.exponents for m in (mean, square)]
                self._kernel(
                    master, grad, mean_data, exponents[0], square_data, exponents[1], first[part], seed_of[name],
                    numbers[name in self._decays],
                )  # fmt: skip

    def _numbers(self, step: int, lr: float, *, decays: bool) -> Tensor:
        config, decay = self._config, self._config.weight_decay if decays else 0.0
        mean, root = lr / (1 - config.beta1**step), (1 - config.beta2**step) ** -0.5
        values = (1 - config.beta1, config.beta2, 1 - config.beta2, 1 - lr * decay, mean, root, config.eps)
        return torch.tensor(values, dtype=torch.float64).float()


def _int32(number: int) -> int:
    low = number & 0xFFFFFFFF
    return low - (1 << 32) if low >= 1 << 31 else low


def _first_of(layout: Layout, mesh: Mesh, device: torch.device) -> Tensor:
    """The low 32 bits of the index into the global tensor of each block's first element, int32 [B, 1]."""
    *lead, last = layout.local_slices(mesh)
    width = block_width(last.stop - last.start)
    index = torch.zeros((), dtype=torch.int64, device=device)
    for size, piece in zip(layout.shape[:-1], lead, strict=True):
        index = index.unsqueeze(-1) * size + torch.arange(piece.start, piece.stop, device=device)
    index = index.unsqueeze(-1) * layout.shape[-1] + torch.arange(last.start, last.stop, width, device=device)
    return index.reshape(-1, 1).to(torch.int32)


@functools.cache
def _refusal(device: str) -> str:
    """Why torch.compile does not work on this kind of device here, or nothing."""
    first, seed = torch.zeros(4, 1, dtype=torch.int32, device=device), torch.zeros(1, dtype=torch.int32, device=device)
    try:
        torch.compile(random_bits, dynamic=True, fullgraph=True)(first, 64, seed)
    except torch._dynamo.exc.TorchDynamoException as error:
        return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return ""


def _compiled(kernel: Callable[..., None], device: str) -> Callable[..., None]:
    if refusal := _refusal(device):
        event(_log, "narrow moments run uncompiled, slower", level=logging.WARNING, reason=refusal)
        return kernel
    return torch.compile(kernel, dynamic=True, fullgraph=True)
