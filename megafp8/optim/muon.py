"""Muon: hidden matrices move by their orthogonalized momentum, everything else by AdamW.

Jordan et al. 2024 (kellerjordan.github.io/posts/muon); the scale that gives an update AdamW's root mean square, and so
lets it use AdamW's learning rate and weight decay, from Moonlight (arXiv 2502.16982, 2.2). Numbers as torch.optim.Muon.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from megafp8.core.layout import Layout
from megafp8.optim.adamw import AdamW
from megafp8.optim.config import OptimizerConfig
from megafp8.optim.matrices import is_hidden_matrix, matrices_of
from megafp8.optim.matrix_exchange import MatrixExchange
from megafp8.parallel.mesh import Mesh
from megafp8.parallel.pieces import own_piece
from megafp8.parallel.weight_gather import Coded

Tensor = torch.Tensor
# The quintic's coefficients: the steepest slope at 0 that still brings singular values into about [0.7, 1.2] (Jordan).
_A, _B, _C = 3.4445, -4.7750, 2.0315
_EPS = 1e-7


def orthogonalized(matrices: Tensor, steps: int) -> Tensor:
    """The nearest semi-orthogonal matrix, roughly, of each of `matrices` [N, R, C] (bf16 or fp64): Newton-Schulz."""
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    # the spectral norm is at most Frobenius', so at most 1 from here on
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=_EPS)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=_B, alpha=_C), x, beta=_A)
    return x.mT if tall else x


class Muon:
    """The optimizer of a run with `optimizer.name = "muon"`; AdamW's interface.

    Each rank keeps the momentum of its pieces, in the masters' dtype whatever AdamW's moments are in: every direction
    of a momentum is brought to one length, those that are rounding noise too. Whole matrices are orthogonalized each on
    one rank, shared out over all ranks of the pipeline stage by cost, in bf16 (fp64 for fp64 masters); only the pieces
    of the momentum and of the result travel. A split of a matrix, over tp, experts or ZeRO, does not change the
    result.

    Args:
        named_params: as for AdamW.
        config: hyper-parameters.
        mesh: the mesh whose pieces the parameters are.
        row_parts: by a parameter's name, the heights of the maps stacked along its rows (`matrices_of`).
        compiled, coded: as for AdamW.

    Attributes:
        costs: of each rank of the pipeline stage, in rank order (`Matrix.cost`).

    Raises:
        ConfigError: as AdamW.
    """

    def __init__(
        self,
        named_params: Sequence[tuple[str, nn.Parameter]],
        config: OptimizerConfig,
        mesh: Mesh,
        row_parts: Callable[[str], Sequence[int]],
        *,
        compiled: bool = False,
        coded: Mapping[str, Coded] | None = None,
    ) -> None:
        self._config = config
        hidden = {n: own_piece(p) for n, p in named_params if is_hidden_matrix(n, own_piece(p).layout)}
        self._adamw = AdamW(named_params, config, mesh, elsewhere=hidden, compiled=compiled, coded=coded)
        self._layouts = {name: piece.layout for name, piece in hidden.items()}
        self._grads = {name: piece.grad for name, piece in hidden.items()}
        self._masters = {name: self._adamw.masters[name] for name in hidden}
        self._momentum = {name: torch.zeros_like(master) for name, master in self._masters.items()}
        matrices = [m for n, at in self._layouts.items() for m in matrices_of(n, at.shape, row_parts(n))]
        self._exchange = MatrixExchange(matrices, self._layouts, mesh, named_params[0][1].device)
        self.costs = self._exchange.costs
        self._scales = {name: torch.ones_like(master[..., :1]) for name, master in self._masters.items()}
        for matrix, window in self._exchange.windows:
            scale = config.muon_rms * math.sqrt(max(matrix.shape))
            self._scales[matrix.name][window.lead][window.local_rows] = scale

    @property
    def step_count(self) -> int:
        """Steps taken; set it after loading."""
        return self._adamw.step_count

    @step_count.setter
    def step_count(self, count: int) -> None:
        self._adamw.step_count = count

    @property
    def kernel_name(self) -> str:
        """AdamW's kernel, for what is no hidden matrix."""
        return self._adamw.kernel_name

    @torch.no_grad()
    def step(self, lr: float, grad_scale: float = 1.0) -> None:
        """Take one step at rate `lr`, gradients times `grad_scale`; collective over the pipeline stage."""
        self._adamw.wait()
        self._update(lr, grad_scale)
        self._adamw.step(lr, grad_scale)

    def _update(self, lr: float, grad_scale: float) -> None:
        config = self._config
        grads, momentum, masters = (list(d.values()) for d in (self._grads, self._momentum, self._masters))
        if not grads:  # a stage without layers
            return
        if grad_scale != 1.0:
            torch._foreach_mul_(grads, grad_scale)
        torch._foreach_lerp_(momentum, grads, 1 - config.muon_momentum)
        moves = torch._foreach_lerp(grads, momentum, config.muon_momentum) if config.muon_nesterov else momentum
        pieces = {name: _narrow(move) for name, move in zip(self._masters, moves, strict=True)}
        self._exchange.apply(pieces, self._orthogonalize)
        torch._foreach_mul_(masters, 1 - lr * config.weight_decay)
        for name, master in self._masters.items():
            master.addcmul_(pieces[name].to(master.dtype), self._scales[name], value=-lr)

    def _orthogonalize(self, matrices: list[Tensor]) -> list[Tensor]:
        """Those of one shape in one batch."""
        by_shape: dict[tuple[int, ...], list[int]] = {}
        for number, matrix in enumerate(matrices):
            by_shape.setdefault(tuple(matrix.shape), []).append(number)
        done = list(matrices)
        for numbers in by_shape.values():
            batch = orthogonalized(torch.stack([matrices[n] for n in numbers]), self._config.muon_steps)
            for number, matrix in zip(numbers, batch, strict=True):
                done[number] = matrix
        return done

    def load_done(self) -> None:
        """As AdamW's."""
        self._adamw.load_done()

    def drop_copies(self) -> None:
        """As AdamW's."""
        self._adamw.drop_copies()

    def attach(self, *models: nn.Module) -> None:
        """As AdamW's."""
        self._adamw.attach(*models)

    def refresh(self) -> None:
        """As AdamW's."""
        self._adamw.refresh()

    def wait(self) -> None:
        """As AdamW's."""
        self._adamw.wait()

    def tensors(self) -> dict[str, Tensor]:
        """All state, live: AdamW's, masters of all parameters among it, and "optimizer.momentum.<name>"."""
        return self._adamw.tensors() | {f"optimizer.momentum.{n}": t for n, t in self._momentum.items()}

    def layouts(self) -> dict[str, Layout]:
        """The Layout of each tensor of `tensors()`."""
        return self._adamw.layouts() | {f"optimizer.momentum.{n}": at for n, at in self._layouts.items()}


def _narrow(tensor: Tensor) -> Tensor:
    """A copy in the dtype in which matrices travel and are orthogonalized."""
    return tensor.to(tensor.dtype if tensor.dtype == torch.float64 else torch.bfloat16, copy=True)
