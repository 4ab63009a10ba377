"""Every GEMM of a run as one rank has it: its recipe, formats and backend, or why it is not in FP8.

A linear is three GEMMs of one shape: y = x wT, dx = g w, dw = gT x. FLOPs are a token's, forward and backward, of the
whole model (models/cost), the attention core halved for the causal mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from megafp8.core.recipe_options import DIM_MULTIPLES
from megafp8.fp8.backend import backend as fp8_backend
from megafp8.fp8.recipe import Recipe
from megafp8.fp8.recipe import recipe as fp8_recipe
from megafp8.models.config import ModelConfig, quantizable_shapes
from megafp8.models.cost import core_flops
from megafp8.nn.precision import PrecisionConfig, precision_rows, spans_shown
from megafp8.parallel.mesh_config import ParallelConfig, axis_sizes


@dataclass(frozen=True)
class Gemm:
    """One linear of one layer, or of several that are alike.

    Attributes:
        name: within the layer, or of the whole model where `layers` is empty.
        matrices: experts of a rank; 1 of any other.
        in_features, out_features: as one rank has them; 0 where no weight is multiplied.
        rows: tokens of a rank's micro-batch; 0: as many as the router sends.
        recipe: or the dtype that it is computed in.
        forward, backward: formats of the operands, "input x weight" and "gradient x the other"; else empty.
        scales: what shares a scale: "tensor", or blocks.
        backend: who multiplies it in FP8; empty where it is not in FP8.
        why: it is not in FP8, or the backend's reason.
        flops: of a token, all `layers` together.
    """

    name: str
    layers: tuple[int, ...]
    matrices: int
    in_features: int
    out_features: int
    rows: int
    recipe: str
    forward: str
    backward: str
    scales: str
    backend: str
    why: str
    flops: float

    @property
    def in_fp8(self) -> bool:
        return bool(self.backend)

    @property
    def layers_shown(self) -> str:
        """The layers as spans."""
        return spans_shown(self.layers)


@dataclass(frozen=True)
class GemmPlan:
    """All GEMMs, those of the layers first, and whom the run's backend setting gives on this machine."""

    gemms: tuple[Gemm, ...]
    backend: str
    backend_reason: str

    @property
    def counts(self) -> tuple[int, int]:
        """GEMMs in FP8, and all GEMMs of the decoder layers' linears: three of each matrix of a rank."""
        linears = [gemm for gemm in self.gemms if gemm.layers and gemm.in_features and gemm.name != "mlp.router"]
        total = [3 * gemm.matrices * len(gemm.layers) for gemm in linears]
        return sum(n for n, gemm in zip(total, linears, strict=True) if gemm.in_fp8), sum(total)

    @property
    def fp8_share(self) -> float:
        """Share of the model's training FLOPs that are in FP8, attention halved for the mask."""
        return sum(gemm.flops for gemm in self.gemms if gemm.in_fp8) / sum(gemm.flops for gemm in self.gemms)

    def collapsed(self) -> GemmPlan:
        """Layers that are alike in one row."""
        rows: dict[Gemm, list[Gemm]] = {}
        for gemm in self.gemms:
            rows.setdefault(replace(gemm, layers=()), []).append(gemm)
        merged = [
            replace(alike[0], layers=tuple(i for g in alike for i in g.layers), flops=sum(gemm.flops for gemm in alike))
            for alike in rows.values()
        ]
        return replace(self, gemms=tuple(merged))

    def as_json(self) -> dict[str, Any]:
        """The plan as plain values."""
        fp8, total = self.counts
        return {
            "backend": self.backend,
            "backend_reason": self.backend_reason,
            "fp8_gemms": fp8,
            "linear_gemms": total,
            "fp8_flops_share": self.fp8_share,
            "gemms": [asdict(gemm) for gemm in self.gemms],
        }


def plan_gemm_table(
    model: ModelConfig,
    precision: PrecisionConfig,
    parallel: ParallelConfig,
    *,
    world: int,
    micro_batch: int,
    sequence_length: int,
) -> GemmPlan:
    """The GEMMs of one rank of `world`, for a mesh that splits the model's dims; the backend is this machine's.

    Raises:
        ConfigError: the named backend cannot serve on this machine.
    """
    sizes = axis_sizes(parallel, world)
    shapes, whole = quantizable_shapes(model, tp=sizes["tp"], etp=sizes["etp"]), quantizable_shapes(model)
    recipes = {name: fp8_recipe(name, **precision.options_of(name)) for name in precision.recipes}
    backends: dict[str, Any] = {}
    for name, recipe in recipes.items():
        engine = precision.backend == "te"
        backends[name] = _Engine() if engine else fp8_backend(precision.backend, precision.emulation, recipe=recipe)
    rows = micro_batch * sequence_length // sizes["cp"]
    gemms = []
    for name, made, why in precision_rows(precision, list(shapes), model.num_layers):
        inputs, outputs, side = shapes[name]
        _, layer, kind = name.split(".", 2)
        experts = ".experts." in name
        local = {"in": inputs, "out": outputs}
        if side:
            local[side] //= sizes["tp"]
        flops = 6.0 * whole[name][0] * whole[name][1] * (model.moe.top_k if experts else 1)
        gemm = Gemm(
            kind, (int(layer),), model.moe.num_experts // sizes["ep"] if experts else 1, local["in"], local["out"],
            0 if experts else rows, made, "", "", "", "", why, flops,
        )  # fmt: skip
        if made in recipes:
            gemm = _quantized(gemm, recipes[made], backends[made])
        gemms.append(gemm)
    gemms += _by_rule(model, precision, tp=sizes["tp"], rows=rows, sequence_length=sequence_length)
    named = ", ".join(dict.fromkeys(chosen.name for chosen in backends.values()))
    reasons = "; ".join(dict.fromkeys(chosen.reason for chosen in backends.values()))
    return GemmPlan(tuple(gemms), named, reasons or "no recipe is named")


@dataclass(frozen=True)
class _Engine:
    """Transformer Engine's layers, which are no backend of ours; what is missing of them is said with the refusals."""

    name: str = "te"
    reason: str = "asked for by name"

    def supports(self, recipe: Recipe, in_features: int, out_features: int) -> str | None:
        return None


def _quantized(gemm: Gemm, recipe: Recipe, chosen: Any) -> Gemm:
    specs = {role: recipe.spec(role) for role in ("input", "weight", "grad_output")}
    x, w, g = (spec.format.name for spec in specs.values())
    blocks = ["tensor" if spec.block is None else f"{spec.block[0]}x{spec.block[1]}" for spec in specs.values()]
    scales = blocks[0] if len(set(blocks)) == 1 else f"{blocks[0]}, weights {blocks[1]}"
    if blocks[2] != blocks[0]:
        scales += f", gradients {blocks[2]}"
    gemm = replace(gemm, forward=f"{x} x {w}", backward=f"{g} x {w if w == x else f'{w}, {x}'}", scales=scales)
    multiple = DIM_MULTIPLES[recipe.name]
    for which, size in (("in", gemm.in_features), ("out", gemm.out_features)):
        if size % multiple:
            return replace(gemm, why=f"refused: {which} dim {size} is not a multiple of {multiple}")
    reason = chosen.supports(recipe, gemm.in_features, gemm.out_features)
    return replace(gemm, why=f"refused: {reason}") if reason else replace(gemm, backend=chosen.name)


def _by_rule(model: ModelConfig, precision: PrecisionConfig, *, tp: int, rows: int, sequence_length: int) -> list[Gemm]:
    """What is never in FP8."""
    every, dtype = tuple(range(model.num_layers)), precision.dtype
    core = Gemm(
        "attention.core", every, 1, 0, 0, rows, dtype, "", "", "", "", f"rule: scores and values are in {dtype}",
        core_flops(model, causal=True) * sequence_length,
    )  # fmt: skip
    gemms = [core]
    experts = tuple(i for i in every if model.moe.is_moe_layer(i))
    if experts:
        wide = "fp64" if dtype == "fp64" else "fp32"
        router_flops = 6.0 * len(experts) * model.hidden_size * model.moe.num_experts
        gemms.append(
            Gemm(
                "mlp.router", experts, 1, model.hidden_size, model.moe.num_experts, rows, wide, "", "", "", "",
                f"rule: routers are in {wide}", router_flops,
            )
        )  # fmt: skip
    gemms.append(
        Gemm(
            "output", (), 1, model.hidden_size, -(-model.vocab_size // tp), rows, dtype, "", "", "", "",
            f"rule: the output layer is in {dtype}", 6.0 * model.hidden_size * model.vocab_size,
        )
    )  # fmt: skip
    gemms.append(Gemm("embedding", (), 1, 0, 0, rows, dtype, "", "", "", "", "rule: a lookup, no GEMM", 0.0))
    return gemms


def sharded_note(precision: PrecisionConfig, used: Sequence[str], shard: int) -> str:
    """What sequence parallelism costs where a shard of `shard` tokens ends inside a block; else empty."""
    blocks = {name: DIM_MULTIPLES[name] for name in used if name in ("blockwise", "mxfp8", "nvfp4")}
    cut = [f"{name} {block}" for name, block in blocks.items() if shard % block]
    if not cut:
        return ""
    return (
        f"a sequence shard of {shard} tokens ends inside a block ({', '.join(cut)}): it is gathered in "
        f"{precision.dtype} and quantized after, where one that does not is gathered in codes"
    )
