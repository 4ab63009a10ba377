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
