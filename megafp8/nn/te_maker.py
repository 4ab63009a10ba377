"""Makes Transformer Engine's modules with the arguments that a mesh, a plan and options want."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from megafp8.fp8.recipe import Recipe
from megafp8.nn.te_config import TEConfig
from megafp8.nn.te_state import EngineState
from megafp8.nn.te_weights import Part
from megafp8.parallel.mesh import Mesh

# user-buffer names that Transformer Engine knows, by the end of a linear's name
_BUFFERS = {"qkv": "qkv", "out": "proj", "gate_up": "fc1", "up": "fc1", "down": "fc2"}


@dataclass(eq=False)
class Maker:
    """What all modules of one model have in common.

    Attributes:
        te: `transformer_engine.pytorch`.
        plan: `{linear: recipe or "none"}`; at most one recipe.
        recipe: ours, of those that are quantized; None: nothing is. library_recipe: Transformer Engine's.
        amax_group: the ranks that join amaxes of delayed scaling.
        delays: the pipeline's schedule computes weight gradients apart.
        states: filled as modules are made.
        parts: likewise, with the input's features and whether the input is a shard along S, for CUDA graphs.
    """

    te: Any
    options: TEConfig
    mesh: Mesh
    dtype: torch.dtype
    normalization: str
    eps: float
    plan: Mapping[str, str]
    recipe: Recipe | None
    library_recipe: Any
    amax_group: Any
    delays: bool
    states: dict[str, EngineState] = field(default_factory=dict)
    parts: list[tuple[Part, int, bool]] = field(default_factory=list)

    def empty(self) -> Maker:
        """The same, for other modules."""
        return replace(self, states={}, parts=[])

    def quantizes(self, name: str) -> bool:
        """Whether this linear is quantized."""
        return self.recipe is not None and self.plan.get(name, "none") != "none"

    def autocast(self) -> AbstractContextManager[Any]:
        """Around a forward pass."""
        made: AbstractContextManager[Any] = self.te.autocast(
            enabled=self.recipe is not None, recipe=self.library_recipe, amax_reduction_group=self.amax_group
        )
        return made

    def linear(
        self, name: str, in_features: int, out_features: int, mode: str | None, *, bias: bool, normed: bool = False
    ) -> Part:
        """LayerNormLinear (`normed`) or Linear with these whole dims; `mode`: "column", "row" or None."""
        kind = self.te.LayerNormLinear if normed else self.te.Linear
        more: dict[str, Any] = {"eps": self.eps, "normalization": self.normalization} if normed else {}
        delays = self.delays and mode is not None
        inner = self._make(
            name,
            lambda: kind(
                in_features,
                out_features,
                bias=bias,
                parallel_mode=mode,
                sequence_parallel=self.mesh.sequence_parallel and mode is not None,
                **(self._tp() if mode else {}),
                **self._common(name, delays),
                **(self._buffers(name, mode) if mode else {}),
                **more,
            ),
        )
        local = in_features // self.mesh.size("tp") if mode == "row" else in_features
        return self._part(inner, (name,), delays=delays, features=local, shard=mode != "row")

    def layernorm_mlp(
        self, name: str, hidden: int, ffn: int, *, names: Sequence[str], activation: str, bias: bool
    ) -> Part:
        """LayerNormMLP of the linears `names`, both quantized or both not."""
        overlap = self.options.ub_overlap
        buffers = ("ub_overlap_ag", "ub_overlap_rs", "ub_bulk_dgrad", *(() if self.delays else ("ub_bulk_wgrad",)))
        inner = self._make(
            names[0],
            lambda: self.te.LayerNormMLP(
                hidden,
                ffn,
                eps=self.eps,
                normalization=self.normalization,
                activation=activation,
                bias=bias,
                sequence_parallel=self.mesh.sequence_parallel,
                set_parallel_mode=self.mesh.size("tp") > 1,
                **self._tp(),
                **self._common(name, self.delays),
                **(dict.fromkeys(buffers, True) if overlap else {}),
            ),
        )
        return self._part(inner, names, delays=self.delays, features=hidden, shard=True)

    def grouped(self, name: str, count: int, in_features: int, out_features: int) -> Part:
        """GroupedLinear of `count` experts with these dims, those of this rank."""
        inner = self._make(
            name,
            lambda: self.te.GroupedLinear(
                count, in_features, out_features, bias=False, **self._common(name, self.delays)
            ),
        )
        return self._part(inner, (name,), delays=self.delays, experts=count)

    def attention(self, name: str, heads: int, groups: int, dims: tuple[int, int], layer: int) -> Any:
        """DotProductAttention of this rank's heads; q comes scaled."""
        mesh, group = self.mesh, self.mesh.group("cp")
        context: dict[str, Any] = {}
        if group is not None:
            kinds = {"ring": "p2p", "all_gather": "all_gather", "all_to_all": "a2a"}
            context = {
                "cp_group": group,
                "cp_global_ranks": dist.get_process_group_ranks(group),
                "cp_stream": _second_stream(),
                "cp_comm_type": kinds[mesh.cp_exchange],
            }
        return self.te.DotProductAttention(
            heads,
            dims[0] if dims[0] == dims[1] else dims,
            num_gqa_groups=groups,
            qkv_format="sbhd",
            attn_mask_type="causal",
            softmax_scale=1.0,
            layer_number=layer + 1,
            name=name,
            **context,
        )

    def norm(self, size: int, eps: float) -> Any:
        """RMSNorm or LayerNorm."""
        kind = self.te.RMSNorm if self.normalization == "RMSNorm" else self.te.LayerNorm
        return kind(size, eps=eps, params_dtype=self.dtype, device="meta")

    def rms_norm(self, size: int, eps: float) -> Any:
        """RMSNorm, whatever the model's norms are."""
        return self.te.RMSNorm(size, eps=eps, params_dtype=self.dtype, device="meta")

    def start_buffers(self, tokens: int, hidden: int) -> None:
        """Make the user buffers, once, before the modules that overlap with them."""
        if self.options.ub_overlap:
            modes = self.te.UserBufferQuantizationMode
            used = [modes.NONE] if self.recipe is None else [modes.NONE, modes.FP8]
            self.te.destroy_ub()  # those of a model that was built before in this process
            self.te.initialize_ub(
                [tokens // self.mesh.size("cp"), hidden],
                self.mesh.size("tp"),
                quantization_modes=used,
                dtype=self.dtype,
            )

    def _make(self, name: str, build: Callable[[], Any]) -> Any:
        if not (self.options.quantized_model_init and self.quantizes(name)):
            return build()
        with self.te.quantized_model_init(enabled=True, recipe=self.library_recipe):
            return build()

    def _part(
        self,
        inner: Any,
        names: Sequence[str],
        *,
        delays: bool,
        experts: int = 0,
        features: int = 0,
        shard: bool = False,
    ) -> Part:
        options = self.options
        part = Part(inner, fuse=options.fuse_wgrad_accumulation, delays=delays, caches=options.cache_weights)
        part.quantized = self.quantizes(names[0])
        if self.recipe is not None and not part.quantized:
            part.around = lambda: self.te.autocast(enabled=False)
        self.parts.append((part, features, shard))
        count = experts or len(names)
        for number, name in enumerate(names):
            if self.quantizes(name):
                assert self.recipe is not None
                gemms = range(experts) if experts else [number]
                state = EngineState(name, self.recipe, inner, gemms, lambda: self._initialize(inner, count), part.renew)
                self.states[name] = state
        return part

    def _initialize(self, inner: Any, num_gemms: int) -> None:
        if not inner.fp8_initialized:
            # no gradients: leaving this must not count as a micro-batch; and its tensors outlive a pass of inference
            with torch.inference_mode(False), torch.no_grad(), self.autocast():
                inner.init_fp8_metadata(num_gemms=num_gemms)

    def _tp(self) -> dict[str, Any]:
        return {"tp_group": self.mesh.group("tp"), "tp_size": self.mesh.size("tp")}

    def _common(self, name: str, delays: bool) -> dict[str, Any]:
        return {
            "params_dtype": self.dtype,
            "device": "meta",
            "fuse_wgrad_accumulation": self.options.fuse_wgrad_accumulation,
            "delay_wgrad_compute": delays,
            "name": name,
        }

    def _buffers(self, name: str, mode: str) -> dict[str, Any]:
        buffer = _BUFFERS.get(name.rsplit(".", 1)[1])
        if not self.options.ub_overlap or buffer is None:
            return {}
        names = ("ub_overlap_ag", "ub_overlap_rs") if mode == "row" else ("ub_overlap_ag", "ub_bulk_dgrad")
        made: dict[str, Any] = dict.fromkeys(names, True)
        if mode == "column" and not self.delays:
            made["ub_bulk_wgrad"] = True
        return {**made, "ub_name": buffer}


@cache
def _second_stream() -> Any:
    """Of the whole process: what travels over cp beside what is computed."""
    return torch.cuda.Stream()


def amax_group(mesh: Mesh, axes: tuple[str, ...]) -> Any:
    """The ranks along `axes`. Transformer Engine takes None for the whole world: one rank alone is a group too."""
    group = mesh.group_of(axes)
    if group is not None or not dist.is_initialized() or dist.get_world_size() == 1:
        return group
    return dist.new_group([dist.get_rank()], use_local_synchronization=True)
