"""AdamW over masters: fp32 (fp64 for fp64 parameters) weights and moments; the parameters are their copies.

It reads the gradients that parallel/buckets has made, never `param.grad`: of all of a parameter, or (ZeRO-1) of the
piece that this rank updates. Then masters and moments are of that piece only, and the parameters are gathered.
Moments may be kept in bf16 or FP8 (see `narrow`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import nn

from megafp8.core.layout import Layout
from megafp8.optim.config import OptimizerConfig
from megafp8.optim.kernels import TensorLists, choose_kernel
from megafp8.optim.moments import NarrowMoments
from megafp8.parallel.mesh import Mesh
from megafp8.parallel.pieces import OwnPiece, own_piece
from megafp8.parallel.weight_gather import BUCKET_BYTES, Coded, Piece, WeightGather


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
        compiled: compile the kernel of narrow moments.
        coded: by name, parameters that are gathered as codes. They are gathered once here, which is collective; their
            own memory is never written.

    Attributes:
        masters: the fp32 (fp64) weights that are updated, by name.
        step_count: steps taken; set it after loading.
        gather: makes parameters whole again that are updated piece by piece; None if there are none.
        kernel_name: the kernel in use: "te", "apex", "torch", or "narrow" for moments in bf16 or FP8.

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
        compiled: bool = False,
        coded: Mapping[str, Coded] | None = None,
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
        mine = [n for n in self.masters if n not in elsewhere]
        self._exp_avg: dict[str, torch.Tensor] = {}
        self._exp_avg_sq: dict[str, torch.Tensor] = {}
        self._lists: list[TensorLists] = []
        self._narrow: NarrowMoments | None = None
        self._copies: dict[str, dict[str, torch.Tensor]] | None = None
        if config.has_narrow_moments:
            self.kernel_name, self._narrow = "narrow", self._narrow_moments(mine, mesh, compiled=compiled)
        else:
            self._exp_avg = {n: torch.zeros_like(self.masters[n]) for n in mine}
            self._exp_avg_sq = {n: torch.zeros_like(self.masters[n]) for n in mine}
            first = next(iter(self.masters.values()))
            self.kernel_name, self._kernel = choose_kernel(config.kernel, first.device, first.dtype)
            self._lists = self._group()
        cut = [n for n, piece in self._pieces.items() if piece.dim is not None]
        coded = coded or {}
        updated = [Piece(self._params[n], self.masters[n], coded.get(n)) for n in cut]
        self.gather = WeightGather(updated, mesh, bucket_bytes=bucket_bytes) if cut else None
        self._attached = False
        copied = [n for n, p in self._params.items() if self.masters[n].dtype != p.dtype and n not in cut]
        self._copied_params = [self._params[n].detach() for n in copied]
        self._copied_masters = [self.masters[n] for n in copied]
        if coded:
            self._write_back()

    @torch.no_grad()
    def step(self, lr: float, grad_scale: float = 1.0) -> None:
        """Take one step at rate `lr`, gradients times `grad_scale`; `main_grad` is left multiplied."""
        self.wait()
        self.step_count += 1
        self.drop_copies()
        if self._narrow is not None:
            self._narrow.step(self.step_count, lr, grad_scale)
        for lists in self._lists:
            self._kernel(lists, self._config, self.step_count, lr, grad_scale)
        self._write_back()

    @torch.no_grad()
    def load_done(self) -> None:
        """Take in what `tensors()` holds now, and write the masters back to the compute-dtype parameters."""
        if self._narrow is not None and self._copies is not None:
            self._narrow.fill(self._copies)
        self.drop_copies()
        self._write_back()

    def drop_copies(self) -> None:
        """Forget copies that `tensors()` has made of narrow moments; the next step does so too."""
        self._copies = None

    @torch.no_grad()
    def _write_back(self) -> None:
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

    def refresh(self) -> None:
        """Gather again if codes of weights no longer have the scale that the next forward pass wants; collective."""
        if self.gather is not None and self.gather.outdated:
            self._write_back()

    def wait(self) -> None:
        """Return when every parameter is whole; for those who use parameters without a model's forward pass."""
        if self.gather is not None:
            self.gather.wait()

    def tensors(self) -> dict[str, torch.Tensor]:
        """All state: "optimizer.{master,exp_avg,exp_avg_sq}.<name>"; overwrite, then `load_done()`.

        Live, save that narrow moments come as copies in bf16, which holds every value of theirs: the ones that the
        last call has made are those that `load_done` reads, until the next step.
        """
        kinds = {"master": self.masters, "exp_avg": self._exp_avg, "exp_avg_sq": self._exp_avg_sq}
        if self._narrow is not None:
            self._copies = self._narrow.values()
            kinds |= self._copies
        return {f"optimizer.{kind}.{name}": t for kind, named in kinds.items() for name, t in named.items()}

    def layouts(self) -> dict[str, Layout]:
        """The Layout of each tensor of `tensors()`."""
        mine = self._narrow.exp_avg if self._narrow is not None else self._exp_avg
        kinds = {"master": self.masters, "exp_avg": mine, "exp_avg_sq": mine}
        return {f"optimizer.{kind}.{n}": self._pieces[n].layout for kind, named in kinds.items() for n in named}

    @property
    def state_bytes(self) -> int:
        """What masters and moments take; a master that is the parameter itself counts."""
        wide = (*self.masters.values(), *self._exp_avg.values(), *self._exp_avg_sq.values())
        return sum(t.nbytes for t in wide) + (self._narrow.num_bytes if self._narrow is not None else 0)

    def _narrow_moments(self, names: Sequence[str], mesh: Mesh, *, compiled: bool) -> NarrowMoments:
        masters = {n: self.masters[n] for n in names}
        for name, master in masters.items():
            assert master.dtype == torch.float32, f"{name}: narrow moments are for fp32 masters, not {master.dtype}"
        return NarrowMoments(
            masters,
            {n: self._pieces[n].grad for n in names},
            {n: self._pieces[n].layout for n in names},
            self._config,
            mesh,
            decays=frozenset(n for n in names if decays(n, self._pieces[n].layout, self._config)),
            compiled=compiled,
        )

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
