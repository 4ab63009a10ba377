"""AdamW over masters: fp32 (fp64 for fp64 parameters) weights and moments; the parameters are their copies.

It reads the gradients that parallel/buckets has made, never `param.grad`: of all of a parameter, or (ZeRO-1) of the
piece that this rank updates. Then masters and moments are of that piece only, and the parameters are gathered.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import nn

from megafp8.core.layout import Layout
from megafp8.optim.config import OptimizerConfig
from megafp8.optim.kernels import TensorLists, choose_kernel
from megafp8.parallel.mesh import Mesh
from megafp8.parallel.pieces import OwnPiece, own_piece
from megafp8.parallel.weight_gather import BUCKET_BYTES, WeightGather


def decays(name: str, layout: Layout, config: OptimizerConfig) -> bool:
    """Whether weight decay applies to the parameter of this global name and layout.

    Norms and biases are known by name or by having one dim; embeddings, tied output weights among them, by
    name.
    """
    module, _, last = name.rpartition(".")
    if last == "bias" or module.endswith("norm") or len(layout.shape) <= 1:
        return config.decay_norms_biases
    return config.decay_embeddings or not module.endswith("embedding")


class AdamW:
    """Decoupled weight decay Adam; one fused pass over all masters, one over what is written back.

    Masters of fp32 and fp64 parameters are those parameters themselves, not copies, save where only a piece is
    updated. Then `step` and `load_done` are collective, and return with the parameters whole, or, once a model is
    attached, while they are still being gathered.

    Args:
        named_params: global names and this rank's pieces; a parameter under two names is taken once. Each has
            `main_grad` (GradBuckets makes it, and says which piece is updated here) in its master's dtype.
        config: hyper-parameters and the kernel.
        mesh: the mesh whose pieces the parameters are.
        elsewhere: names of parameters that someone else updates: their masters are kept and written back here all the
            same, but they have no moments.
        bucket_bytes: of weights that are gathered in one call.

    Attributes:
        masters: the fp32 (fp64) weights that are updated, by name.
        step_count: steps taken; set it after loading.
        gather: makes parameters whole again that are updated piece by piece; None if there are none.
        kernel_name: the kernel in use: "te", "apex" or "torch".

    Raises:
        ConfigError: the kernel that `config` names does not work here.
    """

    def __init__(
        self,
        named_params: Sequence[tuple[str, torch.nn.Parameter]],
        config: OptimizerConfig,
        mesh: Mesh,
        *,
        elsewhere: Collection[str] = (),
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        once: dict[int, tuple[str, torch.nn.Parameter]] = {}
        for name, param in named_params:
            if param.requires_grad:
                once.setdefault(id(param), (name, param))
        self._params = dict(once.values())
        self._pieces = {name: own_piece(param) for name, param in self._params.items()}
        for name, piece in self._pieces.items():
            found, said = tuple(piece.of(self._params[name]).shape), piece.layout.local_shape(mesh)
            assert found == said == tuple(piece.grad.shape), f"{name} is {found}, its layout says {said}"
        self._config = config
        self.step_count = 0
        self.masters = {n: _master_of(p, self._pieces[n]) for n, p in self._params.items()}
        self._exp_avg = {n: torch.zeros_like(m) for n, m in self.masters.items() if n not in elsewhere}
        self._exp_avg_sq = {n: torch.zeros_like(m) for n, m in self._exp_avg.items()}
        first = next(iter(self.masters.values()))
        self.kernel_name, self._kernel = choose_kernel(config.kernel, first.device, first.dtype)
        self._lists = self._group()
        cut = [n for n, piece in self._pieces.items() if piece.dim is not None]
        updated = [(self._params[n], self.masters[n]) for n in cut]
        self.gather = WeightGather(updated, mesh, bucket_bytes=bucket_bytes) if cut else None
        self._attached = False
        copied = [n for n, p in self._params.items() if self.masters[n].dtype != p.dtype and n not in cut]
        self._copied_params = [self._params[n].detach() for n in copied]
        self._copied_masters = [self.masters[n] for n in copied]

    @torch.no_grad()
    def step(self, lr: float, grad_scale: float = 1.0) -> None:
        """Take one step at rate `lr`, gradients times `grad_scale`; `main_grad` is left multiplied."""
        self.wait()
        self.step_count += 1
        for lists in self._lists:
            self._kernel(lists, self._config, self.step_count, lr, grad_scale)
        self.load_done()

    @torch.no_grad()
    def load_done(self) -> None:
        """Write the masters back to the compute-dtype parameters, as after loading them from a checkpoint."""
        if self._copied_params:
            torch._foreach_copy_(self._copied_params, self._copied_masters)
        if self.gather is not None:
            self.gather.wait()
            self.gather.start()
            if not self._attached:
                self.gather.wait()

    def attach(self, *models: nn.Module) -> None:
        """Let the forward passes of `models` (all that hold the parameters) wait for the gathered weights.

        From then on the gathering that a step starts goes on beside the next forward pass.
        """
        self._attached = True
        if self.gather is not None:
            for model in models:
                self.gather.attach(model)

    def wait(self) -> None:
        """Return when every parameter is whole; for those who use parameters without a model's forward pass."""
        if self.gather is not None:
            self.gather.wait()

    def tensors(self) -> dict[str, torch.Tensor]:
        """All state, live: "optimizer.{master,exp_avg,exp_avg_sq}.<name>"; overwrite, then `load_done()`."""
        kinds = {"master": self.masters, "exp_avg": self._exp_avg, "exp_avg_sq": self._exp_avg_sq}
        return {f"optimizer.{kind}.{name}": t for kind, named in kinds.items() for name, t in named.items()}

    def layouts(self) -> dict[str, Layout]:
        """The Layout of each tensor of `tensors()`."""
        return {key: self._pieces[key.split(".", 2)[2]].layout for key in self.tensors()}

    def _group(self) -> list[TensorLists]:
        groups: dict[tuple[bool, torch.dtype], TensorLists] = {}
        for name in self._exp_avg:
            piece = self._pieces[name]
            decay = decays(name, piece.layout, self._config)
            master, grad = self.masters[name], piece.grad
            assert grad.dtype == master.dtype, f"{name}: main_grad is {grad.dtype}, master {master.dtype}"
            if not master.numel():  # a piece of no rows
                continue
            weight_decay = self._config.weight_decay if decay else 0.0
            lists = groups.setdefault((decay, master.dtype), TensorLists(weight_decay, [], [], [], []))
            lists.masters.append(master)
            lists.grads.append(grad)
            lists.exp_avgs.append(self._exp_avg[name])
            lists.exp_avg_sqs.append(self._exp_avg_sq[name])
        return list(groups.values())


def _master_of(param: torch.nn.Parameter, piece: OwnPiece) -> torch.Tensor:
    wide = param.dtype if param.dtype in (torch.float32, torch.float64) else torch.float32
    if piece.dim is None:
        return param.detach().to(wide)
    # a piece of its own also where the dtype is the parameter's: kernels want it contiguous
    return piece.of(param.detach()).to(wide, copy=True, memory_format=torch.contiguous_format)
