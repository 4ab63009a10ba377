"""The order of forward and backward passes of each pipeline rank, as pure functions. No torch, no process.

Here are the schedules with a whole backward pass; those that split it are in `zero_bubble`, and `make_schedule` knows
them all. Each takes the number of ranks and micro-batches and returns a list of actions for each rank.
"""

from __future__ import annotations

from megafp8.parallel.actions import Action, Schedule
from megafp8.parallel.stages import placement_of, stages_per_rank
from megafp8.parallel.zero_bubble import dualpipe_v, zb_h1, zb_v

__all__ = ["SCHEDULES", "Action", "Schedule", "gpipe", "interleaved", "make_schedule", "one_f_one_b"]

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb_h1", "zb_v", "dualpipe_v")


def make_schedule(name: str, ranks: int, virtual: int, micro_batches: int) -> Schedule:
    """The schedule `name` of `micro_batches` over `ranks` pipeline ranks; stage s of a V stands on a rank twice.

    Args:
        name: one of `SCHEDULES`.
        ranks: pipeline ranks; with one rank every schedule is F, B, F, B on a single stage.
        virtual: stages a rank of "interleaved"; the other names have 1 or, for a V, 2, whatever is given.
        micro_batches: any number from 1 on, also fewer than stages.
    """
    assert name in SCHEDULES and ranks > 0 and micro_batches > 0, (name, ranks, micro_batches)
    per_rank = stages_per_rank(name, ranks, virtual)
    placement = placement_of(name, ranks, virtual)
    if ranks == 1 and per_rank == 1:
        actions = one_f_one_b(1, micro_batches)
    elif name == "interleaved":
        actions = interleaved(ranks, per_rank, micro_batches)
    else:
        plain = {"gpipe": gpipe, "1f1b": one_f_one_b, "zb_h1": zb_h1, "zb_v": zb_v, "dualpipe_v": dualpipe_v}
        actions = plain[name](ranks, micro_batches)
    return Schedule(name, tuple(map(tuple, actions)), placement, micro_batches)


def gpipe(ranks: int, micro_batches: int) -> list[list[Action]]:
    """All forward passes, then all backward passes; every micro-batch is alive at once.

    Source: Huang et al., GPipe (arXiv 1811.06965), figure 2. Backward runs in the order of forward, so that the
    gradients of the first micro-batch come first, as in all other schedules.
    """
    batches = range(micro_batches)
    return [[Action("F", r, i) for i in batches] + [Action("B", r, i) for i in batches] for r in range(ranks)]


def one_f_one_b(ranks: int, micro_batches: int) -> list[list[Action]]:
    """A forward pass for each backward pass once the pipeline is full; rank r keeps at most ranks - r alive.

    Source: Narayanan et al., PipeDream-Flush (arXiv 2006.09503) and Megatron-LM (arXiv 2104.04473), section 2.2.
    """
    lists = []
    for rank in range(ranks):
        forward = [Action("F", rank, i) for i in range(micro_batches)]
        backward = [Action("B", rank, i) for i in range(micro_batches)]
        lists.append(_alternate(forward, backward, ahead=ranks - 1 - rank))
    return lists


def interleaved(ranks: int, virtual: int, micro_batches: int) -> list[list[Action]]:
    """1F1B over `virtual` stages a rank: stage s stands on rank s % ranks, micro-batches move in groups.

    A group goes through the first stage of a rank, then through its second, and so on; backward in reverse. Groups are
    of `ranks` micro-batches where that divides, as in the paper. Else they are somewhat larger, the larger ones first:
    this keeps the paper's bubble for any number from `ranks` on, and costs at most that many more live activations a
    stage. Fewer are one group, which cannot fill the pipeline.

    Source: Narayanan et al. (arXiv 2104.04473), section 2.2; warm-up as there: 2 (ranks - 1 - rank) passes, and one
    group for each further stage of the rank.
    """
    count = max(1, micro_batches // ranks)
    groups: list[range] = []
    for left in range(count, 0, -1):
        start = groups[-1].stop if groups else 0
        groups.append(range(start, start - (start - micro_batches) // left))
    lists = []
    for rank in range(ranks):
        stages = range(rank, ranks * virtual, ranks)
        forward = [Action("F", s, i) for group in groups for s in stages for i in group]
        backward = [Action("B", s, i) for group in groups for s in reversed(stages) for i in group]
        lists.append(_alternate(forward, backward, ahead=2 * (ranks - 1 - rank) + (virtual - 1) * len(groups[0])))
    return lists


def _alternate(forward: list[Action], backward: list[Action], *, ahead: int) -> list[Action]:
    """`ahead` forward passes, then one forward and one backward in turn, then the backward passes that are left."""
    ahead = min(ahead, len(forward))
    actions = forward[:ahead]
    for one, other in zip(forward[ahead:], backward):
        actions += [one, other]
    return actions + backward[len(forward) - ahead :]
