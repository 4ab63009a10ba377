"""Which layers a pipeline stage has, which rank a stage stands on, and what is refused. No torch, no process."""

from __future__ import annotations

from collections.abc import Sequence

from megafp8.parallel.mesh_config import V_SCHEDULES, ParallelConfig


def stages_per_rank(schedule: str, ranks: int, virtual: int) -> int:
    """Stages that one pipeline rank holds: 1 without a pipeline, 2 in a V, `virtual` if interleaved, else 1."""
    if ranks == 1:
        return 1
    return 2 if schedule in V_SCHEDULES else virtual if schedule == "interleaved" else 1


def placement_of(schedule: str, ranks: int, virtual: int) -> tuple[int, ...]:
    """The rank of each stage: in loops over the ranks, or, in a V, down the ranks and back."""
    stages = ranks * stages_per_rank(schedule, ranks, virtual)
    if schedule in V_SCHEDULES:
        return tuple(s if s < ranks else 2 * ranks - 1 - s for s in range(stages))
    return tuple(s % ranks for s in range(stages))


def num_stages(config: ParallelConfig) -> int:
    """Stages of the whole pipeline."""
    return config.pp * stages_per_rank(config.schedule, config.pp, config.virtual_stages)


def stage_spans(
    num_layers: int,
    stages: int,
    *,
    layers_per_stage: Sequence[int] = (),
    count_embedding_as_layer: bool = False,
    count_loss_as_layer: bool = False,
) -> list[tuple[int, int]]:
    """The layers of each stage in model order as half-open (first, end); the split must be a valid one.

    An even split counts the embedding as a layer of the first stage and the loss as one of the last where asked.
    """
    counts = list(layers_per_stage)
    if not counts:
        share = (num_layers + count_embedding_as_layer + count_loss_as_layer) // stages
        counts = [share] * stages
        counts[0] -= count_embedding_as_layer
        counts[-1] -= count_loss_as_layer
    assert len(counts) == stages and sum(counts) == num_layers, (counts, stages, num_layers)
    ends = [sum(counts[: i + 1]) for i in range(stages)]
    return [(end - count, end) for count, end in zip(counts, ends)]


def spans_of(config: ParallelConfig, num_layers: int) -> list[tuple[int, int]]:
    """`stage_spans` as `config` says, which `schedule_problems` must have found to be in order."""
    return stage_spans(
        num_layers,
        num_stages(config),
        layers_per_stage=config.layers_per_stage,
        count_embedding_as_layer=config.count_embedding_as_layer,
        count_loss_as_layer=config.count_loss_as_layer,
    )


def schedule_problems(config: ParallelConfig, num_layers: int) -> list[str]:
    """Every rule that this split of `num_layers` into stages breaks, a line each with the way out.

    Any number of micro-batches will do for every schedule, so none is asked for.
    """
    problems = _virtual_problems(config)
    stages = num_stages(config)
    if config.layers_per_stage:
        return problems + _listed_problems(config, num_layers, stages)
    return problems + _even_problems(config, num_layers, stages)


def _virtual_problems(config: ParallelConfig) -> list[str]:
    virtual, schedule = config.virtual_stages, config.schedule
    shown = f"parallel.virtual_stages = {virtual}"
    if config.pp == 1:
        return [f"{shown}: one pipeline rank has one stage; nearest: 1, or pp = 2"] if virtual > 1 else []
    if schedule == "interleaved" and virtual == 1:
        return ['parallel.schedule = "interleaved" needs parallel.virtual_stages > 1; nearest: 2, or schedule = "1f1b"']
    if schedule in V_SCHEDULES and virtual not in (1, 2):
        return [f'{shown}: parallel.schedule = "{schedule}" has 2 stages a rank; nearest: 2']
    if schedule not in (*V_SCHEDULES, "interleaved") and virtual > 1:
        return [f'{shown}: parallel.schedule = "{schedule}" has one stage a rank; nearest: 1, or "interleaved"']
    return []


def _stages_shown(config: ParallelConfig, stages: int) -> str:
    return f"pp {config.pp}" if stages == config.pp else f"pp {config.pp} x {stages // config.pp} stages a rank"


def _listed_problems(config: ParallelConfig, num_layers: int, stages: int) -> list[str]:
    counts, problems = list(config.layers_per_stage), []
    shown = f"parallel.layers_per_stage = {counts}"
    if len(counts) != stages:
        even = [num_layers // stages + (s < num_layers % stages) for s in range(stages)]
        rule = f"{len(counts)} stages, but {_stages_shown(config, stages)} = {stages}"
        return [f"{shown}: {rule}; nearest: {even}"]
    if min(counts) < 0 or 0 in counts[1:-1]:
        problems.append(f"{shown}: only the first and the last stage can be without layers; give the others 1 or more")
    elif sum(counts) != num_layers:
        near = list(counts)  # the largest stages give, the smallest ones take
        while sum(near) != num_layers:
            step = 1 if sum(near) < num_layers else -1
            stage = near.index(min(near) if step > 0 else max(near))
            near[stage] += step
        problems.append(f"{shown}: {sum(counts)} layers, but model.num_layers is {num_layers}; nearest: {near}")
    flags = [n for n in ("count_embedding_as_layer", "count_loss_as_layer") if getattr(config, n)]
    problems += [f"parallel.{flag} = true is for an even split; leave it or layers_per_stage out" for flag in flags]
    return problems


def _even_problems(config: ParallelConfig, num_layers: int, stages: int) -> list[str]:
    counted = {"embedding": config.count_embedding_as_layer, "loss": config.count_loss_as_layer}
    extra = [name for name, on in counted.items() if on]
    total = num_layers + len(extra)
    if total % stages == 0:
        return []
    shown = " + ".join([f"model.num_layers {num_layers}", *extra]) + (f" = {total}" if extra else "")
    per_rank = stages // config.pp
    below = total // stages * stages
    layers = [str(n - len(extra)) for n in (below, below + stages) if n > len(extra)]
    fitting = [pp for pp in range(1, total // per_rank + 1) if total % (pp * per_rank) == 0]
    near = [str(pp) for pp in fitting if pp < config.pp][-1:] + [str(pp) for pp in fitting if pp > config.pp][:1]
    ways = [f"num_layers = {' or '.join(layers)}", *([f"pp = {' or '.join(near)}"] if near else [])]
    return [
        f"{shown} is not divisible by parallel.{_stages_shown(config, stages)}; "
        f"nearest: {', '.join(ways)}, or say layers_per_stage"
    ]
