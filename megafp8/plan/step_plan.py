"""What each pipeline rank does when: a schedule of this model, timed, with its bubble and its peak. No torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

from megafp8.parallel.actions import Schedule
from megafp8.parallel.mesh_config import ParallelConfig
from megafp8.parallel.schedule_check import Report, closed_form, peak_live, verify
from megafp8.parallel.schedule_times import Costs, simulate
from megafp8.parallel.schedules import SCHEDULES, make_schedule
from megafp8.parallel.stages import num_stages, schedule_problems, spans_of

FORMULAS = {
    "gpipe": "(p-1)/m",
    "1f1b": "(p-1)/m",
    "interleaved": "(p-1)/(m v)",
    "zb_h1": "(p-1)(F+I-W)/(m (F+I+W))",
    "zb_v": "(p-1) F/(2m (F+I+W))",
    "dualpipe_v": "(p-1)(F+I-W)/(2m (F+I+W))",
}
NAMES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved": "Interleaved 1F1B",
    "zb_h1": "ZB-H1",
    "zb_v": "ZB-V",
    "dualpipe_v": "DualPipe-V",
}


@dataclass(frozen=True)
class StepPlan:
    """A schedule, proven and timed. One unit of time is the forward pass of the p-th part of the layers if F = 1.

    `layers` holds the half-open span of each stage; `peaks` the most activations alive on each rank, in micro-batches
    of the p-th part of the layers, so that schedules with more stages a rank compare; `closed` is the bubble that the
    formula gives, None where it does not hold (uneven stages, messages that take time, a pipeline that is not filled).
    """

    schedule: Schedule
    report: Report
    costs: Costs
    layers: tuple[tuple[int, int], ...]
    peaks: tuple[float, ...]
    closed: float | None

    @property
    def name(self) -> str:
        """The schedule's name as papers write it."""
        return NAMES[self.schedule.name]

    @property
    def formula(self) -> str:
        """The closed form in letters."""
        return FORMULAS[self.schedule.name]

    @property
    def bubble(self) -> float:
        """Idle time of all ranks over their busy time."""
        return self.report.bubble

    def idle(self, rank: int) -> float:
        """The part of the step in which `rank` does nothing."""
        busy = sum(timed.end - timed.start for timed in self.report.times[rank])
        return 1.0 - busy / self.report.makespan


def plan_step(
    config: ParallelConfig,
    num_layers: int,
    micro_batches: int,
    costs: Costs,
    *,
    loss_layers: float | None = None,
    weight_share: float = 1.0,
) -> StepPlan:
    """Prove and time the schedule of `config`, whose split has been checked; a stage costs as many layers as it has.

    Args:
        config: pp, schedule and split.
        num_layers: of the model.
        micro_batches: of a step.
        costs: of a pass through the p-th part of the layers.
        loss_layers: time of output layer and loss, in layers; None: as the even split counts them, 0 or 1.
        weight_share: the part of activations that is kept from I until W.
    """
    schedule = make_schedule(config.schedule, config.pp, config.virtual_stages, micro_batches)
    spans = spans_of(config, num_layers)
    scale = _stage_scale(config, num_layers, loss_layers)
    costs = replace(costs, stage_scale=scale)
    shares = [(end - start) * config.pp / num_layers for start, end in spans]
    return StepPlan(
        schedule=schedule,
        report=verify(schedule, costs, weight_share=weight_share),
        costs=costs,
        layers=tuple(spans),
        peaks=tuple(peak_live(a, weight_share=weight_share, sizes=shares) for a in schedule.actions),
        closed=_closed(config, micro_batches, costs),
    )


def bubble_of(config: ParallelConfig, num_layers: int, micro_batches: int) -> float:
    """Idle over busy time if F, I and W take the same: the closed form where it holds, else timed."""
    costs = Costs(stage_scale=_stage_scale(config, num_layers, None))
    closed = _closed(config, micro_batches, costs)
    if closed is not None:
        return closed
    times = simulate(make_schedule(config.schedule, config.pp, config.virtual_stages, micro_batches), costs)
    busy = sum(timed.end - timed.start for actions in times for timed in actions)
    return len(times) * max(actions[-1].end for actions in times) / busy - 1.0


def _stage_scale(config: ParallelConfig, num_layers: int, loss_layers: float | None) -> tuple[float, ...]:
    """Time of each stage in p-th parts of the layers; what is counted or said beside the layers comes on top."""
    counted = [float(end - start) for start, end in spans_of(config, num_layers)]
    even_split = not config.layers_per_stage
    counted[0] += even_split and config.count_embedding_as_layer
    counted[-1] += even_split and config.count_loss_as_layer if loss_layers is None else loss_layers
    whole = sum(counted) if loss_layers is None else num_layers
    return tuple(count * config.pp / whole for count in counted)


def _closed(config: ParallelConfig, micro_batches: int, costs: Costs) -> float | None:
    """The closed form of the bubble, None where it does not hold."""
    even = len(set(costs.stage_scale)) == 1 and not costs.latency
    filled = micro_batches >= _fill(config) or config.schedule in ("gpipe", "1f1b")
    virtual = num_stages(config) // config.pp
    return closed_form(config.schedule, config.pp, virtual, micro_batches, costs) if even and filled else None


def _fill(config: ParallelConfig) -> int:
    """Micro-batches that fill the pipeline."""
    return {"zb_v": 2 * config.pp - 1, "dualpipe_v": 2 * config.pp}.get(config.schedule, config.pp)


def alternatives(config: ParallelConfig, num_layers: int) -> tuple[list[ParallelConfig], list[str]]:
    """`config` with each schedule that can split the layers; and for each that cannot, why not.

    Listed layers are for one number of stages; other numbers split evenly. Interleaved gets 2 stages a rank if
    `config` says no number.
    """
    found, refused = [], []
    for name in SCHEDULES:
        virtual = 1
        if name == "interleaved":
            virtual = config.virtual_stages if config.virtual_stages > 1 else 2
        other = replace(config, schedule=name, virtual_stages=virtual)  # type: ignore[arg-type]  # one of SCHEDULES
        if num_stages(other) != num_stages(config):
            other = replace(other, layers_per_stage=())
        problems = schedule_problems(other, num_layers)
        if problems:
            refused.append(f"{NAMES[name]}: {'; '.join(problems)}")
        else:
            found.append(other)
    return found, refused
