"""The dry run: what a configuration would be on so many ranks, and what would be refused. No torch, no process."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from megafp8.core.errors import DataError, MegaError
from megafp8.data.indexed import IndexedDataset
from megafp8.models.activations import Workload
from megafp8.models.config import ModelConfig, quantizable_shapes
from megafp8.models.cost import active_parameters, checkpoint_bytes, flops_per_token, moe_layers, num_parameters
from megafp8.models.memory import memory_bytes
from megafp8.nn.precision import plan_gemms
from megafp8.parallel.mesh_config import axis_sizes, check_mesh
from megafp8.parallel.stages import schedule_problems
from megafp8.plan.step_plan import NAMES, bubble_of
from megafp8.train.config import RunConfig, batches_of, check_run
from megafp8.train.load_check import refuse_unfit


@dataclass(frozen=True)
class Report:
    """Rows (what, value) in the order in which they are shown, and the rules that are broken."""

    rows: tuple[tuple[str, str], ...]
    problems: tuple[str, ...]


def smallest_world(config: RunConfig) -> int:
    """The fewest ranks that the mesh fits on, where `parallel.dp` 0 leaves the number of replicas open."""
    p = config.parallel
    experts = p.ep * (p.etp or p.tp)
    dp = p.dp or experts // math.gcd(experts, p.cp * p.tp)
    return p.pp * p.cp * p.tp * dp


def dry_run(config: RunConfig, world: int) -> Report:
    """Judge `config` on `world` ranks; corpora are looked at where they exist, and said to be missing where not."""
    problems = check_run(config, world)
    rows = _model_rows(config) + _precision_rows(config)
    if not check_mesh(config.parallel, world):
        rows += _mesh_rows(config, world)
        if not schedule_problems(config.parallel, config.model.num_layers):
            rows += _memory_rows(config, world)
    rows += _token_rows(config) + _corpus_rows(config)
    if config.checkpoint.load_from:
        rows.append(("begins from", f"{config.checkpoint.load_from} ({config.checkpoint.load_what})"))
        try:
            refuse_unfit(config)
        except MegaError as error:
            problems.append(str(error))
    return Report(tuple(rows), tuple(problems))


def _model_rows(config: RunConfig) -> list[tuple[str, str]]:
    model, sequence = config.model, config.data.sequence_length
    causal, full = (flops_per_token(model, sequence, causal=c) for c in (True, False))
    tied = "tied" if model.tied_embeddings else "untied"
    heads = f"({model.num_kv_heads} kv) of {model.head_dim}"
    if model.mla.enabled:
        heads = f"from latents of {model.mla.q_lora_rank or model.hidden_size} and {model.mla.kv_lora_rank}"
    parameters = f"{num_parameters(model):,}"
    if model.moe.num_experts:
        parameters += f", of which a token passes {active_parameters(model):,}"
    return [
        (
            "model",
            f"{model.family}, {model.num_layers} layers, hidden {model.hidden_size}, {model.num_attention_heads} heads "
            f"{heads}, ffn {model.ffn_hidden_size}{_experts(model)}, vocabulary {model.vocab_size} {tied}",
        ),
        ("parameters", parameters),
        ("FLOPs a token", f"{causal:.4g} (attention causal), {full:.4g} (attention full)"),
    ]


def _experts(model: ModelConfig) -> str:
    moe = model.moe
    if not moe.num_experts:
        return ""
    shared = f" and {moe.num_shared_experts} shared" if moe.num_shared_experts else ""
    return f", {moe.top_k} of {moe.num_experts} experts{shared} of {moe.ffn_hidden_size} in {moe_layers(model)} layers"


def _precision_rows(config: RunConfig) -> list[tuple[str, str]]:
    precision = config.precision
    names = list(quantizable_shapes(config.model))
    plan, _ = plan_gemms(precision, names, config.model.num_layers)
    counts: dict[str, int] = {}
    for name in names:
        recipe = plan[name]
        counts[recipe] = counts.get(recipe, 0) + 1
    shown = ", ".join(f"{n} in {precision.dtype if r == 'none' else 'FP8 ' + r}" for r, n in counts.items())
    if "delayed" in plan.values() and precision.warmup_steps:
        shown += f" (own scales in the first {precision.warmup_steps} steps)"
    if precision.smooth_swiglu:
        shown += ", Smooth-SwiGLU"
    router = ", routers in fp32" if config.model.moe.num_experts else ""
    return [("linear layers", f"{shown}; embedding, output layer and norms in {precision.dtype}{router}")]


def _mesh_rows(config: RunConfig, world: int) -> list[tuple[str, str]]:
    sizes = axis_sizes(config.parallel, world)
    unit = config.train.micro_batch * sizes["dp"]
    counts = [str(batch // unit) for batch in batches_of(config).sizes()]
    micro = counts[0] if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    shown = " ".join(f"{axis}={sizes[axis]}" for axis in ("pp", "dp", "cp", "tp", "ep"))
    rows = [
        ("ranks", f"{world}: {shown}"),
        ("micro-batches a step", f"{micro} of {config.train.micro_batch} on each dp rank"),
    ]
    layers, last = config.model.num_layers, int(counts[-1])
    if sizes["pp"] > 1 and last and not schedule_problems(config.parallel, layers):
        bubble = bubble_of(config.parallel, layers, last)
        name = NAMES[config.parallel.schedule]
        rows.append(("pipeline", f"{name}, bubble {bubble:.1%} of the busy time"))
    return rows


def _memory_rows(config: RunConfig, world: int) -> list[tuple[str, str]]:
    sizes, train = axis_sizes(config.parallel, world), config.train
    parts = memory_bytes(
        config.model,
        Workload(
            train.micro_batch,
            config.data.sequence_length,
            micro_batches=max(1, batches_of(config).sizes()[-1] // (train.micro_batch * sizes["dp"])),
            parallel=config.parallel,
            world=world,
            precision=config.precision,
            recompute=train.recompute,
            recompute_layers=train.recompute_layers,
            recompute_modules=train.recompute_modules,
            moments=_moments(config),
        ),
    )
    saved = checkpoint_bytes(config.model, dtype=config.precision.dtype, moments=_moments(config))
    return [
        (
            "memory a rank",
            f"{size(parts.total)}: weights {size(parts.parameters)}, gradients {size(parts.gradients)}, optimizer "
            f"{size(parts.optimizer)}, activations {size(parts.activations)}, loss {size(parts.logits)}",
        ),
        ("checkpoint", f"{size(saved)}, every {config.checkpoint.interval} steps{_snapshot(config, saved, world)}"),
    ]


def _snapshot(config: RunConfig, saved: int, world: int) -> str:
    """What saving while training goes on costs besides."""
    share = f", a copy of {size(saved / world)} in the host memory of each rank"
    return share if config.checkpoint.asynchronous else ""


def _moments(config: RunConfig) -> tuple[str, str]:
    return config.optimizer.exp_avg_dtype, config.optimizer.exp_avg_sq_dtype


def _token_rows(config: RunConfig) -> list[tuple[str, str]]:
    sizes = [batch * config.data.sequence_length for batch in batches_of(config).sizes()]
    a_step = f"{sizes[0]:,}" if len(sizes) == 1 else f"{sizes[0]:,} to {sizes[-1]:,} ({len(sizes)} batch sizes)"
    return [("tokens", f"{a_step} a step, {_run_tokens(config):,} in {config.train.steps:,} steps")]


def _run_tokens(config: RunConfig) -> int:
    return batches_of(config).consumed_after(config.train.steps) * config.data.sequence_length


def _corpus_rows(config: RunConfig) -> list[tuple[str, str]]:
    rows, known = [], 0
    for kind, sources in (("train", config.data.train), ("valid", config.data.valid)):
        for source in sources:
            try:
                dataset = IndexedDataset(source.path)
            except DataError as error:
                state = str(error) if Path(f"{source.path}.bin").exists() else "not there yet"
                rows.append((f"{kind} {source.path}", state))
                continue
            held = f"{dataset.num_tokens:,} tokens, {dataset.num_documents:,} documents"
            rows.append((f"{kind} {source.path}", held))
            known += dataset.num_tokens if kind == "train" else 0
    if known:
        rows.append(("epochs", f"{_run_tokens(config) / known:.2f}"))
    return rows


def size(num_bytes: float) -> str:
    """Bytes for people: 1.5 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.4g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.4g} TiB"
