"""Options of Transformer Engine's layers, and what keeps a run from using them. No torch: `megafp8 check` reads it."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import metadata, util
from typing import Annotated

from pydantic import Field

from megafp8.core.config import config_dataclass

MINIMUM = (2, 20)  # what the contract tests know; before 2.9 there was no `autocast`


@config_dataclass
class TEConfig:
    """What Transformer Engine's layers shall do beyond their defaults; read where precision.backend is "te"."""

    layernorm_mlp: Annotated[
        bool, Field(description="norm, both GEMMs and activation of a dense MLP as one module")
    ] = True
    cache_weights: Annotated[bool, Field(description="quantize a weight once a step, not once a micro-batch")] = True
    fuse_wgrad_accumulation: Annotated[
        bool, Field(description="weight gradients are added to the fp32 main gradients inside the GEMM")
    ] = True
    quantized_model_init: Annotated[
        bool, Field(description="the modules hold quantized weights, made from the parameters after each step")
    ] = False
    cross_entropy: Annotated[
        bool, Field(description="Transformer Engine's loss: faster, holds all logits (ours holds a chunk of them)")
    ] = False
    ub_overlap: Annotated[
        bool, Field(description="user buffers: tp communication inside the GEMMs; wants sequence_parallel")
    ] = False
    cuda_graphs: Annotated[
        bool, Field(description="each layer's modules as CUDA graphs; no pipeline, no recompute, no experts")
    ] = False


def te_problems(
    options: TEConfig,
    *,
    recompute: str,
    recompute_modules: Sequence[str],
    full_shard: bool,
    pipeline: bool,
    experts: bool,
    sequence_parallel: bool,
    reduces_amax: bool,
    even_vocabulary: bool,
    tp_first: bool,
    statistics: bool = False,
) -> list[str]:
    """What of a run Transformer Engine's layers cannot do, a line each with the way out.

    Args:
        sequence_parallel: with tp > 1; reduces_amax: delayed scaling's option, True for other recipes.
        even_vocabulary: tp divides it.
        tp_first: tp ranks have neighbouring numbers.
        statistics: FP8 statistics are asked for.
    """
    te = "precision.backend = 'te'"
    kept = [name for name in recompute_modules if name != "core_attention"] if recompute == "selective" else []
    rules = {
        f"{te}: train.recompute_modules {', '.join(kept)}: Transformer Engine's modules keep what these would make "
        "again as FP8 codes; use recompute = 'full' or 'none', or recompute_modules = ['core_attention']": bool(kept),
        f"{te}: parallel.dp_shard = 'full' takes weights away between forward and backward, which Transformer Engine's "
        "modules hold on to; use dp_shard = 'optimizer'": full_shard,
        f"{te}: log.fp8_interval: Transformer Engine shows nobody its quantized tensors; use its own statistics "
        "(nvdlfw_inspect), or backend native or emulated, or log.fp8_interval = 0": statistics,
        f"{te}: precision.options.reduce_amax = false with parallel.sequence_parallel: ranks that gather one tensor "
        "need one scale; use reduce_amax = true": sequence_parallel and not reduces_amax,
        "precision.te.ub_overlap hides the communication of sequence parallelism; set parallel.tp > 1 and "
        "sequence_parallel = true, or ub_overlap = false": options.ub_overlap and not sequence_parallel,
        "precision.te.ub_overlap: user buffers join ranks of neighbouring numbers; put tp first in parallel.order, or "
        "ub_overlap = false": options.ub_overlap and not tp_first,
        "precision.te.cuda_graphs: a graph's buffers hold one micro-batch, and its shapes are fixed; use no pipeline, "
        "no recompute and no experts, or cuda_graphs = false": options.cuda_graphs
        and (pipeline or recompute != "none" or experts),
        "precision.te.cross_entropy: every tp rank must hold as many tokens of the vocabulary; choose "
        "model.vocab_size as a multiple of parallel.tp, or cross_entropy = false": options.cross_entropy
        and not even_vocabulary,
    }
    return [line for line, broken in rules.items() if broken]


def installed_problem() -> str | None:
    """Why Transformer Engine cannot be loaded here, as far as can be seen without loading it; None: it can."""
    wanted = ".".join(str(part) for part in MINIMUM)
    way_out = "use auto, which takes the GPU's own FP8 GEMMs (native) where there are some"
    try:
        version = metadata.version("transformer-engine")
    except metadata.PackageNotFoundError:
        return (
            "precision.backend = 'te': transformer-engine is not installed (pip install --no-build-isolation "
            f"'transformer-engine[pytorch]>={wanted}', which needs nvcc; make setup GPU=1 does it); {way_out}"
        )
    if _numbers(version) < MINIMUM:
        return f"precision.backend = 'te': transformer-engine is {version} and at least {wanted} is needed; {way_out}"
    if util.find_spec("transformer_engine_torch") is None:
        return (
            f"precision.backend = 'te': transformer-engine {version} is here without its compiled part for PyTorch "
            f"(pip install --no-build-isolation 'transformer-engine[pytorch]=={version}'); {way_out}"
        )
    return None


def _numbers(version: str) -> tuple[int, ...]:
    parts = version.split("+")[0].split(".")[:2]
    return tuple(int(part) for part in parts if part.isdigit())
