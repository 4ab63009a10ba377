"""The output layer with its cross entropy, vocabulary split over tp, without ever holding all logits.

Tokens go through in chunks; each chunk's logits become their own gradient, which is turned at once into the
gradients of hidden state and weight: the backward pass has only to hand them over. What is alive is one chunk of
logits in the compute dtype (`chunk_elements`) and the fp32 work on it, whatever the batch is.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from megafp8.core.errors import DataError
from megafp8.nn.embedding import vocabulary
from megafp8.nn.gemm import Split, start_sum
from megafp8.nn.kernels import Kernels, wide
from megafp8.nn.linear import enter
from megafp8.nn.parameter import Init, declare
from megafp8.parallel.collectives import Pending, all_gather, all_reduce_
from megafp8.parallel.context import join_sequence
from megafp8.parallel.mesh import Mesh

Tensor = torch.Tensor
IGNORED = -100
CHUNK_ELEMENTS = {"cpu": 1 << 24, "cuda": 1 << 27}  # 32 MB and 256 MB of bf16 logits


class _LinearCrossEntropy(torch.autograd.Function):
    """hidden [N or N/tp, H], weight [V/tp, H], targets [N] -> summed loss (fp32; fp64 for fp64) of those not ignored.

    Over tp the gradient of hidden is summed (and scattered) while that of the weight is computed.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        first_id: int,
        chunk: int,
        scale: float,
        differentiable: bool,
        mesh: Mesh,
        kernels: Kernels,
    ) -> Tensor:
        needs = differentiable and any(ctx.needs_input_grad[:2])
        work = torch.promote_types(hidden.dtype, torch.float32)
        split = Split.of(mesh, "column")
        if split.gathers_input:
            hidden = all_gather(hidden, split.group)
        several = hidden.shape[0] > chunk
        loss = torch.zeros((), dtype=work, device=hidden.device)
        dhidden = torch.empty_like(hidden) if needs else None
        dweight: Tensor | None = None
        summed: Pending[Tensor] | None = None
        for start in range(0, hidden.shape[0], chunk):
            rows, ids = hidden[start : start + chunk], targets[start : start + chunk]
            logits = rows @ weight.t()
            part, log_sum, local = _losses(logits, ids - first_id, ids != IGNORED, mesh, kernels)
            loss += part
            if dhidden is None:
                continue
            factor = (ids != IGNORED).to(work)[:, None] * scale
            kernels.softmax_gradient_(logits, log_sum, local, factor)
            torch.mm(logits, weight, out=dhidden[start : start + len(rows)])
            if start + chunk >= hidden.shape[0]:
                summed = start_sum(dhidden, split)
            piece = logits.t() @ rows
            if dweight is None:  # chunks are summed in fp32, however narrow each GEMM's output is
                dweight = wide(piece) if several else piece
            else:
                dweight += piece
        if summed is not None and dweight is not None:
            ctx.save_for_backward(summed.wait(), dweight.to(weight.dtype))
        ctx.scale = scale
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        dhidden, dweight = ctx.saved_tensors
        ratio = grads[0] / torch.tensor(ctx.scale, dtype=grads[0].dtype)
        if ratio.device.type != "cpu" or float(ratio) != 1.0:  # on a GPU a look at the value would wait for it
            dhidden, dweight = dhidden * ratio.to(dhidden.dtype), dweight * ratio.to(dweight.dtype)
        return dhidden, dweight, None, None, None, None, None, None, None


def _losses(
    logits: Tensor, local: Tensor, counted: Tensor, mesh: Mesh, kernels: Kernels
) -> tuple[Tensor, Tensor, Tensor]:
    """Summed loss of a chunk, log-sum-exp [n, 1] over all shards, and the targets as indices into this shard."""
    group = mesh.group("tp")
    peak = all_reduce_(wide(logits.amax(-1, keepdim=True)), group, "max")
    parts = torch.cat(kernels.softmax_parts(logits, peak, local), -1)
    sums, target = all_reduce_(parts, group).split(1, -1)
    log = sums.log()
    return ((log - target) * counted[:, None]).sum(), peak + log, local


def refuse_unknown(targets: Tensor, vocab_size: int) -> None:
    """Without this, a target outside the vocabulary would have the log-sum-exp alone as its loss, and a gradient."""
    unknown = (targets >= vocab_size) | ((targets < 0) & (targets != IGNORED))
    if targets.is_cuda:
        torch._assert_async(~unknown.any(), "a target is neither a token of the vocabulary nor -100")
    elif unknown.any():
        raise DataError(
            f"target {int(targets[unknown][0])} is neither a token of the vocabulary, 0 to {vocab_size - 1}, nor "
            f"{IGNORED} (no loss); the data is of another tokenizer, see `megafp8 data verify`"
        )


class Output(nn.Module):
    """The output layer; weight [V, H], V split over tp, its own or (tied) the embedding's."""

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        *,
        tied: nn.Module | None,
        std: float,
        mesh: Mesh,
        dtype: torch.dtype,
        kernels: Kernels,
    ) -> None:
        super().__init__()
        self.mesh, self.kernels = mesh, kernels
        self._tied = (tied,)  # in a tuple, so that the embedding's parameter keeps its one name
        self.weight = None
        layout = vocabulary(vocab_size, hidden_size)
        self.vocab_size, self.first_id = vocab_size, layout.local_slices(mesh)[0].start
        if tied is None:
            self.weight = declare(layout, Init(std), mesh=mesh, dtype=dtype)

    def _matrix(self) -> Tensor:
        matrix = self.weight if self._tied[0] is None else self._tied[0].weight
        assert isinstance(matrix, torch.Tensor)
        return matrix

    @property
    def borrowed(self) -> tuple[nn.Module, ...]:
        """The module whose weight is used here too, if the weight is tied."""
        return () if self._tied[0] is None else (self._tied[0],)

    def loss(self, x: Tensor, targets: Tensor, scale: float | None) -> Tensor:
        """x [S or S/tp, B, H], targets [B, S] -> summed cross entropy; `scale`: what backward will be called with.

        Any other gradient of the loss is served too, at the price of one more pass.

        Raises:
            DataError: a target that is neither a token of the vocabulary nor -100. On a GPU, where a look at the values
                would wait for it, it is a failed assertion of the device.
        """
        refuse_unknown(targets, self.vocab_size)
        hidden = x.flatten(0, 1)
        flat = targets.t().reshape(-1)
        scale = 1.0 if scale is None else scale
        widest = -(-self.vocab_size // self.mesh.size("tp"))  # all ranks take the same chunks, whatever they hold
        chunk = max(1, CHUNK_ELEMENTS.get(x.device.type, 1 << 24) // widest)
        loss: Tensor = _LinearCrossEntropy.apply(
            hidden, self._matrix(), flat, self.first_id, chunk, scale, torch.is_grad_enabled(), self.mesh, self.kernels
        )
        return loss

    def forward(self, x: Tensor, targets: Tensor | None = None, scale: float | None = None) -> Tensor:
        """x [S, B, H] (or a shard along S) -> logits [B, S, V] of all tokens in order, whole vocabulary, in x's dtype.

        With targets it gives their `loss` instead.

        With tp or cp > 1 no gradient flows through the gathered logits: training goes through `loss`.
        """
        if targets is not None:
            return self.loss(x, targets, scale)
        logits = enter(x, self.mesh) @ self._matrix().t()
        if self.mesh.size("tp") > 1:
            widest = -(-self.vocab_size // self.mesh.size("tp"))  # ranks send alike; what the last lacks is cut off
            padded = F.pad(logits.detach(), (0, widest - logits.shape[2]))
            logits = all_gather(padded, self.mesh.group("tp"), dim=2)[..., : self.vocab_size]
        return join_sequence(logits, self.mesh, 0).transpose(0, 1)
