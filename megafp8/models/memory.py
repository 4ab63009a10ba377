"""Bytes on a rank for a training step: model states, activations in flight, the loss. No torch.

Source: the model states of Megatron's distributed-optimizer page (compute copy, fp32 main gradient, fp32 master and
two moments, which may be narrower); activations: `activations`; how many are in flight: the schedule's own list of
actions. What the allocator and the libraries hold comes on top.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from megafp8.models.activations import Workload, activation_bytes, checkpoint_of_layer
from megafp8.models.config import ModelConfig, expert_shapes, gemm_shapes, quantizable_shapes
from megafp8.models.cost import small_parameters
from megafp8.models.stages import Span, split_layers
from megafp8.nn.precision import plan_gemms
from megafp8.optim.config import moments_bytes
from megafp8.parallel.schedule_check import peak_live
from megafp8.parallel.schedules import make_schedule

_STEADY = 4  # micro-batches for each stage after which a schedule's peak has been reached
LOGITS_CHUNK = 1 << 24  # elements of a chunk of logits: the loss never holds more, see nn/loss


@dataclass(frozen=True)
class MemoryBytes:
    """Bytes on one rank, by part."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    logits: int

    @property
    def total(self) -> int:
        """All parts together."""
        return self.parameters + self.gradients + self.optimizer + self.activations + self.logits


def memory_bytes(config: ModelConfig, work: Workload) -> MemoryBytes:
    """Bytes on the fullest rank; the mesh must be one that `check_mesh` and `schedule_problems` accept."""
    return max(memory_of_ranks(config, work), key=lambda parts: parts.total)


def memory_of_ranks(config: ModelConfig, work: Workload) -> list[MemoryBytes]:
    """Bytes on a rank of each pipeline coordinate."""
    parallel = work.parallel
    spans = split_layers(config, parallel)
    most = _STEADY * len(spans)
    schedule = make_schedule(
        parallel.schedule, parallel.pp, parallel.virtual_stages, max(1, min(work.micro_batches, most))
    )
    layers = [activation_bytes(config, i, work) for i in range(config.num_layers)]
    ends = [_stage_bytes(config, span, work, layers) for span in spans]
    ranks = []
    for rank, actions in enumerate(schedule.actions):
        mine = [span for stage, span in enumerate(spans) if schedule.placement[stage] == rank]
        alive = int(peak_live(actions, sizes=ends)) + _whole_layer(mine, work, layers)
        ranks.append(_with_states(config, work, mine, alive))
    return ranks


def _stage_bytes(config: ModelConfig, span: Span, work: Workload, layers: list[int]) -> int:
    """What a stage keeps of one micro-batch."""
    kept = 0
    for place, layer in enumerate(range(span.start, span.stop)):
        again = work.recompute == "full" and (work.recompute_layers == 0 or place < work.recompute_layers)
        kept += checkpoint_of_layer(config, work) if again else layers[layer]
    if span.last:
        kept += checkpoint_of_layer(config, work)  # the final norm's input
    return kept


def _whole_layer(spans: list[Span], work: Workload, layers: list[int]) -> int:
    """Under full recomputation one layer at a time lives whole."""
    if work.recompute != "full":
        return 0
    return max((layers[i] for span in spans for i in range(span.start, span.stop)), default=0)


def _with_states(config: ModelConfig, work: Workload, spans: list[Span], activations: int) -> MemoryBytes:
    sizes, parallel, size = work.sizes(config), work.parallel, work.size
    wide = max(4, size)
    dense, experts = _elements_of(config, work, spans)
    replicas = ((dense, sizes["dp"] * sizes["cp"]), (experts, sizes["edp"]))
    pieces = sum(ceil(count / ranks) for count, ranks in replicas)
    held = pieces if parallel.dp_shard == "full" else dense + experts
    own_masters = size == wide and parallel.dp_shard == "none"  # wide parameters are their own masters
    updated = dense + experts if parallel.dp_shard == "none" else pieces
    weights = (held - _without_values(config, work, spans)) * size + 2 * sum(_quantized(config, work, spans))
    if parallel.dp_shard == "full":  # the layer at work and the next are whole
        weights += 2 * max(sum(_elements_of(config, work, [_one(i)])) for span in spans for i in _layers(span)) * size
    last = any(span.last for span in spans)
    return MemoryBytes(
        parameters=weights,
        gradients=held * wide,
        optimizer=(0 if own_masters else updated * wide) + moments_bytes(updated, work.moments, wide),
        activations=activations,
        logits=logits_bytes(config, work) if last else 0,
    )


def _one(layer: int) -> Span:
    return Span(layer, layer + 1, first=False, last=False)


def _layers(span: Span) -> range:
    return range(span.start, span.stop)


def _elements_of(config: ModelConfig, work: Workload, spans: list[Span]) -> tuple[int, int]:
    """Elements of this rank's parameters: those that all replicas share, and experts."""
    sizes, tp, hidden = work.sizes(config), work.parallel.tp, config.hidden_size
    layers = {i for span in spans for i in _layers(span)}
    dense = experts = 0
    for name, (inputs, outputs, side) in gemm_shapes(config).items():
        if int(name.split(".")[1]) in layers:
            ranks = sizes["kvtp"] if name.endswith("attention.qkv") else tp
            dense += inputs * outputs // (ranks if side else 1)
    for name, (inputs, outputs, _) in expert_shapes(config).items():
        if int(name.split(".")[1]) in layers:
            experts += config.moe.num_experts // sizes["ep"] * (inputs * outputs // sizes["etp"])
    dense += sum(config.moe.num_experts * hidden for i in layers if config.moe.is_moe_layer(i))
    layer, final = small_parameters(config)
    columns = config.num_mlp_inputs * config.ffn_hidden_size * config.mlp_bias  # of biases, split as their outputs are
    layer -= columns - columns // tp
    layer -= (config.qkv_size - config.qkv_size // sizes["kvtp"]) * config.has_qkv_bias
    dense += len(layers) * layer + any(span.last for span in spans) * final
    first, last = any(span.first for span in spans), any(span.last for span in spans)
    embeddings = first + last - (config.tied_embeddings and first and last)
    dense += embeddings * ceil(config.vocab_size / tp) * hidden
    dense += first * config.max_sequence_length * hidden * (config.position == "learned")
    return dense, experts


def _without_values(config: ModelConfig, work: Workload, spans: list[Span]) -> int:
    """Elements of the parameters that are gathered as codes, and have no memory of their own."""
    if not work.precision.gathers_as_codes or work.parallel.dp_shard != "optimizer":
        return 0
    sizes = work.sizes(config)
    replicas = (sizes["dp"] * sizes["cp"], sizes["edp"])
    found = _quantized(config, work, spans, gathered=True)
    return sum(count for count, ranks in zip(found, replicas, strict=True) if ranks > 1)


def _quantized(config: ModelConfig, work: Workload, spans: list[Span], *, gathered: bool = False) -> tuple[int, int]:
    """Elements of the FP8 weights, dense and of experts, whose row-wise and column-wise bytes a step keeps.

    `gathered`: as the parameters have them that replicas may gather as codes; smoothed ones are made in every pass.
    """
    tp, sizes = work.parallel.tp, work.sizes(config)
    shapes = quantizable_shapes(config, tp=tp, etp=sizes["etp"])
    plan, _ = plan_gemms(work.precision, list(shapes), config.num_layers)
    layers, held = {i for span in spans for i in _layers(span)}, config.moe.num_experts // sizes["ep"]
    dense = experts = 0
    for name, (inputs, outputs, side) in shapes.items():
        smoothed = gathered and work.precision.smooth_swiglu and name.endswith(".down")
        if plan[name] == "none" or int(name.split(".")[1]) not in layers or smoothed:
            continue
        ranks = sizes["kvtp"] if gathered and name.endswith("attention.qkv") else tp
        elements = inputs * outputs * (held if ".experts." in name else 1) // (ranks if side else 1)
        dense, experts = (dense, experts + elements) if ".experts." in name else (dense + elements, experts)
    return dense, experts


def logits_bytes(config: ModelConfig, work: Workload) -> int:
    """Bytes of the loss: one chunk of logits, the gradient of its input, and that of the output weight."""
    vocab, tokens, wide = ceil(config.vocab_size / work.parallel.tp), int(work.tokens), max(4, work.size)
    chunk = min(tokens * vocab, max(LOGITS_CHUNK, vocab))
    return chunk * (work.size + wide) + tokens * config.hidden_size * work.size + vocab * config.hidden_size * wide
