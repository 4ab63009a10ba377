"""`megafp8 plan`: who stands where, what each pipeline rank does when, which GEMM is in FP8, before processes start."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from megafp8.parallel.mesh_config import ParallelConfig
    from megafp8.parallel.schedule_times import Costs
    from megafp8.plan.mesh_table import Axis, MeshPlan
    from megafp8.plan.step_plan import StepPlan
    from megafp8.train.config import RunConfig

HELP = "show who is where in a mesh, what each pipeline rank does when, or which GEMM is in which precision"
TAKES_OVERRIDES = True
EPILOG = """examples:
  megafp8 plan --mesh examples/llama3_8b/pretrain.toml --world 128
  megafp8 plan --mesh examples/llama3_8b/pretrain.toml --world 1024 --parallel.pp 4 --out mesh.csv
  megafp8 plan --schedule examples/llama3_8b/pretrain.toml --parallel.pp 4 --out timeline.svg
  megafp8 plan --schedule --parallel.pp 4 --parallel.schedule zb_v --micro-batches 8 --out timeline.png
  megafp8 plan --compare --parallel.pp 4 --micro-batches 12 --out schedules.svg
  megafp8 plan --precision examples/llama3_8b/pretrain.toml --precision.recipe mxfp8 --precision.last_layers_bf16 2
  megafp8 plan --precision examples/llama3_8b/pretrain.toml --precision.recipe delayed --all --json

Without CONFIG only --parallel.* is known, and a schedule is planned for one layer a stage. The bubble is idle time over
busy time; a peak of 4 means the activations of 4 micro-batches of a rank's share of the layers, all stages even."""

_SHOWN_RANKS = 16
_DRAWN = 16  # micro-batches of a run that are drawn unless told otherwise: more could not be read
_SHOWN_GROUPS = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the verb takes."""
    parser.add_argument("config", nargs="?", help="the run's TOML; without one, --parallel.* alone")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--mesh", action="store_true", help="rank -> node, place along each axis, layers, peers")
    what.add_argument("--schedule", action="store_true", help="bubble and peak of the schedule; --out draws it")
    what.add_argument("--compare", action="store_true", help="the same for all schedules, in one picture")
    what.add_argument("--precision", action="store_true", help="each GEMM: dims, recipe, backend, or why not in FP8")
    parser.add_argument("--all", action="store_true", help="--precision: each layer in a row of its own")
    parser.add_argument("--json", action="store_true", help="--precision: as JSON")
    parser.add_argument("--world", type=int, default=0, metavar="N", help="processes; default: one replica of the mesh")
    parser.add_argument("--gpus-per-node", type=int, default=8, metavar="N", help="ranks of a node (default 8)")
    parser.add_argument("--micro-batches", type=int, default=0, metavar="M", help="of a step; default: as CONFIG says")
    parser.add_argument("--costs", default="1,1,1", metavar="F,I,W", help="time of forward, input and weight gradients")
    parser.add_argument("--latency", type=float, default=0.0, metavar="T", help="time of a message, where F = 1")
    parser.add_argument("--loss-layers", type=float, metavar="N", help="output layer and loss take as long as N layers")
    parser.add_argument("--out", metavar="FILE", help="full table as .csv (--mesh), or picture: .svg, .png or .pdf")


def run(args: argparse.Namespace) -> int:
    """Print the plan, and write the file asked for."""
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=200)  # a pipe has no width: nothing is cut
    _check_arguments(args)
    if args.precision:
        from megafp8.cli.plan_precision import show

        show(console, args)
        return 0
    config = _load(args)
    if args.mesh:
        _plan_mesh(console, args, config)
    else:
        _plan_schedule(console, args, config)
    return 0


def _check_arguments(args: argparse.Namespace) -> None:
    from pathlib import Path

    from megafp8.core.errors import ConfigError

    problems = []
    for name, low in (("world", 0), ("gpus_per_node", 1), ("micro_batches", 0), ("latency", 0), ("loss_layers", 0)):
        value = getattr(args, name) or 0
        if not low <= value < float("inf"):
            problems.append(f"--{name.replace('_', '-')} {value}: must be {low} or more; nearest: {low}")
    if args.precision and not args.config:
        problems.append("--precision needs a CONFIG; e.g. megafp8 plan --precision run.toml")
    if (args.all or args.json) and not args.precision:
        problems.append("--all and --json are for --precision; leave them out")
    if args.precision and args.out:
        problems.append("--out is for --mesh, --schedule and --compare; use --json > FILE")
    endings = (".csv",) if args.mesh else (".svg", ".png", ".pdf")
    if args.out and not args.precision and Path(args.out).suffix.lower() not in endings:
        problems.append(f"--out {args.out}: {Path(args.out).suffix or 'no ending'} is not one of {', '.join(endings)}")
    numbers = args.costs.split(",")
    try:
        good = len(numbers) == 3 and all(0 < float(number) < float("inf") for number in numbers)
    except ValueError:
        good = False
    if not good:
        problems.append(f"--costs {args.costs}: three numbers above 0 are needed; nearest: 1,1,1")
    if not args.config and not (args.mesh or args.precision) and not args.micro_batches:
        problems.append("--micro-batches is needed where there is no CONFIG; e.g. --micro-batches 8")
    if problems:
        raise ConfigError("\n".join(problems))


def _load(args: argparse.Namespace) -> tuple[ParallelConfig, RunConfig | None, int]:
    """The mesh, the run if a TOML is given, and the number of ranks; all that is broken is refused."""
    from megafp8.core.config import apply_overrides, build, known_keys
    from megafp8.core.errors import ConfigError
    from megafp8.parallel.mesh_config import ParallelConfig, check_mesh
    from megafp8.parallel.stages import num_stages, schedule_problems
    from megafp8.train.check import smallest_world
    from megafp8.train.config import load_run_config, refuse_broken

    if args.config:
        run_config = load_run_config(args.config, args.overrides)
        world = args.world or smallest_world(run_config)
        refuse_broken(run_config, world)
        return run_config.parallel, run_config, world
    values = apply_overrides({}, args.overrides)
    unknown = [section for section in values if section != "parallel"]
    if unknown:
        keys = ", ".join(known_keys(ParallelConfig, ()))
        raise ConfigError(f"--{unknown[0]}.*: without CONFIG only --parallel.* is known: {keys}")
    try:
        parallel = build(ParallelConfig, values.get("parallel", {}))
    except ConfigError as error:
        raise ConfigError("\n".join(f"parallel.{line}" for line in str(error).splitlines())) from None
    world = args.world or parallel.pp * parallel.cp * parallel.tp * max(1, parallel.dp)
    layers = sum(parallel.layers_per_stage) or num_stages(parallel)
    problems = check_mesh(parallel, world) + schedule_problems(parallel, layers)
    if problems:
        raise ConfigError("\n".join(problems))
    return parallel, None, world


def _plan_mesh(
    console: Console, args: argparse.Namespace, loaded: tuple[ParallelConfig, RunConfig | None, int]
) -> None:
    from pathlib import Path

    from megafp8.core.jsonio import write_atomic
    from megafp8.parallel.stages import num_stages
    from megafp8.plan.mesh_table import mesh_csv, plan_mesh

    parallel, config, world = loaded
    plan = plan_mesh(
        parallel,
        world,
        gpus_per_node=args.gpus_per_node,
        num_layers=config.model.num_layers if config else num_stages(parallel),
        kv_heads=config.model.num_kv_heads if config else None,
        tied_embeddings=config.model.tied_embeddings if config else False,
    )
    if args.out:
        write_atomic(Path(args.out), mesh_csv(plan).encode())
    _print_axes(console, plan)
    console.print()
    _print_ranks(console, plan, all_in=args.out)
    if args.out:
        console.print(f"wrote {args.out}", soft_wrap=True)


def _print_axes(console: Console, plan: MeshPlan) -> None:
    from rich.table import Table

    shown = " ".join(f"{axis}={plan.sizes[axis]}" for axis in ("pp", "dp", "cp", "tp", "ep", "etp"))
    nodes = "1 node" if plan.num_nodes == 1 else f"{plan.num_nodes} nodes"
    console.print(f"[bold]{plan.world} ranks on {nodes} of {plan.gpus_per_node}: {shown}[/bold]; order {plan.order}")
    if not plan.axes:
        console.print("no rank talks to another")
        return
    table = Table("axis", "size", "groups", "of ranks", "nodes a group", box=None, pad_edge=False, header_style="dim")
    for axis in plan.axes:
        where = "1" if axis.nodes == 1 else f"up to {axis.nodes}"
        table.add_row(axis.name, str(axis.size), str(len(axis.groups)), _groups(axis), where)
    console.print(table)


def _groups(axis: Axis) -> str:
    from megafp8.plan.mesh_table import ranks_shown

    left = len(axis.groups) - _SHOWN_GROUPS
    words = [ranks_shown(group) for group in axis.groups[:_SHOWN_GROUPS]]
    return "  ".join(words) + (f"  and {left} more" if left > 0 else "")


def _print_ranks(console: Console, plan: MeshPlan, *, all_in: str | None) -> None:
    from rich.table import Table

    from megafp8.plan.mesh_table import DENSE_AXES, EXPERT_AXES, ranks_shown

    peers = [axis.name for axis in plan.axes]
    expert = [name for name in EXPERT_AXES if name in peers]
    heads = ["rank", "node", "gpu", *DENSE_AXES, *expert, "layers", *(f"{name} peers" for name in peers)]
    table = Table(*heads, box=None, pad_edge=False, header_style="dim")
    for place in plan.places[:_SHOWN_RANKS]:
        numbers = [place.rank, place.node, place.gpu, *(place.coords[name] for name in (*DENSE_AXES, *expert))]
        groups = [ranks_shown(place.peers[name]) if name in place.peers else "-" for name in peers]
        table.add_row(*map(str, numbers), place.layers, *groups)
    console.print(table)
    left = plan.world - _SHOWN_RANKS
    if left > 0:
        console.print(f"and {left} more ranks; all of them in {all_in or '--out FILE.csv'}")


def _plan_schedule(
    console: Console, args: argparse.Namespace, loaded: tuple[ParallelConfig, RunConfig | None, int]
) -> None:
    from pathlib import Path

    from megafp8.core.jsonio import write_atomic
    from megafp8.parallel.schedule_times import Costs
    from megafp8.parallel.stages import num_stages
    from megafp8.plan.step_plan import alternatives, plan_step

    parallel, config, world = loaded
    micro_batches = args.micro_batches or (_micro_batches(config, world) if config else 1)
    forward, input_grad, weight_grad = map(float, args.costs.split(","))
    costs = Costs(1.0, input_grad / forward, weight_grad / forward, args.latency)
    layers = config.model.num_layers if config else sum(parallel.layers_per_stage)
    choices, refused = [parallel], list[str]()
    if args.compare:
        # without a model there are as many layers as all schedules can split
        layers = layers or 2 * parallel.pp * max(1, parallel.virtual_stages)
        choices, refused = alternatives(parallel, layers)

    def planned(count: int) -> list[StepPlan]:
        return [
            plan_step(choice, layers or num_stages(choice), count, costs, loss_layers=args.loss_layers)
            for choice in choices
        ]

    plans = planned(micro_batches)
    _print_plans(console, plans, costs, compare=args.compare)
    for line in refused:
        console.print(f"left out: {line}", soft_wrap=True)
    if args.out:
        from megafp8.plan.timeline import draw

        drawn = micro_batches if args.micro_batches else min(micro_batches, max(_DRAWN, 3 * parallel.pp))
        write_atomic(Path(args.out), draw(planned(drawn), Path(args.out).suffix[1:].lower()))
        fewer = f" with {drawn} of {micro_batches} micro-batches (--micro-batches {micro_batches} draws all)"
        console.print(f"wrote {args.out}{fewer if drawn < micro_batches else ''}", soft_wrap=True)


def _micro_batches(config: RunConfig, world: int) -> int:
    from megafp8.parallel.mesh_config import axis_sizes

    return config.train.global_batch // (config.train.micro_batch * axis_sizes(config.parallel, world)["dp"])


def _print_plans(console: Console, plans: list[StepPlan], costs: Costs, *, compare: bool) -> None:
    from rich.table import Table

    first = plans[0]
    shape = f"{first.schedule.num_ranks} pipeline ranks, {first.schedule.micro_batches} micro-batches"
    times = f"F = {costs.forward:g}, I = {costs.input_grad:g}, W = {costs.weight_grad:g}, message {costs.latency:g}"
    console.print(f"[bold]{shape}[/bold]; {times}")
    table = Table("schedule", "stages a rank", "bubble", "closed form", "step", "peak of live activations, by rank",
                  box=None, pad_edge=False, header_style="dim")  # fmt: skip
    for plan in plans:
        closed = "-" if plan.closed is None else f"{plan.closed:.2%} = {plan.formula}"
        stages = plan.schedule.num_stages // plan.schedule.num_ranks
        table.add_row(
            plan.name, str(stages), f"{plan.bubble:.2%}", closed, f"{plan.report.makespan:.4g}", _peaks(plan.peaks)
        )
    console.print(table)
    if not compare:
        console.print()
        _print_stages(console, first)


def _peaks(peaks: tuple[float, ...]) -> str:
    words = [f"{peak:.3g}" for peak in peaks]
    if len(set(words)) == 1:
        return f"{words[0]} on each"
    return " ".join(words) if len(words) <= _SHOWN_RANKS else f"{max(peaks):.3g} at most, {min(peaks):.3g} at least"


def _print_stages(console: Console, plan: StepPlan) -> None:
    from rich.table import Table

    from megafp8.plan.mesh_table import span_shown

    table = Table("rank", "stages", "layers", "idle", "peak", box=None, pad_edge=False, header_style="dim")
    for rank in range(plan.schedule.num_ranks):
        stages = plan.schedule.stages_of(rank)
        layers = " | ".join(span_shown(plan.layers[stage]) for stage in stages)
        idle = f"{plan.idle(rank):.1%}"
        table.add_row(str(rank), ", ".join(map(str, stages)), layers, idle, f"{plan.peaks[rank]:.3g}")
    console.print(table)
