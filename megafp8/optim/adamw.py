"""AdamW over masters: fp32 (fp64 for fp64 parameters) weights and moments; the parameters are their copies.

It reads `param.main_grad`, never `param.grad`; where gradients come from is the business of parallel/buckets.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megafp8.core.layout import Layout, layout_of
from megafp8.optim.config import OptimizerConfig
from megafp8.optim.kernels import TensorLists, choose_kernel
from megafp8.parallel.mesh import Mesh


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

    Masters of fp32 and fp64 parameters are those parameters themselves, not copies.

    Args:
        named_params: global names and this rank's pieces; a parameter under two names is taken once. Each has
            `main_grad` (GradBuckets makes it) in its master's dtype.
        config: hyper-parameters and the kernel.
        mesh: the mesh whose pieces the parameters are.

    Attributes:
        step_count: steps taken; set it after loading.
        kernel_name: the kernel in use: "te", "apex" or "torch".

    Raises:
        ConfigError: the kernel that `config` names does not work here.
    """

    def __init__(
        self, named_params: Sequence[tuple[str, torch.nn.Parameter]], config: OptimizerConfig, mesh: Mesh
    ) -> None:
        once: dict[int, tuple[str, torch.nn.Parameter]] = {}
        for name, param in named_params:
            if param.requires_grad:
                once.setdefault(id(param), (name, param))
        self._params = dict(once.values())
        for name, param in self._params.items():
            local = layout_of(param).local_shape(mesh)
            assert tuple(param.shape) == local, f"{name} is {tuple(param.shape)}, its layout says {local}"
        self._config = config
        self.step_count = 0
        self._master = {n: _master_of(p) for n, p in self._params.items()}
        self._exp_avg = {n: torch.zeros_like(m) for n, m in self._master.items()}
        self._exp_avg_sq = {n: torch.zeros_like(m) for n, m in self._master.items()}
        first = next(iter(self._master.values()))
        self.kernel_name, self._kernel = choose_kernel(config.kernel, first.device, first.dtype)
        self._lists = self._group()
        copied = [n for n, p in self._params.items() if self._master[n].dtype != p.dtype]
        self._copied_params = [self._params[n].detach() for n in copied]
        self._copied_masters = [self._master[n] for n in copied]

    @torch.no_grad()
    def step(self, lr: float, grad_scale: float = 1.0) -> None:
        """Take one step at rate `lr`, gradients times `grad_scale`; `main_grad` is left multiplied."""
        self.step_count += 1
        for lists in self._lists:
            self._kernel(lists, self._config, self.step_count, lr, grad_scale)
        self.load_done()

    @torch.no_grad()
    def load_done(self) -> None:
        """Write the masters back to the compute-dtype parameters, as after loading them from a checkpoint."""
        if self._copied_params:
            torch._foreach_copy_(self._copied_params, self._copied_masters)

    def tensors(self) -> dict[str, torch.Tensor]:
        """All state, live: "optimizer.{master,exp_avg,exp_avg_sq}.<name>"; overwrite, then `load_done()`."""
        kinds = {"master": self._master, "exp_avg": self._exp_avg, "exp_avg_sq": self._exp_avg_sq}
        return {f"optimizer.{kind}.{name}": t for kind, named in kinds.items() for name, t in named.items()}

    def layouts(self) -> dict[str, Layout]:
        """The Layout of each tensor of `tensors()`."""
        return {key: layout_of(self._params[key.split(".", 2)[2]]) for key in self.tensors()}

    def _group(self) -> list[TensorLists]:
        groups: dict[tuple[bool, torch.dtype], TensorLists] = {}
        for name, param in self._params.items():
            decay = decays(name, layout_of(param), self._config)
            master, grad = self._master[name], param.main_grad  # type: ignore[attr-defined]
            assert grad.dtype == master.dtype, f"{name}: main_grad is {grad.dtype}, master {master.dtype}"
            weight_decay = self._config.weight_decay if decay else 0.0
            lists = groups.setdefault((decay, master.dtype), TensorLists(weight_decay, [], [], [], []))
            lists.masters.append(master)
            lists.grads.append(grad)
            lists.exp_avgs.append(self._exp_avg[name])
            lists.exp_avg_sqs.append(self._exp_avg_sq[name])
        return list(groups.values())


def _master_of(param: torch.nn.Parameter) -> torch.Tensor:
    if param.dtype in (torch.float32, torch.float64):
        return param.detach()
    return param.detach().float()
